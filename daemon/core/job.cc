#include "daemon/core/job.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/os/check.h"

namespace forebay::daemon {

using protocol::Command;
using protocol::ErrorId;
using protocol::MakeError;
using protocol::Op;

Job::Job(Spec spec, ActionSink& actions, StagingPool& pool)
    : spec_(std::move(spec)),
      io_(actions, spec_.id),
      detached_(spec_.layout->spec().world_size, false),
      initial_(spec_.layout),
      accumulator_(spec_.layout, spec_.plan),
      pipeline_(spec_.layout, spec_.plan.block_elems, spec_.plan, pool, spec_.options.workers),
      extra_bytes_(spec_.layout->spec().world_size, 0) {
  ++making_tasks_;
  io_.Start(TaskKind::kJobMemory, 0,
            CreateJobMemory{.weights_bytes = spec_.plan.weights_bytes,
                            .state_bytes = spec_.plan.state_bytes,
                            .step_bytes = spec_.plan.step_bytes});
  if (spec_.plan.swapped_blocks == 0) return;
  ++making_tasks_;
  io_.Start(
      TaskKind::kJobSwap, 0,
      CreateJobSwap{.extents = spec_.plan.swapped_blocks, .extent_bytes = spec_.plan.extent_bytes});
}

void Job::OnMemoryMade(const TaskDone& done) {
  --making_tasks_;
  if (!done.status.ok() && failed_.ok()) failed_ = done.status;
  if (making_tasks_ > 0) return;
  phase_ = failed_.ok() ? Phase::kOpen : Phase::kFailed;
  deleting_ = !failed_.ok();
}

void Job::OnCommand(SessionId id, const Command& command) {
  Session* session = Find(id);
  if (session == nullptr || session->state != Session::State::kAttached || !session->mapped) return;
  io_.Arrived(id);
  const CommandId waiting = session->IdOf(command);
  if (io_.commands_of(id) > protocol::kRingEntries) {
    io_.Answer(waiting,
               MakeError(ErrorId::kLimit, absl::StrCat("more than ", protocol::kRingEntries,
                                                       " commands of one session are in flight")));
    return;
  }
  if (!session->fence.ok() && !spec_.options.disable_fence_for_test) {
    io_.Answer(waiting, session->fence);
    return;
  }
  if (phase_ == Phase::kFailed) {
    io_.Answer(waiting, FailedStatus());
    return;
  }
  const absl::Status status = CheckCommand(command, *spec_.layout, LimitsOf(*session));
  if (!status.ok()) {
    io_.Answer(waiting, status);
    return;
  }
  Dispatch(*session, command);
}

CommandLimits Job::LimitsOf(const Session& session) const {
  if (spec_.options.disable_range_check_for_test) {
    return {.grad_bytes = UINT64_MAX, .step_region_offset = 0, .step_region_bytes = UINT64_MAX};
  }
  return {.grad_bytes = session.request.grad_arena_bytes,
          .step_region_offset = spec_.plan.step_region_offset,
          .step_region_bytes = spec_.plan.step_region_bytes,
          .extra_state_bytes = session.request.extra_state_bytes};
}

void Job::Dispatch(Session& session, const Command& command) {
  const Op op = static_cast<Op>(command.op);
  if (op == Op::kWriteInitial || op == Op::kInitialDone) {
    HandleInitial(session, command);
    return;
  }
  if (!initial_.ready()) {
    io_.Answer(
        session.IdOf(command),
        MakeError(ErrorId::kNotReady,
                  absl::StrCat("job ", spec_.name, ": the initial parameters were not written"),
                  "write every group, then end the initialisation"));
    return;
  }
  switch (op) {
    case Op::kFetch:
      HandleFetch(session, command);
      return;
    case Op::kRelease:
      io_.Answer(session.IdOf(command), leases_.Release(session.id, command.lease_id));
      return;
    case Op::kGradReady:
      HandleGradient(session, command);
      return;
    case Op::kStep:
      HandleStep(session, command);
      return;
    case Op::kReadState:
      reads_.Add(session.IdOf(command), command, *spec_.layout, pipeline_);
      return;
    default:
      FOREBAY_CHECK(false);  // CheckCommand let it through
  }
}

void Job::HandleInitial(Session& session, const Command& command) {
  const CommandId id = session.IdOf(command);
  if (initial_.ready() || initial_.writer() != session.id) {
    io_.Answer(id,
               MakeError(ErrorId::kProtocol,
                         absl::StrCat("job ", spec_.name, ": rank ", session.rank,
                                      " does not write the initial parameters"),
                         "the job has its parameters, or another rank writes them: read them with "
                         "fetch"));
  } else if (static_cast<Op>(command.op) == Op::kInitialDone) {
    initial_.Done(io_, id);
  } else {
    initial_.Write(io_, id, command);
  }
}

void Job::HandleFetch(Session& session, const Command& command) {
  std::vector<uint32_t>& order = phase_ == Phase::kOpen ? fetched_ : fetched_next_;
  if (std::find(order.begin(), order.end(), command.group) == order.end()) {
    order.push_back(command.group);
  }
  fetches_.push_back(
      {.command = session.IdOf(command), .rank = session.rank, .group = command.group});
  ServeFetches();
}

// A fetch waits while its rank waits in step, until the group's own blocks are done.
void Job::ServeFetches() {
  const auto serve = [this](const WaitingFetch& fetch) {
    if (phase_ == Phase::kReducing) return false;
    if (phase_ == Phase::kOpen && barrier_.has(fetch.rank)) return false;
    if (phase_ == Phase::kUpdating && !pipeline_.IsGroupDone(fetch.group)) return false;
    absl::StatusOr<uint64_t> lease =
        leases_.Acquire(io_.actions(), fetch.command.session, fetch.group);
    if (!lease.ok()) {
      io_.Answer(fetch.command, lease.status());
      return true;
    }
    protocol::Completion completion{};
    completion.lease_id = *lease;
    completion.offset_bytes = spec_.layout->groups()[fetch.group].weights_offset_bytes;
    completion.length_bytes = spec_.layout->group_bytes(fetch.group);
    io_.Answer(fetch.command, completion);
    return true;
  };
  std::erase_if(fetches_, serve);
}

void Job::OnTaskDone(const TaskDone& done) {
  const uint64_t epoch = io_.epoch();
  const Task task = io_.Finish(done.task);
  switch (task.kind) {
    case TaskKind::kJobMemory:
    case TaskKind::kJobSwap:
      OnMemoryMade(done);
      return;
    case TaskKind::kSessionMemory: {
      Session& session = sessions_.at(task.session);
      session.memory_made = done.status.ok();
      if (!done.status.ok() && session.state == Session::State::kWaiting) {
        Evict(session, done.status);
      }
      return;
    }
    case TaskKind::kCopyInitial:
      if (task.epoch == epoch) initial_.OnCopied(io_, done);
      return;
    case TaskKind::kAddGradient:
    case TaskKind::kMoveGradient:
    case TaskKind::kSumGroup:
      if (task.epoch == epoch) OnGradientTask(task.kind, done);
      return;
    case TaskKind::kCopyExtraState:
      --extra_copies_;
      if (!done.status.ok()) Fail(done.status);
      return;
    case TaskKind::kCopyState:
      reads_.OnCopied(io_, pipeline_, done);
      return;
    case TaskKind::kReadBlock:
    case TaskKind::kUpdateBlock:
    case TaskKind::kWriteBlock:
      OnBlockTask(task.kind, done);
      return;
  }
}

void Job::OnGradientTask(TaskKind kind, const TaskDone& done) {
  if (!done.status.ok()) {
    Fail(done.status);
    return;
  }
  if (kind == TaskKind::kAddGradient) accumulator_.OnAdded(io_, done);
  if (kind == TaskKind::kMoveGradient) accumulator_.OnMoved(io_, done);
  if (kind == TaskKind::kSumGroup) accumulator_.OnSummed(io_, done);
}

void Job::OnBlockTask(TaskKind kind, const TaskDone& done) {
  absl::Status fatal;
  if (kind == TaskKind::kReadBlock) {
    const StepPipeline::ReadOutcome outcome = pipeline_.OnRead(done);
    reads_.OnRead(io_, pipeline_, outcome);
    if (outcome.fatal) fatal = outcome.status;
  } else if (kind == TaskKind::kUpdateBlock) {
    fatal = pipeline_.OnUpdated(io_, done);
  } else {
    fatal = pipeline_.OnWritten(done);
  }
  if (!fatal.ok()) Fail(fatal);
}

// Everything that waits gets the first error; what comes later E_JOB_FAILED. Tasks that run give
// back what they hold.
void Job::Fail(const absl::Status& first_error) {
  if (phase_ == Phase::kFailed) return;
  phase_ = Phase::kFailed;
  failed_ = first_error;
  io_.NewEpoch();
  for (auto& [rank, call] : barrier_.Drain()) io_.Answer(call.command, first_error);
  accumulator_.Drop(io_, first_error);
  reads_.Drop(io_, pipeline_, 0, first_error);
  initial_.Reset(io_, first_error);
  for (auto& [id, session] : sessions_) AnswerWaiting(session, first_error);
}

absl::Status Job::FailedStatus() const {
  return MakeError(ErrorId::kJobFailed,
                   absl::StrCat("job ", spec_.name, " failed after step ", committed_step_, ": ",
                                std::string(failed_.message())),
                   "delete the job and start it again from a checkpoint");
}

absl::Status Job::Delete(uint32_t uid) {
  if (uid != spec_.uid && uid != 0) {
    return MakeError(ErrorId::kPermission,
                     absl::StrCat("job ", spec_.name, " belongs to uid ", spec_.uid),
                     "delete it as that user");
  }
  const auto live = std::count_if(sessions_.begin(), sessions_.end(), [](const auto& entry) {
    return entry.second.state != Session::State::kEnded;
  });
  if (live > 0) {
    return MakeError(ErrorId::kBusy, absl::StrCat("job ", spec_.name, " has ", live, " sessions"),
                     "end its processes first");
  }
  deleting_ = true;
  return absl::OkStatus();
}

void Job::Advance() {
  if (phase_ == Phase::kFailed) pipeline_.Abandon();
  if (phase_ == Phase::kOpen) {
    ReportInvalidated();
    RepeatWhenAllHaveSeen();
  }
  if (phase_ == Phase::kOpen || (phase_ == Phase::kReducing && reads_.in_progress())) {
    reads_.Pump(io_, pipeline_);
  }
  if (phase_ == Phase::kReducing) DecideWhenReduced();
  if (phase_ == Phase::kUpdating) {
    pipeline_.Pump(io_);
    if (pipeline_.done()) Commit();
  }
  ServeFetches();
  CloseEnded();
  AnswerAttaches();
  CloseEnded();
  FreeWhenUnused();
}

void Job::Prefetch() {
  const bool before_verdict = phase_ == Phase::kOpen || phase_ == Phase::kReducing;
  if (before_verdict && !accumulator_.empty()) pipeline_.Prefetch(io_);
}

void Job::FreeWhenUnused() {
  if (!deleting_ || freed_ || !sessions_.empty() || !io_.idle()) return;
  freed_ = true;
  io_.actions().Emit(FreeJob{.job = spec_.id});
}

std::vector<SessionId> Job::DrainClosed() { return std::exchange(closed_, {}); }

JobView Job::View() const {
  const protocol::Layout& layout = *spec_.layout;
  const protocol::LayoutSpec& spec = layout.spec();
  JobView view{.name = spec_.name,
               .id = spec_.id,
               .uid = spec_.uid,
               .layout = spec_.layout,
               .sessions = {},
               .generation = generation_,
               .committed_step = committed_step_,
               .params = layout.total_elems(),
               .padded_elems = layout.padded_elems(),
               .state_bytes = layout.total_elems() * protocol::SizeBytes(spec.dtype) +
                              protocol::StateBytes(spec.optimizer, spec.format, spec.dtype,
                                                   layout.total_elems()),
               .blocks = pipeline_.map().blocks(),
               .resident_blocks = spec_.plan.resident_blocks,
               .leases = leases_.count(),
               .update_reads = pipeline_.counters().update_reads,
               .update_reads_prefetched = pipeline_.counters().update_reads_prefetched,
               .state_read_bytes = pipeline_.counters().read_bytes,
               .state_written_bytes = pipeline_.counters().written_bytes,
               .last_step_reads = pipeline_.last_step().update_reads,
               .last_step_reads_prefetched = pipeline_.last_step().update_reads_prefetched,
               .ready = initial_.ready(),
               .failed = failed_,
               .dram_bytes = spec_.plan.dram_bytes,
               .swap_bytes = spec_.plan.swap_bytes,
               .trace = trace_};
  for (const auto& [id, session] : sessions_) {
    view.sessions.push_back({.id = id,
                             .uid = session.uid,
                             .rank = session.rank,
                             .attached = session.state == Session::State::kAttached,
                             .fenced = !session.fence.ok(),
                             .leases = leases_.count_of(id),
                             .commands_in_flight = io_.commands_of(id)});
  }
  std::stable_sort(view.sessions.begin(), view.sessions.end(),
                   [](const SessionView& a, const SessionView& b) { return a.rank < b.rank; });
  return view;
}

void Job::CheckInvariants() const {
  accumulator_.CheckInvariants();
  pipeline_.CheckInvariants(committed_step_);
  FOREBAY_CHECK((phase_ == Phase::kUpdating) == pipeline_.running() || phase_ == Phase::kFailed);
  FOREBAY_CHECK(phase_ != Phase::kUpdating || !reads_.in_progress());
  std::vector<uint32_t> live_of_rank(detached_.size(), 0);
  uint64_t leases = 0;
  for (const auto& [id, session] : sessions_) {
    leases += leases_.count_of(id);
    FOREBAY_CHECK(leases_.count_of(id) <= kLeasesPerSessionMax);
    if (session.state == Session::State::kEnded) {
      FOREBAY_CHECK(leases_.count_of(id) == 0);
      continue;
    }
    ++live_of_rank[session.rank];
    // Every command that was not answered waits in exactly one place.
    uint64_t waiting = session.parked.size() + (session.step_being_copied ? 1 : 0);
    waiting += accumulator_.unanswered(id) + reads_.unanswered(id);
    if (initial_.writer() == id) waiting += initial_.unanswered();
    for (const WaitingFetch& fetch : fetches_) waiting += fetch.command.session == id ? 1 : 0;
    for (const auto& [rank, call] : barrier_.by_rank()) {
      waiting += call.command.session == id ? 1 : 0;
    }
    FOREBAY_CHECK(waiting == io_.commands_of(id));
  }
  for (const uint32_t live : live_of_rank) FOREBAY_CHECK(live <= 1);
  FOREBAY_CHECK(leases == leases_.count());
}

}  // namespace forebay::daemon
