// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/job/job.h"

#include "daemon/core/base/activity.h"
#include "daemon/core/base/limits.h"
#include "protocol/os/check.h"

namespace forebay::daemon {

void Job::OnTaskDone(const TaskDone& done) {
  const uint64_t epoch = parts_.io.epoch();
  const Task task = parts_.io.Finish(done.task);
  const auto fail_if = [this](const absl::Status& fatal) {
    if (!fatal.ok()) sessions_.Fail(fatal);
  };
  switch (task.kind) {
    case TaskKind::kJobMemory:
    case TaskKind::kJobSwap:
      return life_.OnMemoryMade(done);
    case TaskKind::kStepArena:
      world_.OnStepArenaMade(done);
      if (!done.status.ok()) sessions_.EvictWaiting(done.status);
      return;
    case TaskKind::kFloatSums:
      return world_.OnFloatSumsMade(done);
    case TaskKind::kSessionMemory:
      return sessions_.OnMemoryMade(task.sessions.at(0), done.status);
    case TaskKind::kCopyInitial:
      if (task.epoch == epoch) parts_.initial.OnCopied(done);
      return;
    case TaskKind::kAddGradients:
    case TaskKind::kMoveGradient:
    case TaskKind::kSumGradient:
      if (task.epoch != epoch) return;
      if (!done.status.ok()) return sessions_.Fail(done.status);
      return parts_.step.parts().gradients.OnTask(task.kind, done);
    case TaskKind::kCopyExtraState:
      parts_.step.parts().extra.OnCopied();
      return fail_if(done.status);
    case TaskKind::kAccessState:
      return parts_.access.OnAccessed(done);
    case TaskKind::kWriteState:
      return parts_.access.OnWritten(done);
    case TaskKind::kLoadWeights:
      return parts_.weights.OnLoaded(done);
    case TaskKind::kInstallWeights:
      return parts_.pipeline.OnInstalled(done);
    case TaskKind::kMoveBlock:
      return fail_if(parts_.residency.OnMoved(done));
    case TaskKind::kSavePart:
      return parts_.durable.OnSaved(done);
    case TaskKind::kKeepExtraStates:
      return fail_if(parts_.durable.OnKept(done));
    case TaskKind::kRestore:
      return life_.OnRestored(done);
    case TaskKind::kRestoreExtraStates:
      return life_.OnExtraStatesRestored(done);
    case TaskKind::kDigestWeights:
      return parts_.step.parts().digests.OnDigested(done);
    case TaskKind::kSpillSums:
    case TaskKind::kLoadSums:
      return fail_if(parts_.pipeline.sums().OnTransferred(done));
    case TaskKind::kReadBlock:
    case TaskKind::kUpdateBlock:
    case TaskKind::kWriteBlock:
      return fail_if(OnBlockTask(task.kind, done));
  }
}

absl::Status Job::OnBlockTask(TaskKind kind, const TaskDone& done) {
  if (kind == TaskKind::kUpdateBlock) return parts_.pipeline.OnUpdated(done);
  if (kind == TaskKind::kWriteBlock) return parts_.pipeline.OnWritten(done);
  const StepPipeline::ReadOutcome outcome = parts_.pipeline.OnRead(done);
  parts_.access.OnRead(outcome);
  parts_.residency.OnRead(outcome);
  if (!outcome.status.ok()) parts_.durable.OnReadFailed(outcome.status);
  return outcome.fatal ? outcome.status : absl::OkStatus();
}

void Job::RefuseWorld(const absl::Status& reason) {
  world_.DropNextPlan();
  sessions_.EvictWaiting(reason);
}

void Job::OnLedger(const absl::Status& status) {
  parts_.durable.OnCommitted(status);
  if (!parts_.durable.in_progress()) parts_.step.OnDurable();
}

// The order matters: each call may make possible what a later call begins.
void Job::Advance() {
  // The calls below set the flag again if the job waits for a staging slot.
  parts_.pipeline.store().blocks().SetWaits(Blocks::Waits::kNo);
  if (stop_.is_quiescent()) {  // only the durable step of the stop continues
    MoveDoubted();
    parts_.durable.Pump();
    stop_.TryStop();
    sessions_.CloseEnded();
    return;
  }
  // Handles initial parameters first, because no step begins before they are complete.
  for (const PartitionRange& written : parts_.access.DrainWritten()) {
    parts_.initial.SetMasters(written, true);
  }
  if (auto done = parts_.initial.DrainDone(); !done.empty()) {
    parts_.step.BeginMasters(std::move(done), parts_.initial.has_masters());
  }
  // Serves fetches before blocks of the step, because blocks take the free staging slots.
  if (parts_.spec.plan.has_weights_on_swap() && stop_.MayServeFetches()) parts_.fetches.Serve();
  // Publishes the step, whose durable step then begins.
  const bool was_updating = parts_.pipeline.running();
  parts_.step.AdvanceUpdate();
  parts_.durable.Pump();
  // A stop and a new record come before accesses, moves and early updates, which would delay them.
  stop_.TryStop();
  if (stop_.is_quiescent()) return;
  stop_.TryRecord();
  // Accesses and moves come before the decision. Ranks that have called step wait for at most kTurnsBetweenSteps of them.
  UseTimeBetweenSteps(/*is_due=*/was_updating && !parts_.pipeline.running());
  world_.TryUseFloatSums();  // before the gradients that wait for these sums
  // Adds gradients, updates blocks early, decides, and begins the update.
  parts_.step.Advance(MayUpdateEarly());
  if (stop_.MayServeFetches()) parts_.fetches.Serve();  // the update may have ended for a partition
  sessions_.CloseEnded();
  // A session that has ended may have been the last with a lease, or the last of the old world.
  stop_.TryStop();
  if (stop_.is_quiescent()) return;
  if (world_.TryChange()) stop_.ForgetRecord();
  // The record comes before the answers to ranks, which say that the job outlives the daemon.
  stop_.TryRecord();
  sessions_.AnswerAttaches();
  sessions_.CloseEnded();  // sessions whose attach was refused
  life_.FreeWhenUnused();
}

// An early update also waits for accesses that are queued, and for blocks that are marked to leave DRAM. An early update waits
// for a durable step in two cases only: calls of step wait for that step, or that step waits for moves.
bool Job::MayUpdateEarly() const {
  Activities under_way = world_.UnderWay().Without(Activity::kDurableStep);
  under_way.AddIf(parts_.access.has_requests(), Activity::kAccess);
  under_way.AddIf(parts_.residency.has_urgent_moves(), Activity::kMove);
  under_way.AddIf(parts_.durable.is_awaiting_moves() || parts_.step.parts().is_awaiting_durable(),
                  Activity::kDurableStep);
  return MayBegin(Activity::kEarlyUpdate, under_way);
}

// Accesses states and moves blocks, in turns. `is_due`: a step was published in this Advance(). If all ranks have called the
// next step by then, kTurnsBetweenSteps accesses and moves may begin before its decision.
void Job::UseTimeBetweenSteps(bool is_due) {
  const bool called = parts_.step.phase() == Step::Phase::kReducing;
  if (is_due) parts_.residency.OnPublished();
  if (!called) turns_left_ = 0;
  if (called && is_due) turns_left_ = kTurnsBetweenSteps;
  const auto may_begin = [&](Activity wanted) {
    const Activities under_way = world_.UnderWay();
    return (called || parts_.step.phase() == Step::Phase::kOpen) &&
           MayBegin(wanted, turns_left_ > 0 ? under_way.Without(Activity::kCalledStep) : under_way);
  };
  const auto is_busy = [&] {
    return parts_.access.in_progress() || parts_.residency.in_progress();
  };
  const bool was_busy = is_busy();
  const auto read = [&] {
    const bool continues = called && parts_.access.in_progress() && !parts_.residency.in_progress();
    if (continues || may_begin(Activity::kAccess)) parts_.access.Pump();
    if (parts_.access.in_progress()) reads_first_ = false;
  };
  const auto move = [&] {
    if (parts_.access.in_progress()) return;
    if (parts_.durable.in_progress()) {
      MoveDoubted();
    } else if (parts_.residency.in_progress() ||
               (parts_.is_ready() && may_begin(Activity::kMove))) {
      parts_.residency.Pump();
    }
    if (parts_.residency.in_progress()) reads_first_ = true;
  };
  if (reads_first_) {
    read();
    move();
  } else {
    move();
    read();
  }
  if (!was_busy && is_busy() && turns_left_ > 0) --turns_left_;
}

// Moves blocks in doubt, while a durable step waits for these moves.
void Job::MoveDoubted() {
  const bool may_begin =
      parts_.durable.is_awaiting_moves() && MayBegin(Activity::kDoubtedMove, world_.UnderWay());
  if (may_begin || parts_.residency.in_progress()) parts_.residency.PumpDoubted();
}

void Job::Prefetch() {
  if (stop_.is_requested()) return;
  const bool open = parts_.step.phase() == Step::Phase::kOpen;
  if (open && !parts_.access.is_writing()) parts_.weights.Prefetch();
  const bool gathers = open || parts_.step.phase() == Step::Phase::kReducing ||
                       parts_.step.parts().prepared_step() > 0;
  if (gathers && parts_.step.parts().is_gathering()) parts_.pipeline.Prefetch();
}

void Job::CheckInvariants() const {
  FOREBAY_CHECK(life_.is_ending() || life_.has_begun() == (life_.state() != JobLife::kQueued));
  world_.CheckInvariants();
  const Activities under_way = world_.UnderWay();
  for (const Activity a : kLastingActivities) {
    for (const Activity b : kLastingActivities) {
      FOREBAY_CHECK(a == b || !under_way.has(a) || !under_way.has(b) || !AreNeverTogether(a, b));
    }
  }
  parts_.step.CheckInvariants();
  parts_.members.CheckInvariants();
  uint64_t leases = parts_.leases.count_of_nobody();
  for (const auto& [id, session] : parts_.members.all()) {
    leases += parts_.leases.count_of(id);
    FOREBAY_CHECK(parts_.leases.count_of(id) <= kLeasesPerSessionMax);
    if (session.state == Session::State::kEnded) {
      FOREBAY_CHECK(parts_.leases.count_of(id) == 0);
      continue;
    }
    // Checks that each unanswered command waits in exactly one part.
    const uint64_t waiting = parts_.step.unanswered(session) + parts_.access.unanswered(id) +
                             parts_.fetches.unanswered(id) + parts_.initial.unanswered(id);
    FOREBAY_CHECK(waiting == parts_.io.commands_of(id));
  }
  FOREBAY_CHECK(leases == parts_.leases.count());
  parts_.weights.CheckInvariants();
}

}  // namespace forebay::daemon
