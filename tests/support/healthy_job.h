// SPDX-License-Identifier: Apache-2.0
// A job that does everything right, in a daemon to which something else does wrong: every byte of it
// is known, so that "nothing was lost" can be asked after each step.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"
#include "tests/support/training.h"

namespace forebay::testing {

struct HealthyJobOptions {
  std::string socket;
  std::string job = "healthy";
  JobShape shape = {.world_size = 1, .groups = 2, .group_elems = 1000};
  uint64_t grad_arena_bytes = 0;  // 0: the client's own choice
};

// Every rank of a job, trained with the values of training.h.
//
// Threads  One.
class HealthyJob {
 public:
  static constexpr uint64_t kSeed = 1;  // of its initial parameters

  // Attaches all ranks. A job that is there already has the initial parameters of kSeed and was
  // trained with TrainStep alone.
  static absl::StatusOr<std::unique_ptr<HealthyJob>> Attach(const HealthyJobOptions& options);

  // One step of all ranks, then HoldsItsBytes().
  absl::Status TrainOneMoreStep();

  // Its last part, where every rank has delivered every group (DeliverGradient) of the next step.
  absl::Status StepAsDelivered();

  // Weights and states are those of the committed step, byte by byte.
  absl::Status HoldsItsBytes();

  uint64_t committed_step() const { return committed_step_; }
  const protocol::Layout& layout() const { return ranks_[0]->layout(); }
  client::Attachment& rank(uint32_t rank) { return *ranks_[rank]; }

 private:
  enum class Part : uint8_t { kWholeStep, kAsDelivered };

  explicit HealthyJob(std::vector<std::unique_ptr<client::Attachment>> ranks);
  absl::Status Step(Part part);
  void AdvanceReference(uint64_t t);

  std::vector<std::unique_ptr<client::Attachment>> ranks_;
  ReferenceTrainer reference_;
  uint64_t committed_step_ = 0;
};

// A job by itself for one step: attaches, trains, detaches.
absl::Status TrainsOneMoreStep(const HealthyJobOptions& options);

}  // namespace forebay::testing
