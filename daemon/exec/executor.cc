// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/executor.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/exec/clock.h"
#include "daemon/exec/path_wear.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/os/pidfd.h"
#include "protocol/os/status_macros.h"
#include "protocol/trace.h"
#include "spdlog/spdlog.h"

namespace forebay::daemon {
namespace {

using protocol::ErrorId;
using protocol::MakeError;

// Least time between two log lines about failed writes, which are retried for as long as they fail.
constexpr uint64_t kWriteErrorLogNs = 10'000'000'000;

std::string Text(const absl::Status& status) { return protocol::FormatError(status); }

TimedSubject SubjectOf(BlockPart part) {
  switch (part) {
    case BlockPart::kGradients:
      return TimedSubject::kGradientPage;
    case BlockPart::kWeightsArena:
      return TimedSubject::kWeightsPart;
    case BlockPart::kStates:
    case BlockPart::kWeights:
      break;
  }
  return TimedSubject::kBlock;
}

// True if one launcher has started both processes. Process 1 adopts the processes of many launches, and 0 stands for a process
// of another pid namespace.
bool IsSameLaunch(const protocol::ProcessInfo& one, const protocol::ProcessInfo& other) {
  constexpr pid_t kInit = 1;
  return (one.parent == other.parent && one.parent > kInit) ||
         (one.group == other.group && one.group != 0);
}

}  // namespace

Executor::Executor(const ExecutorOptions& options, nvme::IoEngine& engine, TaskRunner& runner,
                   SwapSpace* swap, LeftBefore left)
    : options_(options),
      engine_(engine),
      runner_(runner),
      swap_(swap),
      state_(options.state,
             [this](Action& action) { std::visit([this](auto& one) { Run(one); }, action); }),
      jobs_(options.arenas, registry_, runner, [this](Event event) { Raise(std::move(event)); }),
      mover_(
          runner, swap, [this](std::vector<SwapDone>& done) { EndTransfers(done); },
          [this](TaskDone done) { Raise(std::move(done)); }, &memory_,
          [this](const RecordBlock& evicted) { recovery_.records().Set(evicted); }),
      scrub_({.swap = swap,
              .runner = &runner,
              .jobs = [this] { return state_.node().DurableJobs(); },
              .end_transfers = [this](std::vector<SwapDone>& done) { EndTransfers(done); }}),
      loads_(&memory_),
      poller_(engine, {.arrived = [this](CommandArrived event) { Raise(event); },
                       .broken =
                           [this](SessionId id, const absl::Status& reason) {
                             Break(id, sessions_.at(id), reason);
                           }}),
      recovery_(std::move(left), {.registry = registry_,
                                  .runner = runner,
                                  .swap = swap,
                                  .jobs = jobs_,
                                  .sessions = sessions_}),
      reconnects_({.sessions = sessions_,
                   .jobs = jobs_,
                   .poller = poller_,
                   .exchange = exchange_,
                   .registry = registry_,
                   .runner = runner,
                   .arenas = options_.arenas},
                  [this](Event event) { Raise(std::move(event)); }) {
  if (swap_ != nullptr) registry_.Register({.kind = ArenaKind::kStaging}, swap_->staging());
}

bool Executor::idle() const {
  return sessions_.empty() && runner_.in_flight() == 0 &&
         (swap_ == nullptr || swap_->in_flight() == 0);
}

bool Executor::waits_for_swap_alone() const {
  return runner_.in_flight() == 0 && swap_ != nullptr && swap_->in_flight() > 0;
}

// ---------------------------------------------------------------------- the control plane's requests

void Executor::Attach(AttachRequested request, AttachCallbacks callbacks,
                      protocol::UniqueFd process, std::chrono::nanoseconds wait) {
  const SessionId id = request.session;
  ClientSession session;
  session.request = request;
  session.request.layout = nullptr;  // the job has the layout; a session needs no copy
  const auto job = ParseJobName(request.job, request.uid, OtherUsers::kAllowed);
  if (job.ok()) session.job = *job;
  session.callbacks = std::move(callbacks);
  session.process = std::move(process);
  session.wait = wait;
  session.number = id;
  if (const SessionId before = reconnects_.SessionOf(request, session.job); before != 0) {
    // The loss of the older connection was not noticed.
    if (sessions_.at(before).ends_ns == 0) reconnects_.Disconnect(before);
    if (sessions_.Find(before) != nullptr) return reconnects_.Begin(before, std::move(session));
  }
  request.is_left_behind = recovery_.IsLeftBehind(request, session.job);
  request.rival_pid = RivalOf(session);
  sessions_.Add(id, std::move(session));
  Raise(std::move(request));
}

int32_t Executor::RivalOf(const ClientSession& session) const {
  if (session.request.reader) return 0;
  const ClientSession* const newest = sessions_.OfRank(session.job, session.request.rank);
  if (newest == nullptr || !newest->process.valid() || !session.process.valid()) return 0;
  const auto own = protocol::ReadProcess(session.process.get());
  const auto rival = protocol::ReadProcess(newest->process.get());
  const bool is_rival = own && rival && own->pid != rival->pid && rival->is_running;
  return is_rival && IsSameLaunch(*own, *rival) ? rival->pid : 0;
}

absl::Status Executor::Mapped(SessionId number) {
  const SessionId id = sessions_.Resolve(number);
  ClientSession* const session = sessions_.Find(id);
  if (session == nullptr || session->io == nullptr || session->broken) return SessionOver();
  if (poller_.Contains(id)) return absl::OkStatus();
  RETURN_IF_ERROR(poller_.Add(id, session->io->channel()));
  session->was_mapped = true;
  Raise(SessionMapped{.session = id});
  return absl::OkStatus();
}

void Executor::End(SessionId number, EndCause cause) {
  const SessionId id = sessions_.Resolve(number);
  ClientSession* const session = sessions_.Find(id);
  if (session == nullptr) return;
  if (cause == EndCause::kDisconnected) {
    if (Reconnects::MayDisconnect(*session)) return reconnects_.Disconnect(id);
    cause = EndCause::kLost;
  }
  session->has_detached = cause == EndCause::kDetached;
  LeaveExchange(id);
  Raise(SessionEnded{.session = id, .cause = cause});
}

uint64_t Executor::EndDisconnected(uint64_t until_ns) {
  const Reconnects::Due due = reconnects_.DrainDue(until_ns);
  for (const SessionId id : due.sessions) {
    if (sessions_.Find(id) == nullptr) continue;
    LeaveExchange(id);
    Raise(SessionEnded{.session = id, .cause = EndCause::kLost});
  }
  return due.next_ns;
}

// State of an attached session that holds a rank of its job.
struct Executor::CurrentRank {
  RankExchange::Member member;
  std::optional<uint32_t> detached_rank;  // a rank of the job that has detached
};

std::map<SessionId, Executor::CurrentRank> Executor::CurrentRanks() const {
  std::map<SessionId, CurrentRank> ranks;
  for (const JobView& job : state_.node().Jobs()) {
    for (const SessionView& session : job.sessions) {
      if (session.reader || session.fenced || !session.attached) continue;
      ranks[session.id] = {.member = {.session = session.id,
                                      .call = 0,
                                      .job = job.id,
                                      .rank = session.rank,
                                      .world_size = job.world_size},
                           .detached_rank = job.detached_rank};
    }
  }
  return ranks;
}

void Executor::FailExchangeOfFenced(const std::map<SessionId, CurrentRank>& ranks) {
  exchange_.Fail([&](const auto& member) { return !ranks.contains(member.session); },
                 MakeError(ErrorId::kRankLost, "a rank of the job ended, or was replaced"));
}

void Executor::LeaveExchange(SessionId id) {
  exchange_.Forget(id);
  if (exchange_.empty()) return;
  const std::map<SessionId, CurrentRank> ranks = CurrentRanks();
  const auto gone = ranks.find(id);
  if (gone == ranks.end()) return FailExchangeOfFenced(ranks);
  const RankExchange::Member& member = gone->second.member;
  exchange_.Fail([&](const auto& other) { return other.job == member.job; },
                 MakeError(ErrorId::kRankLost, absl::StrCat("rank ", member.rank, " has ended")));
}

void Executor::CancelExchange(SessionId number, uint64_t call) {
  const SessionId id = sessions_.Resolve(number);
  exchange_.Fail([&](const auto& member) { return member.session == id && member.call == call; },
                 MakeError(ErrorId::kInterrupted, "the client has given the exchange up"));
}

void Executor::Exchange(SessionId of, uint64_t call, uint64_t number, std::string bytes,
                        RankExchange::Answer answer) {
  const SessionId id = sessions_.Resolve(of);
  const std::map<SessionId, CurrentRank> ranks = CurrentRanks();
  FailExchangeOfFenced(ranks);
  const ClientSession* const session = sessions_.Find(id);
  if (session == nullptr) return answer(SessionOver());
  if (session->request.reader) {
    return answer(MakeError(ErrorId::kRank, "this session is a reader: it has no rank"));
  }
  const auto current = ranks.find(id);
  if (current == ranks.end()) {
    return answer(MakeError(ErrorId::kRankLost, "a rank of the job ended, or was replaced"));
  }
  if (const auto detached = current->second.detached_rank; detached.has_value()) {
    return answer(MakeError(ErrorId::kRankLost, absl::StrCat("rank ", *detached, " has detached")));
  }
  RankExchange::Member member = current->second.member;
  member.is_back = session->request.reattach;
  member.call = call;
  member.number = number;
  exchange_.Add(member, std::move(bytes), std::move(answer));
}

void Executor::DeleteJob(std::string name, uint32_t uid,
                         absl::AnyInvocable<void(absl::Status)> done) {
  const uint64_t request = deletes_.empty() ? 1 : deletes_.rbegin()->first + 1;
  deletes_.emplace(request, std::move(done));
  Raise(DeleteJobRequested{.request = request, .uid = uid, .job = std::move(name)});
}

absl::StatusOr<std::vector<ShownEvent>> Executor::Trace(const JobName& name) const {
  const std::optional<JobId> id = jobs_.FindNamed(name);
  if (!id) {
    return MakeError(ErrorId::kJobName, absl::StrCat("there is no job ", name.name),
                     "forebay jobs lists them");
  }
  const JobMemory& job = *jobs_.Find(*id);
  const Timeline& timeline = job.timeline;
  std::vector<ShownEvent> events;
  for (const TimedEvent& event : timeline.newest()) {
    events.push_back({.process = "forebayd",
                      .lane = Name(event.lane),
                      .name = NameOf(event, *job.layout),
                      .start_ns = event.start_ns,
                      .end_ns = event.end_ns,
                      .bytes = event.bytes});
  }
  for (const auto& [session_id, session] : sessions_.all()) {
    if (session.job != name || session.trace_bytes == 0 || session.io == nullptr) continue;
    const std::span<const std::byte> memory = session.io->grad()->bytes().last(session.trace_bytes);
    for (const protocol::TraceRecord& record :
         protocol::ReadTrace(*reinterpret_cast<const protocol::TraceMemory*>(memory.data()),
                             timeline.newest_step())) {
      if (events.size() == kTraceEventsMax) return events;
      events.push_back(
          {.process = absl::StrCat("rank ", session.request.rank),
           .lane = std::string(Name(static_cast<protocol::ClientLane>(record.lane))),
           .name = std::string(record.name, ::strnlen(record.name, protocol::kTraceNameBytes)),
           .start_ns = record.start_ns,
           .end_ns = record.end_ns,
           .bytes = record.bytes});
    }
  }
  return events;
}

// ------------------------------------------------------------------------------ the reactor's news

void Executor::OnCompletion(const nvme::Completion& completion) {
  if (nvme::Volume::Owns(completion.token)) {
    FOREBAY_CHECK(swap_ != nullptr);
    transferred_.clear();
    swap_->OnCompletion(completion, transferred_);
    EndTransfers(transferred_);
    return;
  }
  poller_.OnCompletion(completion);
}

void Executor::EndTransfers(std::vector<SwapDone>& done) {
  for (SwapDone& one : done) {
    if (one.kind == SwapDone::Kind::kReturned) {
      Raise(StagingSlotReturned{.slot = *one.staging_slot});
      continue;
    }
    if (scrub_.OnTransferred(one)) continue;
    if (one.staging_slot) Raise(StagingSlotKept{.slot = *one.staging_slot});
    if (one.kind == SwapDone::Kind::kRead || one.kind == SwapDone::Kind::kWritten) {
      const auto load = loads_.find(one.task);
      JobMemory& job = jobs_.at(one.job);
      job.timeline.Add(
          {.lane = one.kind == SwapDone::Kind::kRead ? Lane::kSwapRead : Lane::kSwapWrite,
           .subject = load != loads_.end() ? TimedSubject::kPartition : SubjectOf(one.part),
           .index = load != loads_.end() ? load->second.partition : one.block,
           .start_ns = one.start_ns,
           .end_ns = MonotonicNs(),
           .bytes = one.bytes});
    }
    const bool is_retried = one.kind == SwapDone::Kind::kWritten;
    if (!one.status.ok() && (!is_retried || MonotonicNs() >= next_write_error_ns_)) {
      spdlog::error("{}", Text(one.status));
      if (is_retried) next_write_error_ns_ = MonotonicNs() + kWriteErrorLogNs;
    }
    const uint64_t end_ns = MonotonicNs();
    if (mover_.OnTransferred(one, end_ns) || CopyLoaded(one, end_ns)) continue;
    const bool is_refused = one.kind == SwapDone::Kind::kCommitted && !one.status.ok();
    Raise(TaskDone{.task = one.task,
                   .status = std::move(one.status),
                   .begin_ns = one.start_ns,
                   .end_ns = end_ns,
                   .doubted = is_refused ? swap_->Doubted() : std::vector<nvme::Slot>()});
  }
}

std::chrono::nanoseconds Executor::Tick() {
  const AbsentRanks::Ended ended = recovery_.ranks().Look();
  for (const RankEnded& one : ended.ranks) Raise(one);
  uint64_t next = std::min({state_.FireTimers(), jobs_.RunTimers(), scrub_.Tick(), ended.next_ns,
                            EndDisconnected(MonotonicNs())});
  if (swap_ != nullptr) {
    std::vector<SwapDone> done;
    swap_->Tick(done);
    EndTransfers(done);
    if (std::vector<PathWear> wear = swap_->DueWear(); !wear.empty()) {
      runner_.Post(PoolId::kSetup,
                   [wear = std::move(wear), folder = swap_->state_folder()]() -> TaskRunner::Then {
                     SaveWear(wear, folder);
                     return [] {};
                   });
    }
    next = std::min(next, swap_->next_tick_ns());
  }
  if (next == UINT64_MAX) return nvme::IoEngine::kForever;
  const uint64_t now = MonotonicNs();
  return std::chrono::nanoseconds(next > now ? next - now : 0);
}

void Executor::Break(SessionId id, ClientSession& session, const absl::Status& reason) {
  if (session.broken) return;
  session.broken = true;
  LeaveExchange(id);
  poller_.Remove(id);
  spdlog::warn("session {}, {}: {}", id, session.Who(), Text(reason));
  session.callbacks.closed(reason);
  session.callbacks.closed = [](const absl::Status&) {};
  Raise(SessionEnded{.session = id, .cause = EndCause::kLost});
}

// --------------------------------------------------------------------------------- start and stop

void Executor::Start() {
  recovery_.Own();
  if (recovery_.HasUnfinished()) Raise(UpdatesResumed{});
}

void Executor::StopJobs(FlushStore flush, absl::AnyInvocable<void(const absl::Status&)> done) {
  if (flush == nullptr && !state_.node().HasStepsToMakeDurable()) return done(absl::OkStatus());
  stop_ = {.flush = std::move(flush), .done = std::move(done)};
  if (stop_.flush == nullptr) Raise(UpdatesResumed{});  // no daemon continues jobs from memory
  Raise(StopRequested{});
}

void Executor::StopDue() { Raise(::forebay::daemon::StopDue{}); }

// Clients are notified once all descriptors are stored: before that they would wait in vain.
void Executor::Run(JobsStopped& action) {
  if (stop_.flush == nullptr) return stop_.done(absl::OkStatus());
  std::set<JobId> recorded = recovery_.records().stored();
  std::erase_if(action.jobs, [&](JobId job) { return recorded.erase(job) == 0; });
  for (const JobId job : action.jobs) recovery_.Leave(job);
  absl::Status status = stop_.flush();
  if (status.ok()) {
    for (const SessionId session : action.sessions) {
      poller_.Remove(session);
      sessions_.io(session).channel().Close(protocol::ChannelState::kRestarting);
    }
    for (const JobId job : action.jobs) {
      for (const SessionId id : sessions_.WithMemory(jobs_.at(job).name)) {
        sessions_.at(id).is_stopped = true;
      }
    }
  }
  if (status.ok() && !recorded.empty()) {
    status = MakeError(
        ErrorId::kTimeout,
        absl::StrCat(recorded.size(), " jobs did not come to rest between two steps in time"));
  }
  stop_.done(status);
}

}  // namespace forebay::daemon
