// SPDX-License-Identifier: Apache-2.0
// The step of a job over several nodes: this node prepares the step, and the nodes decide it together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/base/durable_job.h"
#include "daemon/core/base/job_tasks.h"
#include "daemon/core/sessions/session.h"
#include "daemon/core/sessions/step_barrier.h"
#include "daemon/core/step/step_gathering.h"
#include "daemon/core/step/step_parts.h"
#include "protocol/step_summary.h"
#include "protocol/wire.h"

namespace forebay::daemon {

// A node prepares a step and hands its summary to the ranks. The ranks exchange the summaries, and bring the decision of all
// nodes to each node. The decision of the committed step is retained, so that ranks that attach again learn it.
//
// Example: step 42 of a job on nodes A and B
//   1. All ranks of A have called step 42. A prepares it: its ranks get the summary of A (Prepare). The loss of a rank no longer
//      undoes the step on A.
//   2. B prepares it too. Each rank combines both summaries, with the same result: kCommit.
//   3. The first rank of A brings the decision (Decide). A decides step 42 with the norm and the parameters of both nodes.
//   If a rank of B is lost before B prepares the step, the ranks bring kDrop: A gives up step 42 (GiveUp), and gathers it again.
//
// Ownership  The arguments of the constructor outlive this object.
class NodesDecision {
 public:
  // Sets the recovered job's decision on its committed step.
  NodesDecision(StepParts& step, StepGathering& gathering);

  // Prepares the step once its gradients are added: hands the summary of this node to the ranks that have called the step.
  void Prepare();
  // Prepares a step again that the previous daemon has prepared. Its sums and extra_state are in the step arena.
  void Resume(const KeptUpdate& update);
  // Answers a call of the prepared step.
  void AnswerPrepared(const Session& session, const CommandId& command);

  // Errors  E_PROTOCOL  the summary decides nothing on the command's step.
  //         E_STEP      the summary commits a step that is not prepared, or that the ranks of this node have called with other
  //                     scalars.
  absl::Status Check(const protocol::Command& command, const protocol::StepSummary& summary) const;
  // Commits the prepared step with a checked decision.
  void Decide(protocol::StepSummary decision);
  // Gives up the prepared step. With kDrop, the gradients are dropped, and otherwise retained.
  void GiveUp(protocol::StepDecision decision);
  // The decision on the next step; nullopt until a rank has brought it.
  const std::optional<protocol::StepSummary>& decision() const { return decision_; }

  // Retains decision() as the decision of the committed step.
  void Commit();
  // Returns the encoded decision on the committed step. Empty if this node does not know it.
  std::vector<std::byte> EncodeLast() const;

 private:
  protocol::StepSummary SummaryOfNode() const;
  uint64_t ScalarsOf(const StepCall& call) const;
  void Record();

  StepParts& step_;
  StepGathering& gathering_;
  // Encoded summary of this node, with the digests of replicas behind it.
  std::vector<std::byte> prepared_;
  // The previous daemon has prepared the step. Only that daemon knew which ranks' gradients the sums have.
  bool is_prepared_before_ = false;
  std::optional<protocol::StepSummary> decision_;
  std::optional<protocol::StepSummary> last_;
};

}  // namespace forebay::daemon
