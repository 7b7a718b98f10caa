#include "daemon/exec/executor.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_adam/targets.h"
#include "daemon/exec/clock.h"
#include "protocol/doorbell.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/os/status_macros.h"
#include "spdlog/spdlog.h"

namespace forebay::daemon {
namespace {

using protocol::ErrorId;
using protocol::MakeError;

// Failed writes are tried again for as long as they fail: a line in the log so often at most.
constexpr uint64_t kWriteErrorLogNs = 10'000'000'000;

std::string Text(const absl::Status& status) { return protocol::FormatError(status); }

absl::Status SessionOver() {
  return MakeError(ErrorId::kFenced, "the session is over", "attach again");
}

}  // namespace

Executor::Executor(const ExecutorOptions& options, nvme::IoEngine& engine, TaskRunner& runner,
                   SwapSpace* swap)
    : options_(options),
      engine_(engine),
      runner_(runner),
      swap_(swap),
      start_ns_(MonotonicNs()),
      state_(options.state) {
  if (swap_ != nullptr) registry_.Register({.kind = ArenaKind::kStaging}, swap_->staging());
}

std::string Executor::WhoIs(const AttachRequested& request) {
  return absl::StrCat(request.reader ? "a reader" : absl::StrCat("rank ", request.rank), " of job ",
                      request.job);
}

void Executor::Raise(Event event) {
  events_.push_back(std::move(event));
  if (running_) return;
  running_ = true;
  while (!events_.empty()) {
    const Event next = std::move(events_.front());
    events_.pop_front();
    state_.Handle(next, actions_);
    for (size_t i = 0; i < actions_.size(); ++i) {  // running one may append more
      Action action = std::move(actions_[i]);
      std::visit([this](auto& one) { Run(one); }, action);
    }
    actions_.clear();
  }
  running_ = false;
}

Executor::JobIo& Executor::job(JobId id) {
  const auto found = jobs_.find(id);
  FOREBAY_CHECK(found != jobs_.end());
  return found->second;
}

SessionIo& Executor::session_io(SessionId id) {
  const auto found = sessions_.find(id);
  FOREBAY_CHECK(found != sessions_.end() && found->second.io != nullptr);
  return *found->second.io;
}

bool Executor::idle() const {
  return sessions_.empty() && runner_.in_flight() == 0 &&
         (swap_ == nullptr || swap_->in_flight() == 0);
}

bool Executor::waits_for_swap_alone() const {
  return runner_.in_flight() == 0 && swap_ != nullptr && swap_->in_flight() > 0;
}

// ---------------------------------------------------------------------- the control plane's requests

void Executor::Attach(AttachRequested request, AttachCallbacks callbacks) {
  const SessionId id = request.session;
  Session session;
  session.request = request;
  session.request.layout = nullptr;  // the job's is kept, not one a session
  const auto job = ParseJobName(request.job, request.uid, OtherUsers::kAllowed);
  if (job.ok()) session.job = *job;
  session.callbacks = std::move(callbacks);
  FOREBAY_CHECK(sessions_.emplace(id, std::move(session)).second);
  Raise(std::move(request));
}

absl::Status Executor::Mapped(SessionId id) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end() || found->second.io == nullptr) return SessionOver();
  Session& session = found->second;
  if (session.mapped) return absl::OkStatus();
  RETURN_IF_ERROR(engine_.WatchEventFd(session.io->channel().wait_fd(), kSessionTokenTag | id));
  session.mapped = true;
  Raise(SessionMapped{.session = id});
  return absl::OkStatus();
}

void Executor::End(SessionId id, EndCause cause) {
  if (sessions_.contains(id)) Raise(SessionEnded{.session = id, .cause = cause});
}

absl::Status Executor::Explain(SessionId id, uint64_t tag) const {
  const auto found = sessions_.find(id);
  if (found != sessions_.end() && found->second.io != nullptr) {
    return found->second.io->Explain(tag);
  }
  const auto evicted = std::find_if(evicted_.begin(), evicted_.end(),
                                    [&](const auto& entry) { return entry.first == id; });
  return evicted == evicted_.end() ? SessionOver() : evicted->second;
}

void Executor::DeleteJob(std::string name, uint32_t uid,
                         absl::AnyInvocable<void(absl::Status)> done) {
  const uint64_t request = next_delete_++;
  deletes_.emplace(request, std::move(done));
  Raise(DeleteJobRequested{.request = request, .uid = uid, .job = std::move(name)});
}

NodeSnapshot Executor::Snapshot() {
  NodeSnapshot snapshot;
  snapshot.uptime_seconds = static_cast<double>(MonotonicNs() - start_ns_) * 1e-9;
  snapshot.node = state_.Node();
  snapshot.memory = registry_.Totals();
  snapshot.arenas = registry_.Lines();
  if (swap_ != nullptr) {
    const nvme::VolumeStats stats = swap_->stats();
    for (size_t i = 0; i < stats.paths.size(); ++i) {
      const LatePath& late = swap_->late()[i];
      snapshot.swap.push_back({.path = swap_->paths()[i].path,
                               .stats = stats.paths[i],
                               .used_bytes = snapshot.node.swap_path_used_bytes[i],
                               .late_requests = late.requests,
                               .late_seconds = static_cast<double>(late.oldest_ns) * 1e-9});
    }
  }
  for (JobView& view : state_.Jobs()) {
    const auto io = jobs_.find(view.id);
    const double seconds = io == jobs_.end() ? 0 : io->second.timeline.newest_seconds();
    JobSnapshot& job = snapshot.jobs.emplace_back(
        JobSnapshot{.view = std::move(view), .last_step_seconds = seconds});
    if (io == jobs_.end() || io->second.making == nullptr) continue;
    job.made_bytes = *io->second.making->made_bytes;
    job.making_bytes = io->second.making->total_bytes;
  }
  snapshot.io_engine = engine_.name();
  snapshot.io_engine_reason = options_.io_engine_reason;
  snapshot.adam_target = cpu_adam::ChosenTarget();
  snapshot.workers = runner_.workers();
  return snapshot;
}

absl::StatusOr<std::vector<TimedEvent>> Executor::Trace(const JobName& name) const {
  for (const auto& [id, io] : jobs_) {
    if (io.name == name) return io.timeline.newest();
  }
  return MakeError(ErrorId::kJobName, absl::StrCat("there is no job ", name.name),
                   "forebay jobs lists them");
}

// ------------------------------------------------------------------------------ the reactor's news

void Executor::OnCompletion(const nvme::Completion& completion) {
  if (nvme::Volume::Owns(completion.token)) {
    FOREBAY_CHECK(swap_ != nullptr);
    std::vector<SwapDone> done;
    swap_->OnCompletion(completion, done);
    EndTransfers(done);
    return;
  }
  if ((completion.token & kSessionTokenTag) != kSessionTokenTag) return;  // a queue's
  const auto found = sessions_.find(completion.token & ~kSessionTokenTag);
  if (found == sessions_.end()) return;
  if (found->second.asleep) found->second.io->channel().EndSleep();
  found->second.asleep = false;
}

void Executor::EndTransfers(std::vector<SwapDone>& done) {
  for (SwapDone& one : done) {
    if (one.kind != SwapDone::Kind::kZeroed) {
      job(one.job).timeline.Add(
          {.lane = one.kind == SwapDone::Kind::kRead ? Lane::kSwapRead : Lane::kSwapWrite,
           .name = absl::StrCat("block ", one.block),
           .start_ns = one.start_ns,
           .end_ns = MonotonicNs(),
           .bytes = one.bytes});
    }
    const bool is_retried = one.kind == SwapDone::Kind::kWritten;
    if (!one.status.ok() && (!is_retried || MonotonicNs() >= next_write_error_ns_)) {
      spdlog::error("{}", Text(one.status));
      if (is_retried) next_write_error_ns_ = MonotonicNs() + kWriteErrorLogNs;
    }
    Done(one.task, std::move(one.status));
  }
}

std::chrono::nanoseconds Executor::Tick() {
  uint64_t next = std::min(FireTimers(), RunMemoryTimers());
  if (swap_ != nullptr) {
    std::vector<SwapDone> done;
    swap_->Tick(done);
    EndTransfers(done);
    next = std::min(next, swap_->next_tick_ns());
  }
  if (next == UINT64_MAX) return nvme::IoEngine::kForever;
  const uint64_t now = MonotonicNs();
  return std::chrono::nanoseconds(next > now ? next - now : 0);
}

bool Executor::PollSessions() {
  polled_.clear();  // a command may close sessions: by id, not by iterator
  for (const auto& [id, session] : sessions_) {
    if (session.mapped && !session.asleep && !session.broken) polled_.push_back(id);
  }
  bool more = false;
  for (const SessionId id : polled_) {
    const auto found = sessions_.find(id);
    if (found != sessions_.end() && !found->second.broken) more |= PollSession(id, found->second);
  }
  return more;
}

bool Executor::PollSession(SessionId id, Session& session) {
  for (int i = 0; i < kCommandsPerTurn; ++i) {
    const auto command = session.io->channel().Receive();
    if (!command.ok()) {
      Break(id, session, command.status());
      return false;
    }
    if (!command->has_value()) {
      const auto sleeps = session.io->channel().PrepareSleep();
      if (!sleeps.ok()) {
        Break(id, session, sleeps.status());
        return false;
      }
      session.asleep = *sleeps;
      return !*sleeps;
    }
    Raise(CommandArrived{.session = id, .command = **command});
    const auto found = sessions_.find(id);
    if (found == sessions_.end() || found->second.broken) return false;
  }
  return true;
}

uint64_t Executor::FireTimers() {
  while (!timers_.empty() && timers_.begin()->first <= MonotonicNs()) {
    Raise(timers_.extract(timers_.begin()).mapped());
  }
  return timers_.empty() ? UINT64_MAX : timers_.begin()->first;
}

void Executor::Break(SessionId id, Session& session, const absl::Status& reason) {
  if (session.broken) return;
  session.broken = true;
  spdlog::warn("session {}, {}: {}", id, WhoIs(session.request), Text(reason));
  session.callbacks.closed(reason);
  session.callbacks.closed = [](const absl::Status&) {};
  Raise(SessionEnded{.session = id, .cause = EndCause::kLost});
}

}  // namespace forebay::daemon
