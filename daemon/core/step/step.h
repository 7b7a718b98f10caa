// SPDX-License-Identifier: Apache-2.0
// The step of a job: gathers gradients and step calls, decides the step, commits it and updates the blocks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory_resource>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/base/activity.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/job_tasks.h"
#include "daemon/core/base/trace.h"
#include "daemon/core/plan/job_spec.h"
#include "daemon/core/sessions/command_check.h"
#include "daemon/core/sessions/lease_table.h"
#include "daemon/core/sessions/membership.h"
#include "daemon/core/sessions/session.h"
#include "daemon/core/sessions/step_barrier.h"
#include "daemon/core/step/announcement.h"
#include "daemon/core/step/gradient_accumulator.h"
#include "daemon/core/step/nodes_decision.h"
#include "daemon/core/step/step_answers.h"
#include "daemon/core/step/step_attempts.h"
#include "daemon/core/step/step_extra_states.h"
#include "daemon/core/update/durable_steps.h"
#include "daemon/core/update/replica_digests.h"
#include "daemon/core/update/state_access.h"
#include "daemon/core/update/step_pipeline.h"
#include "daemon/core/update/weights_cache.h"
#include "protocol/step_summary.h"
#include "protocol/wire.h"

namespace forebay::daemon {

// A step is committed when it is decided. The next step is gathered while the blocks of the committed step are updated. One
// step at a time is updated: the decision of the next step waits until the committed step is published. A fetch of a
// partition's weights, and the addition of the partition's gradients, wait only for blocks of that partition.
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
  enum class Phase : uint8_t {
    kOpen,      // gathers gradients (or initial parameters) of the next step
    kMasters,   // sets masters from the initial parameters
    kReducing,  // all ranks have called step; adds the last gradients
    kPrepared,  // gradients are added; waits for the decision of the nodes
    kFailed,    // the job has failed, and every call gets the first error
  };

  Step(const JobSpec& spec, JobTasks& io, Membership& members, StepPipeline& pipeline,
       DurableSteps& durable, const StateAccess& access, WeightsCache& weights,
       const LeaseTable& leases);

  // True if a published step is being made durable, and the calls of that step wait until it is durable.
  bool is_awaiting_durable() const { return answers_.is_durable_first() && durable_.in_progress(); }

  // Sets a new Step to continue after the step of a recovered job.
  void Recover(const DurableJob& job);
  // Continues an update, or a prepared step, that the previous daemon did not end. Called after Recover().
  void Resume(const KeptUpdate& update);

  // Sets masters from the initial parameters, which have all been written. `commands` (kInitialDone) are answered when the
  // blocks hold their masters. `has_masters`: the blocks hold their masters already.
  void BeginMasters(std::vector<CommandId> commands, bool has_masters);

  // Handle checked commands (CheckCommand) of a current session.
  void HandleGradient(Session& session, const protocol::Command& command);
  void HandleGradNorm(Session& session, const protocol::Command& command);
  void HandleAnnouncement(Session& session, const protocol::Command& command);
  void HandleStep(Session& session, const protocol::Command& command);
  void OnStepRequest(Session& session, const StepRequestCopied& copied);
  void HandleDecision(Session& session, const protocol::Command& command);
  void OnSummary(Session& session, const SummaryCopied& copied);
  // Returns the step that is prepared and not decided, or 0 if no step is prepared.
  uint64_t prepared_step() const { return phase_ == Phase::kPrepared ? committed_step_ + 1 : 0; }
  // Returns the encoded decision of the nodes on the committed step. Empty if this node does not know the decision.
  std::vector<std::byte> LastSummary() const { return nodes_.EncodeLast(); }

  // Handle tasks that have ended. After an error the caller fails the job (Fail()).
  absl::Status OnGradientTask(TaskKind kind, const TaskDone& done);
  absl::Status OnExtraStateCopied(const TaskDone& done);
  void OnDigested(const TaskDone& done) { digests_.OnDigested(done); }
  // Returns the activities that are under way in the parts of the job that a step uses.
  Activities UnderWay() const;

  // Continues the update, and publishes the step when the update ends.
  void AdvanceUpdate();
  // Starts all tasks that can start. If `may_update_early` is false, no early update begins.
  void Advance(bool may_update_early);
  // Drops the early updates, because masters are going to be written. No early update begins before the next announcement.
  void DropEarlyUpdates();
  // Answers the calls that waited for the newest published step to be durable.
  void OnDurable();
  // Returns the values of the newest published step.
  DurableSteps::Published PublishedNow() const;
  // True if the step is quiescent: no command of the next step has arrived, every call is answered, and every overflow has been
  // reported to the live ranks.
  bool is_quiet() const;
  // Drops the gradients that were delivered to the next step, and begins a new attempt.
  void GiveUpAttempt();
  // Adds the values of the published step to the job's record, also the values in answers to calls of the step. `is_last`: the
  // job stops, and nothing follows the record. Otherwise RecordAttempt is emitted before the first gradient of the next step.
  void Record(KeptMemory& kept, bool is_last);

  // True if the rank of the session has delivered gradients of the next step, or has called it.
  bool HasContributed(const Session& session) const;
  bool HasCalled(const Session& session) const {
    return barrier_.has(session.rank) || session.step_being_copied.has_value() ||
           phase_ != Phase::kOpen;
  }
  void OnRankDetached(uint32_t rank);  // refuses the step calls of all ranks
  // Handles the loss of a rank. A step that not all ranks have called is dropped. A step that all ranks have called continues.
  void OnRankFailed(const Session* lost, const absl::Status& status);
  // Answers the waiting commands of a session. Its contributions and its step call belong to the job and are not answered.
  void AnswerWaiting(Session& session, const absl::Status& status);
  bool UsesArenaOf(SessionId session) const { return gradients_.UsesArenaOf(session); }

  // Drops the gradients that were delivered to the step, because no rank of this world will call the step.
  void DropForNewWorld();
  // Follows a change of the spec's world size and plan. The extra_state of ranks in both worlds is retained. Called in phase
  // kOpen, before gradients are delivered and while no task runs.
  void OnWorldChanged();

  // Answers all commands that wait for the step with `first_error`.
  void Fail(const absl::Status& first_error);

  Phase phase() const { return phase_; }
  uint64_t committed_step() const { return committed_step_; }
  uint64_t published_step() const { return published_step_; }
  uint64_t attempt() const { return attempts_.newest(); }
  // True if gradients of the next step have been delivered, or the step is announced.
  bool is_gathering() const {
    return !gradients_.empty() || announcement_.state() != Announcement::State::kNone;
  }
  // True if a further backward pass waits for sums in float32 (GradientAccumulator).
  bool needs_float_sums() const { return gradients_.needs_float_sums(); }
  bool MayUseFloatSums() const;
  void OnFloatSums(std::vector<uint64_t> narrow_offsets);
  void RefuseFloatSums(const absl::Status& status) { gradients_.RefuseFloatSums(status); }
  // True if a fetch of `rank` is answered now. A rank's fetch waits between the rank's step call and the decision, and until
  // the partition's blocks are updated. A reader's fetch (`rank` is nullopt) waits between the decision and the publication.
  bool MayFetch(std::optional<uint32_t> rank, uint32_t partition) const;
  // Returns the step whose weights a fetch asks for: the next step if the rank has called it, otherwise the committed step.
  uint64_t FetchStep(std::optional<uint32_t> rank) const;
  void RecordFetch(uint32_t partition) { trace_.Record(partition, phase_ != Phase::kOpen); }
  const std::vector<uint32_t>& trace() const { return trace_.committed(); }
  const StepExtraStates& extra() const { return extra_; }
  uint64_t unanswered(const Session& session) const;
  void CheckInvariants() const;

 private:
  void BeginAttempt(uint64_t attempt, const absl::Status& status);
  void AnswerCall(const StepCall& call, const absl::Status& status, uint16_t flags = 0);
  bool HasTaken(const Session& session, const protocol::Command& command) const;
  SumPages::Range RangeOf(const protocol::Command& command) const;  // range of a gradient
  void FollowAttempt(const Session& session, const protocol::Command& command);
  void DropFaulty();
  absl::Status DroppedError(uint64_t attempt) const {
    return attempts_.DroppedError(attempt, committed_step_ + 1);
  }
  absl::Status StepNumberError(uint64_t step) const;
  void CopyRequest(Session& session, const protocol::Command& command);
  void Announce(uint32_t rank, StepCall call);
  StepOrder OrderOf(const StepCall& call, double scale) const;
  double ScaleOf(const StepCall& call) const;
  // Number of ranks whose gradients are summed. 1 for reduced gradients, which are the mean already.
  uint32_t addends() const { return spec_.layout->is_shared() ? members_.world_size() : 1; }
  void FollowSums();
  void PumpSums();
  void PumpGradients();
  void UpdateEarly();
  void DropGradients(const absl::Status& status);
  absl::Status CheckCall(const Session& session, const protocol::Command& command,
                         const StepRequestCopied& copied) const;
  absl::Status CheckDelivered(uint32_t rank, std::span<const uint64_t> presence) const;
  absl::Status CheckOwnersDelivered() const;
  std::pmr::vector<bool> ParamsWithGradient() const;
  absl::Status DetachedError(uint32_t rank) const;
  void AddCall(Session& session, StepCall call);
  void RefuseCalls(const absl::Status& status, uint16_t flags = 0);
  void BeginReducing();
  void DecideWhenReduced();
  void Decide();
  void HandleRepeated(const protocol::Command& command, const CommandId& id);

  // Over several nodes.
  void Prepare();
  protocol::StepSummary SummaryOfNode() const;
  void GiveUpPrepared(protocol::StepDecision decision);
  void AnswerPrepared(const Session& session, const CommandId& command);
  void RecordPreparedStep();
  void ResumePrepared(const KeptUpdate& update);
  void EndMasters();
  void AnswerInitialDone();
  void ArmLeaseTimer();
  RecordDecision DecisionOf(const StepOrder& order) const;
  absl::Status LeasesHeldError(const Session& session, uint64_t step) const;
  void Commit();
  void Publish();

  const JobSpec& spec_;
  JobTasks& io_;
  Membership& members_;
  StepPipeline& pipeline_;
  DurableSteps& durable_;
  const StateAccess& access_;
  WeightsCache& weights_;
  const LeaseTable& leases_;
  Phase phase_ = Phase::kOpen;
  uint64_t committed_step_ = 0;
  uint64_t published_step_ = 0;  // committed_step_, or the step before it
  bool is_to_be_resumed_ = false;
  GradientAccumulator gradients_;
  StepAttempts attempts_;
  Announcement announcement_;
  ReplicaDigests digests_;
  StepBarrier barrier_;
  NodesDecision nodes_;
  Trace trace_;
  std::vector<CommandId> initial_done_;  // commands that wait for the end of Phase::kMasters
  StepExtraStates extra_;
  StepAnswers answers_;
};

// Returns the limits against which CheckCommand() checks the commands of a session.
CommandLimits LimitsOf(const JobSpec& spec, const Session& session);

}  // namespace forebay::daemon
