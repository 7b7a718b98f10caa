// SPDX-License-Identifier: Apache-2.0
// The decision of all nodes on a step of a job, as far as this node knows the decision.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/plan/job_spec.h"
#include "daemon/core/sessions/step_barrier.h"
#include "protocol/step_summary.h"
#include "protocol/wire.h"

namespace forebay::daemon {

// A node prepares a step and hands its summary to the ranks. The ranks bring the decision of all nodes. The decision of the
// committed step is retained, so that ranks that attach again learn it.
//
// Ownership  The argument of the constructor outlives this object.
class NodesDecision {
 public:
  explicit NodesDecision(const JobSpec& spec) : spec_(spec) {}

  // Sets the summary of this node, with the digests of replicas behind it.
  void Prepare(const protocol::StepSummary& own, std::span<const uint64_t> digests);
  // Sets the summary of a step that the previous daemon prepared. Only that daemon knew which ranks' gradients the sums have.
  void PrepareBefore(std::vector<std::byte> summary);
  const std::vector<std::byte>& prepared_summary() const { return prepared_; }
  // Returns true at the first call after PrepareBefore().
  bool DrainPreparedBefore() { return std::exchange(is_prepared_before_, false); }

  // Errors  E_PROTOCOL  the summary decides nothing on the command's step.
  //         E_STEP      the summary commits a step that is not prepared, or has other scalars than `own`.
  enum class Prepared : uint8_t { kNo, kYes };
  absl::Status Check(const protocol::Command& command, const protocol::StepSummary& summary,
                     Prepared prepared, const StepCall* own) const;
  void Set(protocol::StepSummary decision) { decision_ = std::move(decision); }
  // The decision on the next step; nullopt until a rank has brought it.
  const std::optional<protocol::StepSummary>& decision() const { return decision_; }
  double squares() const;  // sum of the squares of all nodes' gradients
  std::pmr::vector<bool> ParamsWithGradient(std::pmr::memory_resource* memory) const;

  // Retains decision() as the decision of the committed step.
  void Commit();
  void Recover(std::span<const std::byte> last);
  // Returns the encoded decision on the committed step. Empty if this node does not know it.
  std::vector<std::byte> EncodeLast() const;

  // Returns a hash of all scalars of a call that determine the update, bit by bit.
  uint64_t ScalarsOf(const StepCall& call) const;

 private:
  const JobSpec& spec_;
  std::vector<std::byte> prepared_;
  bool is_prepared_before_ = false;
  std::optional<protocol::StepSummary> decision_;
  std::optional<protocol::StepSummary> last_;
};

}  // namespace forebay::daemon
