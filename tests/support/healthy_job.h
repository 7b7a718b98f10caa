// SPDX-License-Identifier: Apache-2.0
// A well-behaved job in a daemon that is under attack. All its bytes are known, so that a test can check after each step that
// none was lost.
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
  uint64_t grad_arena_bytes = 0;  // 0: the client's default
};

// Every rank of a job, trained with the values of training.h.
//
// Threads  One.
class HealthyJob {
 public:
  static constexpr uint64_t kSeed = 1;  // seed of the initial parameters

  // Attaches all ranks. An existing job must have the initial parameters of kSeed and must have been trained with TrainStep
  // alone.
  static absl::StatusOr<std::unique_ptr<HealthyJob>> Attach(const HealthyJobOptions& options);

  // Trains one step on all ranks, then calls HoldsItsBytes().
  absl::Status TrainOneMoreStep();

  // Calls step on all ranks, then HoldsItsBytes(). Every rank must have delivered every group of the next step
  // (DeliverGradient).
  absl::Status StepAsDelivered();

  // Returns OK if weights and states are those of the committed step, byte by byte.
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

// Attaches a job, trains one step and detaches.
absl::Status TrainsOneMoreStep(const HealthyJobOptions& options);

}  // namespace forebay::testing
