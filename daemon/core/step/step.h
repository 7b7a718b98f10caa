// SPDX-License-Identifier: Apache-2.0
// The step of a job: gathers gradients and step calls, decides, applies, commits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory_resource>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/job_tasks.h"
#include "daemon/core/base/trace.h"
#include "daemon/core/plan/job_spec.h"
#include "daemon/core/sessions/command_check.h"
#include "daemon/core/sessions/lease_table.h"
#include "daemon/core/sessions/membership.h"
#include "daemon/core/sessions/session.h"
#include "daemon/core/sessions/step_barrier.h"
#include "daemon/core/step/gradient_accumulator.h"
#include "daemon/core/update/durable_steps.h"
#include "daemon/core/update/replica_digests.h"
#include "daemon/core/update/state_access.h"
#include "daemon/core/update/step_pipeline.h"
#include "daemon/core/update/weights_cache.h"
#include "protocol/step_summary.h"
#include "protocol/wire.h"

namespace forebay::daemon {

// From the decision on a step is committed: the next one is gathered while the blocks of this one are
// updated. One step at a time is: the decision of the next waits until this one is published. What belongs
// to a partition waits for its own blocks alone: a fetch of its weights, and the addition of its gradients.
//
// Deliveries and step calls carry the number of their rank's attempt (wire.h). What is not finite
// ends an attempt for all ranks, a rank that begins a newer one ends the older ones.
//
// Ownership  What the constructor gets outlives it.
class Step {
 public:
  enum class Phase : uint8_t {
    kOpen,      // gathers gradients (or initial parameters)
    kMasters,   // the initial parameters are written: masters are set from them
    kReducing,  // all ranks have called step: the last gradients are added
    kPrepared,  // over several nodes: they are, and the nodes have not decided
    kFailed,
  };

  Step(const JobSpec& spec, JobTasks& io, Membership& members, StepPipeline& pipeline,
       DurableSteps& durable, const StateAccess& access, WeightsCache& weights,
       const LeaseTable& leases);

  // A published step is being made durable, and its calls are answered when it is.
  bool is_awaiting_durable() const { return is_durable_first() && durable_.in_progress(); }

  // Of a new step: the job comes back after this one.
  void Recover(const DurableJob& job);
  // It has, with an update that the daemon before did not end.
  void Resume(const KeptUpdate& update);

  // The initial parameters are written; `commands`, which said so, are answered when blocks hold their
  // masters.
  // `has_masters`: they hold them already.
  void BeginMasters(std::vector<CommandId> commands, bool has_masters);

  // Commands that CheckCommand let through, of a current session.
  void HandleGradient(Session& session, const protocol::Command& command);
  void HandleGradNorm(Session& session, const protocol::Command& command);
  void HandleAnnouncement(Session& session, const protocol::Command& command);
  void HandleStep(Session& session, const protocol::Command& command);
  void OnStepRequest(Session& session, const StepRequestCopied& copied);
  void HandleDecision(Session& session, const protocol::Command& command);
  void OnSummary(Session& session, const SummaryCopied& copied);
  // The step that is prepared, and not decided; 0: none.
  uint64_t prepared_step() const { return phase_ == Phase::kPrepared ? committed_step_ + 1 : 0; }
  // By which the committed step was committed, encoded; empty where this node does not know.
  std::vector<std::byte> LastSummary() const;

  // Outcomes of tasks. An error fails the job: the caller calls Fail().
  absl::Status OnGradientTask(TaskKind kind, const TaskDone& done);
  absl::Status OnExtraStateCopied(const TaskDone& done);
  void OnDigested(const TaskDone& done) { digests_.OnDigested(done); }
  // Weights of the published step are read, and must not change.
  bool is_digesting() const { return digests_.in_progress(); }

  // Goes on with the update, and publishes the step when it ends.
  void AdvanceUpdate();
  // Does all that has become possible; without `may_update_early` no early update begins.
  void Advance(bool may_update_early);
  // Masters are going to be written: what was made of the old ones is dropped, and no early update begins
  // before the next announcement.
  void DropEarlyUpdates();
  // The newest published step is durable: calls that waited for it are answered.
  void OnDurable();
  // The newest published step, as it is now.
  DurableSteps::Published PublishedNow() const;
  // Nothing of the next step is there, and nothing of this one is unsaid.
  bool is_quiet() const;
  // What was delivered of the next step is dropped.
  void GiveUpAttempt();
  // The first attempt at the next step that is not over.
  uint64_t open_attempt() const {
    return fault_.ok() ? attempt_ : std::max(attempt_, faulty_attempt_ + 1);
  }

  // What the calls of the published step are answered with.
  void AddLast(KeptMemory& kept) const;
  // What it is to say of the step that is published; nothing is delivered to the next one without RecordAttempt.
  void Record(KeptMemory& kept);

  // Sessions of its ranks.
  bool HasContributed(const Session& session) const;
  bool HasCalled(const Session& session) const {
    return barrier_.has(session.rank) || session.step_being_copied.has_value() ||
           phase_ != Phase::kOpen;
  }
  void OnRankDetached(uint32_t rank);  // step calls of the others are refused
  // A rank was lost. A step that not all ranks have called is dropped; else it goes on.
  void OnRankFailed(const Session* lost, const absl::Status& status);
  // Answers what waits of a session, but not its contributions and its step call: they are the job's.
  void AnswerWaiting(Session& session, const absl::Status& status);
  bool UsesArenaOf(SessionId session) const { return gradients_.UsesArenaOf(session); }

  // What was delivered to the step is dropped, because no rank of this world will call it.
  void DropForNewWorld();
  // The spec's world size and plan are others; extra_state of ranks in both worlds stays. In phase
  // kOpen, with nothing delivered and no task.
  void OnWorldChanged();

  // Everything that waits for the step gets `first_error`.
  void Fail(const absl::Status& first_error);

  Phase phase() const { return phase_; }
  uint64_t committed_step() const { return committed_step_; }
  uint64_t published_step() const { return published_step_; }
  uint64_t attempt() const { return attempt_; }
  // Gradients of the next step have been delivered, or are announced.
  bool is_gathering() const { return !gradients_.empty() || announced_.has_value(); }
  // Sums in float32: see GradientAccumulator.
  bool needs_float_sums() const { return gradients_.needs_float_sums(); }
  bool MayUseFloatSums() const;
  void OnFloatSums(std::vector<uint64_t> narrow_offsets);
  void RefuseFloatSums(const absl::Status& status) { gradients_.RefuseFloatSums(status); }
  // Whether a fetch of `rank` is answered now: not from its step call to the decision, nor before the
  // partition's own blocks are updated. A reader's (no rank) is, except from the decision to the publication.
  bool MayFetch(std::optional<uint32_t> rank, uint32_t partition) const;
  // The step whose weights a fetch asks for, by those that are committed before it.
  uint64_t FetchStep(std::optional<uint32_t> rank) const;
  void RecordFetch(uint32_t partition) { trace_.Record(partition, phase_ != Phase::kOpen); }
  const std::vector<uint32_t>& trace() const { return trace_.committed(); }
  uint64_t extra_state_bytes(uint32_t rank) const { return extra_bytes_[rank]; }
  uint32_t extra_slot() const { return extra_slot_; }
  uint64_t extra_state_offset(uint32_t rank) const {
    return spec_.plan.extra_state_slot(rank, extra_slot_);
  }
  StatePart extra_state(uint32_t rank) const {
    return {.offset_bytes = extra_state_offset(rank), .bytes = extra_bytes_[rank]};
  }
  uint64_t unanswered(const Session& session) const;
  void CheckInvariants() const;

 private:
  // What a repeated step is answered with.
  struct Result {
    double norm = 0;
    bool clipped = false;
    absl::Status status;
  };

  // A call that is answered when its step is published, or durable.
  struct Waiting {
    CommandId command;
    bool repeated = false;
  };
  // A call that has brought what the nodes have decided.
  struct Decider {
    CommandId command;
    protocol::StepAnswer answered_when = protocol::StepAnswer::kPublished;
  };

  absl::Status CheckAttempt(const Session& session, const protocol::Command& command) const;
  void BeginAttempt(uint64_t attempt, const absl::Status& status);
  void AnswerCall(const StepCall& call, const absl::Status& status, uint16_t flags = 0);
  bool HasTaken(const Session& session, const protocol::Command& command) const;
  uint64_t GradientEnd(const protocol::Command& command) const;  // in elements of the partition
  void FollowAttempt(const Session& session, const protocol::Command& command);
  void DropFaulty();
  absl::Status DroppedError(uint64_t attempt) const;
  absl::Status StepNumberError(uint64_t step) const;
  void CopyRequest(Session& session, const protocol::Command& command);
  void Announce(uint32_t rank, StepCall call);
  StepOrder OrderOf(const StepCall& call, double scale) const;
  double ScaleOf(const StepCall& call) const;
  // What a gradient is the sum of: reduced ones are the mean already.
  uint32_t addends() const { return spec_.layout->is_shared() ? members_.world_size() : 1; }
  void FollowSums();
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
  void AnswerCommitted(const CommandId& command, protocol::StepAnswer when);

  // Over several nodes.
  void Prepare();
  protocol::StepSummary SummaryOfNode() const;
  uint64_t ScalarsOf(const StepCall& call) const;
  std::pmr::vector<bool> ParamsOf(const protocol::StepSummary& summary) const;
  absl::Status CheckDecision(const protocol::Command& command,
                             const protocol::StepSummary& summary) const;
  void GiveUpPrepared(protocol::StepDecision decision);
  void AnswerPrepared(const Session& session, const CommandId& command);
  void RecordPreparedStep();
  void ResumePrepared(const KeptUpdate& update);
  void EndMasters();
  void AnswerInitialDone();
  void ArmLeaseTimer();
  void RecordOpenAttempt(uint64_t attempt);
  RecordDecision DecisionOf(const StepOrder& order) const;
  void RecordPublished(uint64_t overflowed);
  absl::Status OverflowError(uint64_t overflowed) const;
  absl::Status LeasesHeldError(const Session& session, uint64_t step) const;
  void Commit();
  void Publish();
  void AnswerPublished();
  // Calls are answered when their step is durable.
  bool is_durable_first() const {
    return spec_.plan.session.durability.level == protocol::DurabilityLevel::kStep;
  }
  void Answer(const CommandId& command, bool repeated) const;

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
  uint64_t published_step_ = 0;  // the same, or one less
  // The newest attempt at the next step: the only one whose gradients are kept.
  uint64_t attempt_ = 0;
  uint64_t faulty_attempt_ = 0;  // the last one that ended with a fault, and
  absl::Status fault_;           // that fault; OK: none
  uint64_t recorded_attempt_ = 0;
  uint64_t overflowed_ = 0;  // masters in the published step
  bool is_to_be_resumed_ = false;
  GradientAccumulator gradients_;
  std::optional<StepCall> announced_;  // of this attempt
  // Ranks have announced different scalars; or the newest announcement before was not kept, because of
  // clipping or other scalars, so that this one may not be either.
  bool early_is_off_ = false;
  bool announcement_was_kept_ = true;
  ReplicaDigests digests_;
  StepBarrier barrier_;
  // Over several nodes: what they have decided of the next step, until it is committed, and what asked for that.
  std::optional<protocol::StepSummary> decision_;
  std::pmr::vector<Decider> deciders_;
  std::vector<std::byte> prepared_summary_;  // of this node, encoded
  // By the daemon before, which alone knew whose gradients are in the sums.
  bool is_prepared_before_ = false;
  std::optional<protocol::StepSummary> last_decision_;  // decision_ of the committed step
  Trace trace_;
  std::vector<CommandId> initial_done_;  // wait for Phase::kMasters to end

  uint32_t extra_slot_ = 0;            // of the committed step
  std::vector<uint64_t> extra_bytes_;  // by rank, of the committed step
  uint32_t extra_copies_ = 0;          // running
  Result last_;
  // Calls of the committed step that are answered when it is published, or durable.
  std::pmr::vector<Waiting> unpublished_;
  bool has_answered_early_ = false;  // other calls of it
  absl::Status unsaid_;              // what those were not answered, of the published step
};

// The sum of the squares of the world's gradients.
double SquaresOf(const protocol::StepSummary& summary);

// What a session's commands are checked against.
CommandLimits LimitsOf(const JobSpec& spec, const Session& session);

}  // namespace forebay::daemon
