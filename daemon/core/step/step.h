// SPDX-License-Identifier: Apache-2.0
// The step of a job: decides the step once it is gathered, commits it and updates the blocks.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/base/activity.h"
#include "daemon/core/base/durable_job.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/job_tasks.h"
#include "daemon/core/plan/job_spec.h"
#include "daemon/core/sessions/lease_table.h"
#include "daemon/core/sessions/membership.h"
#include "daemon/core/sessions/session.h"
#include "daemon/core/step/nodes_decision.h"
#include "daemon/core/step/step_commands.h"
#include "daemon/core/step/step_gathering.h"
#include "daemon/core/step/step_parts.h"
#include "daemon/core/update/durable_steps.h"
#include "daemon/core/update/state_access.h"
#include "daemon/core/update/step_pipeline.h"
#include "daemon/core/update/weights_cache.h"

namespace forebay::daemon {

// A step is committed when it is decided. The next step is gathered while the blocks of the committed step are updated. One
// step at a time is updated: the decision of the next step waits until the committed step is published. A fetch of a
// partition's weights, and the addition of the partition's gradients, wait only for blocks of that partition.
//
//   StepParts      the phase (StepPhase) and the numbers of the step, and its parts
//   StepCommands   checks and answers the commands of ranks
//   StepGathering  gathers the step in attempts
//   NodesDecision  prepares the step of a job over several nodes
//
// Invariants (CheckInvariants())
// 1. The published step is the committed step or the step before.
// 2. While masters are set, or a committed step is not published, the pipeline updates blocks, unless the update of the previous
//    daemon is still to be resumed. Otherwise no block is updated. A failed job is exempt.
// 3. While blocks are updated, no client reads or writes states.
// 4. A call of a committed step waits only for its publication or, at level step, for its durable step.
//
// An example with two ranks. Step 41 is published.
//
//   rank 0 delivers its gradients, and calls step 42   kOpen; the call waits
//   rank 1 delivers its gradients, and calls step 42   kReducing; the last gradients are added
//   the decision                                       kOpen; committed 42, published 41; the update of 42 begins
//   rank 0 delivers gradients of step 43               kOpen; they are added once the partition's blocks are updated
//   both ranks call step 43                            kReducing; the decision waits for the publication of 42
//   the last block is written                          committed 42, published 42; then the decision of 43
//
// Ownership  The arguments of the constructor outlive this object.
class Step {
 public:
  using Phase = StepPhase;

  Step(const JobSpec& spec, JobTasks& io, Membership& members, StepPipeline& pipeline,
       DurableSteps& durable, const StateAccess& access, WeightsCache& weights,
       const LeaseTable& leases);

  StepParts& parts() { return parts_; }
  const StepParts& parts() const { return parts_; }
  StepGathering& gathering() { return gathering_; }
  StepCommands& commands() { return commands_; }
  const NodesDecision& nodes() const { return nodes_; }
  Phase phase() const { return parts_.phase; }
  uint64_t committed_step() const { return parts_.committed_step; }
  uint64_t published_step() const { return parts_.published_step; }

  // Continues an update, or a prepared step, that the previous daemon did not end.
  void Resume(const KeptUpdate& update);
  // Sets masters from the initial parameters, which have all been written. `commands` (kInitialDone) are answered when the
  // blocks hold their masters. `has_masters`: the blocks hold their masters already.
  void BeginMasters(std::vector<CommandId> commands, bool has_masters);

  // Continues the update, and publishes the step when the update ends.
  void AdvanceUpdate();
  // Starts all tasks that can start. If `may_update_early` is false, no early update begins.
  void Advance(bool may_update_early);
  // Answers the calls that waited for the newest published step to be durable.
  void OnDurable();
  // Returns the values of the newest published step.
  DurableSteps::Published PublishedNow() const;
  // Adds the values of the published step to the job's record, also the values in answers to calls of the step. `is_last`: the
  // job stops, and nothing follows the record. Otherwise RecordAttempt is emitted before the first gradient of the next step.
  void Record(KeptMemory& kept, bool is_last);

  // Answers the waiting commands of a session. Its contributions and its step call belong to the job and are not answered.
  void AnswerWaiting(Session& session, const absl::Status& status);
  // Answers all commands that wait for the step with `first_error`.
  void Fail(const absl::Status& first_error);

  // Returns the activities that are under way in the parts of the job that a step uses.
  Activities UnderWay() const;
  // True if the job can switch to float32 accumulators: no block is being updated from the old accumulators, and no task adds to
  // them.
  bool MayUseFloatSums() const;
  // True if the step is quiescent: no command of the next step has arrived, every call is answered, and every overflow has been
  // reported to the live ranks.
  bool is_quiet() const;
  uint64_t unanswered(const Session& session) const;
  void CheckInvariants() const;

 private:
  void EndMasters();
  void AnswerInitialDone();
  void DecideWhenReduced();
  void Decide();
  RecordDecision DecisionOf(const StepOrder& order) const;
  void ArmLeaseTimer();
  void Commit();
  void Publish();

  StepParts parts_;
  const StateAccess& access_;
  WeightsCache& weights_;
  const LeaseTable& leases_;
  StepGathering gathering_;
  NodesDecision nodes_;
  StepCommands commands_;
  bool is_to_be_resumed_;                // Resume() has not continued the update yet
  std::vector<CommandId> initial_done_;  // commands that wait for the end of Phase::kMasters
};

}  // namespace forebay::daemon
