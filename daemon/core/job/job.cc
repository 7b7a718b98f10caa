// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/job/job.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "daemon/core/base/limits.h"
#include "protocol/error.h"
#include "protocol/os/check.h"

namespace forebay::daemon {

using protocol::Command;
using protocol::ErrorId;
using protocol::MakeError;
using protocol::Op;

namespace {

bool NeedsRank(const Command& command) {
  const Op op = static_cast<Op>(command.op);
  return op == Op::kWriteInitial || op == Op::kInitialDone || op == Op::kGradReady ||
         op == Op::kStep || op == Op::kWriteState || op == Op::kWriteUpdates ||
         op == Op::kGradNorm || op == Op::kAnnounceStep || op == Op::kDecide || op == Op::kGoBack;
}

}  // namespace

Job::Job(JobSpec spec, ActionSink& actions, StagingPool& pool, nvme::SlotMap& swap,
         PathTable& path_table)
    : spec_(std::move(spec)),
      io_(actions, spec_.id),
      float_sums_(spec_.plan.uses_float_sums ? FloatSums::kInUse : FloatSums::kNone),
      is_unrestored_(spec_.recovered != nullptr),
      members_(spec_, io_),
      initial_(spec_, io_),
      leases_(actions, spec_.id),
      pipeline_(io_, spec_.layout, spec_.plan, spec_.swap_slots, spec_.sum_slots, swap, path_table,
                pool, leases_, spec_.options.workers, spec_.options.keeps_jobs),
      weights_(io_, spec_.layout, spec_.plan, pipeline_, leases_),
      access_(io_, spec_.layout, pipeline_, weights_, leases_),
      residency_(io_, pipeline_, weights_, swap, spec_.plan.swap_slot_bytes),
      durable_(spec_, io_, pipeline_),
      step_(spec_, io_, members_, pipeline_, durable_, access_, weights_, leases_),
      fetches_(spec_, io_, step_, access_, weights_, leases_) {
  if (is_resumed()) pipeline_.KeepStaged(*spec_.recovered->kept->update);
  const KeptMemory* const kept = KeptOf(spec_.recovered.get());
  if (kept == nullptr) return;
  for (const KeptLease& lease : kept->leases) {
    if (weights_.Adopt(lease)) {
      leases_.Adopt(lease);
    } else {
      io_.actions().Emit(RecordLeaseEnd{.job = spec_.id, .lease = lease.lease});
    }
  }
}

void Job::Begin() {
  has_begun_ = true;
  ++making_tasks_;
  io_.Start(TaskKind::kJobMemory, 0,
            CreateJobMemory{.is_kept = KeptOf(spec_.recovered.get()) != nullptr,
                            .keeps_gradients = spec_.keeps_gradients,
                            .keeps_step = is_resumed(),
                            .weights_bytes = spec_.plan.weights_bytes,
                            .state_bytes = spec_.plan.placement.arena_bytes(),
                            .resident = spec_.plan.placement.ResidentParts(),
                            .block_bytes = spec_.plan.block_bytes,
                            .step_bytes = spec_.plan.step_bytes,
                            .step_capacity_bytes = spec_.plan.step_capacity_bytes(),
                            .float_sums = spec_.plan.uses_float_sums ? spec_.plan.float_sums_part()
                                                                     : StatePart{}});
  CreateJobSwap swap{.slots = spec_.swap_slots};
  swap.slots.insert(swap.slots.end(), spec_.sum_slots.begin(), spec_.sum_slots.end());
  if (spec_.recovered != nullptr) spec_.recovered->RemoveOwn(swap.slots);
  if (swap.slots.empty()) return;
  ++making_tasks_;
  io_.Start(TaskKind::kJobSwap, 0, std::move(swap));
}

void Job::Refuse(const absl::Status& reason) {
  failed_ = reason;
  deleting_ = true;
  step_.Fail(failed_);
}

void Job::OnMemoryMade(const TaskDone& done) {
  --making_tasks_;
  if (!done.status.ok() && failed_.ok()) failed_ = done.status;
  if (making_tasks_ > 0) return;
  if (!failed_.ok()) {
    Refuse(failed_);
  } else if (is_unrestored_) {
    Restore();
  }
}

uint64_t Job::fixed_bytes() const {
  const uint64_t bytes = spec_.plan.fixed_bytes;
  return next_plan_ ? std::max(bytes, next_plan_->fixed_bytes) : bytes;
}

uint64_t Job::dram_bytes() const {
  if (!has_begun_) return 0;
  const uint64_t fixed = has_room_ ? fixed_bytes() : spec_.plan.fixed_bytes;
  return fixed + placement().state_bytes() + members_.reader_bytes();
}

uint64_t Job::granted_bytes() const {
  if (!has_begun_ && deleting_) return 0;
  return fixed_bytes() + placement().granted_bytes() + members_.reader_bytes();
}

uint64_t Job::swap_bytes() const {
  return swap_slots().size() * spec_.plan.swap_slot_bytes +
         sum_slots().size() * spec_.plan.sum_page_bytes;
}

uint64_t Job::movable_bytes() const { return MayMove() ? residency_.movable_bytes() : 0; }

std::vector<Eviction> Job::PlanEvictions(uint64_t bytes, nvme::SlotMap& swap) const {
  if (!MayMove()) return {};
  return residency_.PlanEvictions(bytes, swap);
}

void Job::Move(uint32_t block, uint64_t free_bytes) {
  if (MayMove()) residency_.Move(block, free_bytes);
}

// ----------------------------------------------------------------------------------------- the world

bool Job::NeedsWorld(const AttachRequested& request) const {
  if (request.reader) return false;
  const SessionRequest& wanted = request.session_request;
  return wanted.world_size != room().world_size || (wanted.accumulate && !room().accumulate) ||
         (!has_step_arena_ && !next_plan_);
}

void Job::ChangeWorld(MemoryPlan plan) {
  next_plan_ = std::move(plan);
  has_room_ = false;
}

std::optional<uint64_t> Job::awaited_bytes() const {
  if (!next_plan_ || has_room_) return std::nullopt;
  return fixed_bytes() - spec_.plan.fixed_bytes;
}

void Job::RefuseWorld(const absl::Status& reason) {
  next_plan_.reset();
  EvictWaiting(reason);
}

void Job::EvictWaiting(const absl::Status& reason) {
  for (const SessionId id : members_.attaching()) {
    Session& session = *members_.Find(id);
    if (!session.reader) Evict(session, reason);
  }
}

// Changes the world once the last step of the old world is published and the sessions of that world are closed.
void Job::TryChangeWorld() {
  if (!has_room_ && members_.live_ranks() == 0) next_plan_.reset();  // waiting ranks have ended
  if (!has_room_ || deleting_ || !is_ready() || failed() || !members_.has_only_waiting()) return;
  if (!MayBegin(Activity::kWorldChange, UnderWay().Without(Activity::kEarlyUpdate))) return;
  step_.DropForNewWorld();
  if (!MayBegin(Activity::kWorldChange, UnderWay()) || io_.stale_tasks() > 0) return;
  const MemoryPlan before = std::exchange(spec_.plan, *std::exchange(next_plan_, std::nullopt));
  float_sums_ = FloatSums::kNone;
  ReplaceStepArena action{.step_bytes = spec_.plan.step_bytes,
                          .step_capacity_bytes = spec_.plan.step_capacity_bytes()};
  const uint32_t kept = std::min(before.session.world_size, spec_.world_size());
  for (uint32_t rank = 0; rank < kept; ++rank) {
    action.extra_state.push_back({.from_bytes = before.extra_state_slot(rank, step_.extra().slot()),
                                  .to_bytes = step_.extra().Part(rank).offset_bytes,
                                  .size_bytes = step_.extra().Part(rank).bytes});
  }
  members_.OnWorldChanged();
  step_.OnWorldChanged();
  has_room_ = false;
  has_step_arena_ = true;
  is_recorded_ = false;
  ++making_tasks_;
  io_.Start(TaskKind::kStepArena, 0, std::move(action));
}

void Job::OnStepArenaMade(const TaskDone& done) {
  --making_tasks_;
  if (done.status.ok()) return;
  has_step_arena_ = false;
  EvictWaiting(done.status);
}

void Job::OnSessionMemoryMade(SessionId id, const absl::Status& status) {
  members_.OnMemoryMade(id, status.ok());
  Session& session = *members_.Find(id);
  if (!status.ok() && session.state == Session::State::kWaiting) Evict(session, status);
}

// ---------------------------------------------------------------------------------------- sessions

absl::Status Job::CheckAttach(const AttachRequested& request) const {
  absl::Status status = members_.CheckAttach(request, room());
  if (!status.ok()) return status;
  if (failed() && !goes_back()) return FailedStatus();
  if (deleting_) {
    return MakeError(
        ErrorId::kBusy,
        absl::StrCat("job ", spec_.name,
                     goes_back() ? " goes back to a durable step" : " is being deleted"),
        "attach again in a moment");
  }
  status = members_.CheckRun(request, step_.committed_step(),
                             initial_.ready() ? Membership::Ready::kYes : Membership::Ready::kNo);
  if (!status.ok()) return status;
  return request.reattach ? CheckReattach(request) : members_.CheckRival(request);
}

void Job::Attach(const AttachRequested& request) {
  Session* const old = request.reader ? nullptr : members_.OfRank(request.rank);
  if (old != nullptr) {
    Evict(*old,
          MakeError(ErrorId::kFenced,
                    absl::StrCat("a newer session of rank ", spec_.layout->WorldRank(request.rank),
                                 " of job ", spec_.name, " has attached"),
                    "one process trains a rank: end the other, then attach again"));
  }
  members_.Add(request);
}

void Job::OnEnded(SessionId id, EndCause cause) {
  Session* session = members_.Find(id);
  if (session == nullptr || session->state == Session::State::kEnded) return;
  if (cause == EndCause::kDisconnected && MayComeBack(*session)) {
    session->is_away = true;
    io_.Disconnect(id);
    // State accesses and fetches are repeated if the client sends them again. Other commands belong to the step and stay.
    const absl::Status away = MakeError(ErrorId::kFenced, "the client is away");
    access_.Drop(id, away);
    fetches_.Answer(id, away);
    return;
  }
  io_.End(id);  // the session gets no further answers
  const bool counts = session->is_current() && initial_.ready() && !failed() && !is_at_rest();
  if (!session->reader && counts) {
    if (cause != EndCause::kDetached || step_.HasContributed(*session)) {
      OnRankFailed(session->rank, session);
    } else {
      OnRankDetached(*session);
    }
  }
  End(*session, absl::OkStatus());
}

// Ends a session that its client did not end. The client gets `reason`.
void Job::Evict(Session& session, const absl::Status& reason) {
  session.close_reason = reason;
  if (session.state == Session::State::kWaiting) {
    io_.actions().Emit(AnswerAttach{.session = session.id, .status = reason, .trace = {}});
  } else if (session.is_current()) {
    session.fence = reason;
    if (!session.reader && initial_.ready() && !failed()) OnRankFailed(session.rank, &session);
  }
  End(session, reason);
  io_.End(session.id);
}

void Job::End(Session& session, const absl::Status& status) {
  if (initial_.IsWriter(session.id)) EndInitial(session, status);
  AnswerWaiting(session, status);
  if (!session.mapped) leases_.ReturnToNobody(session.id);
  leases_.DropAll(session.id);
  members_.SetEnded(session);
}

// Ends a writer of initial parameters. Ranks that attach again write all parameters from scratch. With shared attachment the
// ranks that wait for the writer are evicted. With sharded attachment the other writers are fenced.
void Job::EndInitial(Session& writer, const absl::Status& status) {
  io_.NewEpoch();
  const absl::Status lost =
      MakeError(ErrorId::kRankLost,
                absl::StrCat("rank ", spec_.layout->WorldRank(writer.rank), " of job ", spec_.name,
                             " was lost before all initial parameters were written"),
                "attach again and write them again");
  if (spec_.layout->is_shared()) {
    initial_.Reset(status);
    EvictWaiting(lost);
    return;
  }
  initial_.AnswerWriter(writer.id, status);
  initial_.Reset(lost);
  for (Session* session : members_.BeginGeneration(&writer, lost)) AnswerWaiting(*session, lost);
}

// Begins a new generation: every other session is fenced. A step that all ranks have called continues and is answered. Any
// other step is dropped. `lost` is null if the rank had no session with this daemon.
void Job::OnRankFailed(uint32_t rank, Session* lost) {
  const uint64_t committed = step_.committed_step();
  const absl::Status status = MakeError(
      ErrorId::kRankLost,
      absl::StrCat("rank ", spec_.layout->WorldRank(rank), " of job ", spec_.name,
                   " was lost in step ", committed + 1, "; the committed step is ", committed),
      absl::StrCat("attach again and go on after step ", committed));
  const std::vector<Session*> fenced = members_.BeginGeneration(lost, status);
  step_.OnRankFailed(lost, status);
  for (Session* session : fenced) {
    AnswerWaiting(*session, status);
    leases_.DropAll(session->id);
  }
}

// Handles the detach of a rank that has delivered no gradients to the step. The step calls of other ranks are refused until
// this rank has attached again.
void Job::OnRankDetached(const Session& session) {
  const bool may_come_back = KeptOf(spec_.recovered.get()) != nullptr && !members_.has_begun_anew();
  if (!members_.HasCurrentBeside(session.id) && !may_come_back) {
    members_.ClearDetached();  // the step waits for every rank that attaches next
    return;
  }
  members_.SetDetached(session.rank);
  step_.OnRankDetached(session.rank);
}

void Job::AnswerWaiting(Session& session, const absl::Status& status) {
  step_.AnswerWaiting(session, status);
  access_.Drop(session.id, status);
  fetches_.Answer(session.id, status);
}

std::vector<uint32_t> Job::TracedGroups() const {
  std::vector<uint32_t> groups;
  std::vector<bool> seen(spec_.layout->groups().size(), false);
  for (const uint32_t partition : step_.trace()) {
    const uint32_t group = spec_.layout->partitions()[partition].group;
    if (!seen[group]) groups.push_back(group);
    seen[group] = true;
  }
  return groups;
}

void Job::CloseEnded() {
  members_.CloseEnded([this](SessionId id) { return step_.UsesArenaOf(id); });
}

// ---------------------------------------------------------------------------------------- commands

void Job::OnCommand(SessionId id, const Command& command) {
  Session* session = members_.Find(id);
  if (session == nullptr || session->state != Session::State::kAttached || !session->mapped) return;
  if (is_at_rest()) return;  // the client sends the command to the next daemon
  if (io_.Rejoin(id, command.tag)) return;
  io_.Arrived(id, command.tag);
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
  if (failed()) {
    io_.Answer(waiting, FailedStatus());
    return;
  }
  if (session->reader && NeedsRank(command)) {
    io_.Answer(waiting, MakeError(ErrorId::kRank, "this session is a reader: it has no rank",
                                  "attach with a rank to write parameters, deliver gradients or "
                                  "call step"));
    return;
  }
  const absl::Status status = CheckCommand(command, *spec_.layout, LimitsOf(spec_, *session));
  if (!status.ok()) {
    io_.Answer(waiting, status);
    return;
  }
  Dispatch(*session, command);
}

void Job::Dispatch(Session& session, const Command& command) {
  const Op op = static_cast<Op>(command.op);
  const bool writes_initial =
      op == Op::kWriteState && command.kind == 0 && initial_.IsWriter(session.id);
  if (op == Op::kWriteInitial || op == Op::kInitialDone || writes_initial) {
    HandleInitial(session, command);
    return;
  }
  if (op == Op::kCheck) {
    io_.Answer(session.IdOf(command), absl::OkStatus());
    return;
  }
  if (!is_ready()) {
    io_.Answer(
        session.IdOf(command),
        MakeError(ErrorId::kNotReady,
                  absl::StrCat("job ", spec_.name, ": the initial parameters were not written"),
                  "write every group (sharded: the rank's own partitions), call initial_done and "
                  "wait for "
                  "its answer"));
    return;
  }
  switch (op) {
    case Op::kFetch:
      fetches_.Handle(session, command);
      return;
    case Op::kRelease:
      io_.Answer(session.IdOf(command), leases_.Release(session.id, command.lease_id));
      return;
    case Op::kGradReady:
      step_.HandleGradient(session, command);
      return;
    case Op::kGradNorm:
      step_.HandleGradNorm(session, command);
      return;
    case Op::kAnnounceStep:
      step_.HandleAnnouncement(session, command);
      return;
    case Op::kStep:
      step_.HandleStep(session, command);
      return;
    case Op::kDecide:
      step_.HandleDecision(session, command);
      return;
    case Op::kGoBack:
      HandleGoBack(session, command);
      return;
    case Op::kReadState:
      access_.AddRead(session.IdOf(command), command);
      return;
    case Op::kWriteState:
    case Op::kWriteUpdates:
      HandleWrite(session, command);
      return;
    default:
      FOREBAY_CHECK(false);  // CheckCommand() refuses other ops
  }
}

void Job::HandleInitial(Session& session, const Command& command) {
  const CommandId id = session.IdOf(command);
  if (initial_.ready() && session.WasSentAgain(command)) {
    io_.Answer(id, absl::OkStatus());
    return;
  }
  if (!initial_.IsWriter(session.id)) {
    io_.Answer(
        id,
        MakeError(ErrorId::kProtocol,
                  absl::StrCat("job ", spec_.name, ": rank ", spec_.layout->WorldRank(session.rank),
                               " does not write the initial parameters"),
                  "the job has its parameters, or another rank writes them: read them with "
                  "fetch"));
  } else if (static_cast<Op>(command.op) == Op::kInitialDone) {
    initial_.Done(id);
  } else if (const absl::Status kind = initial_.CheckKind(command); !kind.ok()) {
    io_.Answer(id, kind);
  } else if (static_cast<Op>(command.op) == Op::kWriteState || weights_.Holds(command.partition)) {
    initial_.SetMasters(access_.AddWrite(id, command), false);
  } else {
    initial_.Write(id, command);
  }
}

// Handles a write between two steps, by a rank that has not called the next step and has no lease on the partition.
void Job::HandleWrite(Session& session, const Command& command) {
  const CommandId id = session.IdOf(command);
  if (step_.HasCalled(session)) {
    io_.Answer(id, MakeError(ErrorId::kStep,
                             absl::StrCat("rank ", spec_.layout->WorldRank(session.rank),
                                          " has called step ", step_.committed_step() + 1,
                                          ": parameters are written between steps"),
                             "wait for the answer to step"));
    return;
  }
  const bool has_elements = static_cast<Op>(command.op) == Op::kWriteState;
  for (const uint32_t partition : leases_.PartitionsOf(session.id)) {
    if (!has_elements || partition != command.partition) continue;
    io_.Answer(
        id, MakeError(ErrorId::kLease,
                      absl::StrCat("rank ", spec_.layout->WorldRank(session.rank),
                                   " writes parameters of ", spec_.layout->PartitionName(partition),
                                   " while it holds a lease on them"),
                      "release the lease first"));
    return;
  }
  step_.DropEarlyUpdates();
  access_.AddWrite(id, command);
}

void Job::OnStepRequest(const StepRequestCopied& copied) {
  if (Session* session = members_.Find(copied.session)) step_.OnStepRequest(*session, copied);
}

void Job::OnSummary(const SummaryCopied& copied) {
  if (Session* session = members_.Find(copied.session)) step_.OnSummary(*session, copied);
}

void Job::OnLeaseTimeExpired(uint64_t step) {
  if (step == 0) return fetches_.OnLeaseTimeExpired();
  if (!pipeline_.running() || step != step_.committed_step()) return;
  for (const auto& [id, session] : members_.all()) {
    std::vector<std::string> names;
    for (const uint32_t partition : leases_.PartitionsOf(id)) {
      if (pipeline_.Updates(partition)) names.push_back(spec_.layout->PartitionName(partition));
    }
    if (!session.reader || names.empty()) continue;
    Evict(*members_.Find(id),
          MakeError(ErrorId::kLease,
                    absl::StrCat("this reader held leases on ", absl::StrJoin(names, ", "),
                                 " while the update of step ", step, " of job ", spec_.name,
                                 " waited longer than reader.lease_max"),
                    "attach again; release each lease as soon as the bytes are read, or raise "
                    "reader.lease_max in the daemon's configuration"));
  }
}

// ------------------------------------------------------------------------------------------- tasks

void Job::OnTaskDone(const TaskDone& done) {
  const uint64_t epoch = io_.epoch();
  const Task task = io_.Finish(done.task);
  absl::Status fatal;
  switch (task.kind) {
    case TaskKind::kJobMemory:
    case TaskKind::kJobSwap:
      OnMemoryMade(done);
      return;
    case TaskKind::kStepArena:
      OnStepArenaMade(done);
      return;
    case TaskKind::kFloatSums:
      OnFloatSumsMade(done);
      return;
    case TaskKind::kSessionMemory:
      OnSessionMemoryMade(task.sessions.at(0), done.status);
      return;
    case TaskKind::kCopyInitial:
      if (task.epoch == epoch) initial_.OnCopied(done);
      return;
    case TaskKind::kAddGradients:
    case TaskKind::kMoveGradient:
    case TaskKind::kSumGradient:
      if (task.epoch == epoch) fatal = step_.OnGradientTask(task.kind, done);
      break;
    case TaskKind::kCopyExtraState:
      fatal = step_.OnExtraStateCopied(done);
      break;
    case TaskKind::kAccessState:
      access_.OnAccessed(done);
      return;
    case TaskKind::kWriteState:
      access_.OnWritten(done);
      return;
    case TaskKind::kLoadWeights:
      weights_.OnLoaded(done);
      return;
    case TaskKind::kInstallWeights:
      pipeline_.OnInstalled(done);
      return;
    case TaskKind::kMoveBlock:
      fatal = residency_.OnMoved(done);
      break;
    case TaskKind::kSavePart:
      durable_.OnSaved(done);
      return;
    case TaskKind::kKeepExtraStates:
      fatal = durable_.OnKept(done);
      break;
    case TaskKind::kRestore:
      OnRestored(done);
      return;
    case TaskKind::kRestoreExtraStates:
      --making_tasks_;
      if (!done.status.ok() && failed_.ok()) failed_ = done.status;
      TryEndRestore();
      return;
    case TaskKind::kDigestWeights:
      step_.OnDigested(done);
      return;
    case TaskKind::kSpillSums:
    case TaskKind::kLoadSums:
      fatal = pipeline_.sums().OnTransferred(done);
      break;
    case TaskKind::kReadBlock:
    case TaskKind::kUpdateBlock:
    case TaskKind::kWriteBlock:
      fatal = OnBlockTask(task.kind, done);
      break;
  }
  if (!fatal.ok()) Fail(fatal);
}

absl::Status Job::OnBlockTask(TaskKind kind, const TaskDone& done) {
  if (kind == TaskKind::kUpdateBlock) return pipeline_.OnUpdated(done);
  if (kind == TaskKind::kWriteBlock) return pipeline_.OnWritten(done);
  const StepPipeline::ReadOutcome outcome = pipeline_.OnRead(done);
  access_.OnRead(outcome);
  residency_.OnRead(outcome);
  if (!outcome.status.ok()) durable_.OnReadFailed(outcome.status);
  return outcome.fatal ? outcome.status : absl::OkStatus();
}

// Fails the job. All waiting commands are answered with the first error. Later commands get E_JOB_FAILED. Running tasks return
// their resources.
void Job::Fail(const absl::Status& first_error) {
  if (failed()) return;
  failed_ = first_error;
  is_recorded_ = false;
  if (spec_.options.keeps_jobs) io_.actions().Emit(DropRecord{.job = spec_.id});
  step_.Fail(first_error);
  access_.Drop(0, first_error);
  durable_.Abandon();
  if (!deleting_) residency_.Abandon();  // the memory of a deleted job is freed soon
  initial_.Reset(first_error);
  for (const auto& [id, session] : members_.all()) AnswerWaiting(*members_.Find(id), first_error);
}

absl::Status Job::FailedStatus() const {
  const bool is_on_disk = durable_.durable() != nullptr;
  return MakeError(ErrorId::kJobFailed,
                   absl::StrCat("job ", spec_.name, " failed after step ", step_.published_step(),
                                ": ", std::string(failed_.message())),
                   is_on_disk
                       ? absl::StrCat("restart forebayd: the job comes back at its durable step ",
                                      durable_.durable_step(), ", which deleting it would give up")
                       : "delete the job and start it again from a checkpoint");
}

absl::Status Job::Delete() {
  if (is_at_rest()) {
    return MakeError(ErrorId::kBusy, "the daemon is being restarted", "try again in a moment");
  }
  if (members_.live_ranks() > 0) {
    return MakeError(ErrorId::kBusy,
                     absl::StrCat("job ", spec_.name, " has ", members_.live_ranks(),
                                  members_.live_ranks() == 1 ? " session" : " sessions"),
                     "end its processes first");
  }
  EndAll(MakeError(ErrorId::kFenced, absl::StrCat("job ", spec_.name, " was deleted"),
                   "attach to another job"));
  return absl::OkStatus();
}

// Ends all sessions and fails the job, which is freed as soon as no session and no task uses it.
void Job::EndAll(const absl::Status& reason) {
  deleting_ = true;
  is_unrestored_ = false;
  for (const auto& [id, session] : members_.all()) {
    if (session.state != Session::State::kEnded) Evict(*members_.Find(id), reason);
  }
  // Fails the job even if dead ranks had called step, so that no step is decided or updated any more.
  Fail(reason);
}

// The order matters: each call may make possible what a later call begins.
void Job::Advance() {
  pipeline_.clear_waits_for_slot();  // a call below sets it again
  if (is_at_rest()) {                // only the durable step of the stop continues
    MoveDoubted();
    durable_.Pump();
    TryStop();
    CloseEnded();
    return;
  }
  // Initial parameters first: the steps begin with them.
  for (const StateAccess::Written& written : access_.DrainWritten()) {
    initial_.SetMasters(written, true);
  }
  if (auto done = initial_.DrainDone(); !done.empty()) {
    step_.BeginMasters(std::move(done), initial_.has_masters());
  }
  // Serves fetches before blocks of the step, because blocks take the free staging slots.
  if (spec_.plan.has_weights_on_swap() && MayServeFetches()) fetches_.Serve();
  // Publishes the step, whose durable step then begins.
  const bool was_updating = pipeline_.running();
  step_.AdvanceUpdate();
  durable_.Pump();
  // A stop and a new record come before accesses, moves and early updates, which would delay them.
  TryStop();
  if (is_at_rest()) return;
  TryRecord();
  // Before the decision: ranks that have called step wait, and kTurnsBetweenSteps bounds how long.
  UseTimeBetweenSteps(/*is_due=*/was_updating && !pipeline_.running());
  TryUseFloatSums();  // before the gradients that wait for these sums
  // Adds gradients, updates blocks early, decides, and begins the update.
  step_.Advance(MayUpdateEarly());
  if (MayServeFetches()) fetches_.Serve();  // weights whose blocks are updated now
  CloseEnded();
  // A session that has ended may have been the last with a lease, or the last of the old world.
  TryStop();
  if (is_at_rest()) return;
  TryChangeWorld();
  // The record comes before the answers to ranks, which say that the job outlives the daemon.
  TryRecord();
  AnswerAttaches();
  CloseEnded();  // sessions whose attach was refused
  FreeWhenUnused();
}

Activities Job::UnderWay() const {
  Activities under_way = step_.UnderWay();
  under_way.AddIf(is_unrestored_, Activity::kRestore);
  under_way.AddIf(making_tasks_ > 0 || float_sums_ == FloatSums::kMaking, Activity::kMemory);
  return under_way;
}

// An early update also waits for accesses that are queued, and for blocks that are marked to leave DRAM. An early update waits
// for a durable step only if calls of step wait for that step, or if that step waits for moves.
bool Job::MayUpdateEarly() const {
  Activities under_way = UnderWay().Without(Activity::kDurableStep);
  under_way.AddIf(access_.has_requests(), Activity::kAccess);
  under_way.AddIf(residency_.has_urgent_moves(), Activity::kMove);
  under_way.AddIf(durable_.is_awaiting_moves() || step_.is_awaiting_durable(),
                  Activity::kDurableStep);
  return MayBegin(Activity::kEarlyUpdate, under_way);
}

// Accesses states and moves blocks, in turns. If all ranks called step before the previous step was published (`is_due`),
// kTurnsBetweenSteps accesses and moves may begin before the decision.
void Job::UseTimeBetweenSteps(bool is_due) {
  const bool called = step_.phase() == Step::Phase::kReducing;
  if (is_due) residency_.OnPublished();
  if (!called) turns_left_ = 0;
  if (called && is_due) turns_left_ = kTurnsBetweenSteps;
  const auto may_begin = [&](Activity wanted) {
    const Activities under_way = UnderWay();
    return (called || step_.phase() == Step::Phase::kOpen) &&
           MayBegin(wanted, turns_left_ > 0 ? under_way.Without(Activity::kCalledStep) : under_way);
  };
  const auto is_busy = [&] { return access_.in_progress() || residency_.in_progress(); };
  const bool was_busy = is_busy();
  const auto read = [&] {
    const bool continues = called && access_.in_progress() && !residency_.in_progress();
    if (continues || may_begin(Activity::kAccess)) access_.Pump();
    if (access_.in_progress()) reads_first_ = false;
  };
  const auto move = [&] {
    if (access_.in_progress()) return;
    if (durable_.in_progress()) {
      MoveDoubted();
    } else if (residency_.in_progress() || (is_ready() && may_begin(Activity::kMove))) {
      residency_.Pump();
    }
    if (residency_.in_progress()) reads_first_ = true;
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
      durable_.is_awaiting_moves() && MayBegin(Activity::kDoubtedMove, UnderWay());
  if (may_begin || residency_.in_progress()) residency_.PumpDoubted();
}

void Job::Prefetch() {
  if (stop_ != Stop::kNone) return;
  const bool open = step_.phase() == Step::Phase::kOpen;
  if (open && !access_.is_writing()) weights_.Prefetch();
  const bool gathers = open || step_.phase() == Step::Phase::kReducing || step_.prepared_step() > 0;
  if (gathers && step_.is_gathering()) pipeline_.Prefetch();
}

void Job::FreeWhenUnused() {
  // Frees a job that has neither parameters nor sessions, unless it is a recovered job that is being restored, which needs no
  // session.
  const bool comes_back = is_unrestored_ && (has_begun_ || is_resumed()) && !failed();
  if (!initial_.ready() && members_.empty() && !comes_back) deleting_ = true;
  if (!deleting_ || freed_ || !members_.empty() || !io_.idle()) return;
  freed_ = true;
  io_.actions().Emit(FreeJob{
      .job = spec_.id,
      .keeps_arenas = is_unrestored_ && spec_.recovered->kept.has_value() && !is_resumed()});
}

}  // namespace forebay::daemon
