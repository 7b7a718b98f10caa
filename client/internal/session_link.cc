// SPDX-License-Identifier: Apache-2.0
#include "client/internal/session_link.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/internal/control.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"

namespace forebay::client::internal {

using protocol::Command;
using protocol::Completion;
using protocol::ErrorId;
using protocol::MakeError;

namespace {

constexpr std::chrono::seconds kQuestionPeriod{1};
constexpr std::chrono::microseconds kSpin{50};
constexpr std::chrono::milliseconds kLookPeriod{1};
constexpr std::chrono::milliseconds kPauseMin{20};
constexpr std::chrono::seconds kLastAttempt{1};
// The control plane may hear of an end before the data plane.
constexpr std::chrono::seconds kNoticeLimit{1};
constexpr std::chrono::milliseconds kNoticePause{2};
constexpr char kStartAgain[] =
    "start the trainer again: it goes on from the newest step that the daemon has kept";

absl::Status Gone(const std::string& what) {
  return MakeError(ErrorId::kDaemonGone, absl::StrCat("the daemon was restarted, and ", what),
                   kStartAgain);
}

// Returns whether another attempt may succeed.
bool IsPassing(const absl::Status& status) {
  const ErrorId id = protocol::IdOf(status);
  return id == ErrorId::kNoDaemon || id == ErrorId::kDaemonGone || id == ErrorId::kLimit ||
         id == ErrorId::kTimeout || id == ErrorId::kBusy || id == ErrorId::kRemote ||
         id == ErrorId::kPermission;  // the daemon may end while it is asked
}

absl::Status InterruptedError() {
  return MakeError(ErrorId::kInterrupted,
                   "the call was interrupted while there was no daemon; its outcome is unknown");
}

const Deadline& Earlier(const Deadline& one, const Deadline& other) {
  return one.Remaining() < other.Remaining() ? one : other;
}

GradSlots::Options SlotOptions(const SessionParts& parts) {
  const uint64_t bytes = std::min(parts.step_region_offset, parts.grad_bytes_max);
  // A reader's arena takes pieces of states, not whole partitions.
  const uint64_t largest_bytes = parts.reader
                                     ? bytes / protocol::kCacheLineBytes * protocol::kCacheLineBytes
                                     : parts.layout->largest_piece_bytes();
  return {.capacity_bytes = bytes, .largest_bytes = largest_bytes};
}

}  // namespace

absl::Status StoredErrors::StoreDevice(absl::Status status) {
  if (protocol::IdOf(status) == ErrorId::kDevice) device.Update(status);
  return status;
}

absl::Status StoredErrors::PopRelease() {
  RETURN_IF_ERROR(device);
  return std::exchange(release, absl::OkStatus());
}

SessionLink::SessionLink(SessionParts& parts, Hooks hooks, std::pmr::memory_resource* memory)
    : parts_(parts),
      hooks_(std::move(hooks)),
      memory_(memory),
      connection_(std::move(parts.connection)),
      port_(std::move(parts.port), {parts.gauge->commands, parts.gauge->sleeps}, memory),
      slots_(SlotOptions(parts), memory) {}

// ---------------------------------------- calls of the user

absl::Status SessionLink::BeginCall() {
  next_question_ = std::chrono::steady_clock::now() + kQuestionPeriod;
  if (!is_detached()) return absl::OkStatus();
  return MakeError(ErrorId::kFenced,
                   absl::StrCat("job ", parts_.job, ": this session was detached"), "attach again");
}

// After an error of the device, the daemon and the other ranks continue without the session.
void SessionLink::EndCall() {
  constexpr std::chrono::seconds kPatience{5};  // afterwards the daemon sees the process end
  if (!errors_.device.ok() && phase_ == Phase::kAttached) {
    phase_ = Phase::kEnded;
    if (connection_ != nullptr) {
      connection_->control->Detach({.deadline = Deadline::After(kPatience)}).IgnoreError();
    }
    port_.Close(errors_.device);
  }
  UpdateCalls();
}

absl::Status SessionLink::CheckStored(const WaitLimits& limits) {
  RETURN_IF_ERROR(errors_.device);
  RETURN_IF_ERROR(Poll(limits));
  RETURN_IF_ERROR(errors_.PopRelease());
  return errors_.gradient;
}

absl::Status SessionLink::CheckStoredAlive(const WaitLimits& limits) {
  RETURN_IF_ERROR(PollAlive(limits));
  RETURN_IF_ERROR(errors_.PopRelease());
  return errors_.gradient;
}

void SessionLink::UpdateCommittedStep(const Completion& completion) {
  if (completion.committed_step <= parts_.gauge->committed_step) return;
  parts_.gauge->committed_step = completion.committed_step;
  hooks_.on_committed();
}

void SessionLink::OnAnswer(const Completion& completion, const absl::Status& status,
                           Answer& answer) {
  UpdateCommittedStep(completion);
  answer.arrived = true;
  answer.completion = completion;
  answer.status = status;
  if (answer.abandoned) Abandon(answer);
}

void SessionLink::Abandon(Answer& answer) {
  answer.abandoned = true;
  if (!answer.arrived) return;
  if (answer.range.has_value()) slots_.Free(*std::exchange(answer.range, std::nullopt));
  if (answer.status.ok() && answer.completion.lease_id != 0) {
    hooks_.on_late_lease(answer.completion.lease_id);
  }
}

absl::StatusOr<std::shared_ptr<SessionLink::Answer>> SessionLink::Start(const Command& command,
                                                                        const WaitLimits& limits) {
  const auto answer =
      std::allocate_shared<Answer>(std::pmr::polymorphic_allocator<Answer>(memory_), this);
  // Captures one pointer only: with two, the callback would need allocated memory.
  auto on_done = [answer](const Completion& completion, const absl::Status& status) {
    answer->link->OnAnswer(completion, status, *answer);
  };
  RETURN_IF_ERROR(Send(command, limits, std::move(on_done)));
  return answer;
}

absl::Status SessionLink::WaitFor(const Answer& answer, const WaitLimits& limits) {
  return Wait([&answer] { return answer.arrived; }, limits);
}

absl::StatusOr<Completion> SessionLink::Call(const Command& command, BusyRange* range,
                                             const WaitLimits& limits) {
  ASSIGN_OR_RETURN(const std::shared_ptr<Answer> answer, Start(command, limits));
  const absl::Status waited = WaitFor(*answer, limits);
  if (!waited.ok()) {
    if (range != nullptr) answer->range = range->HandOver();
    Abandon(*answer);
    return waited;
  }
  RETURN_IF_ERROR(answer->status);
  return answer->completion;
}

// ---------------------------------------- waits

absl::Status SessionLink::Poll(const WaitLimits& limits) {
  RETURN_IF_ERROR(port_.Poll());
  return port_.is_restarting() ? Reattach(limits) : absl::OkStatus();
}

absl::Status SessionLink::PollAlive(const WaitLimits& limits) {
  RETURN_IF_ERROR(port_.PollAlive());
  return port_.is_restarting() ? Reattach(limits) : absl::OkStatus();
}

absl::Status SessionLink::Wait(absl::FunctionRef<bool()> done, const WaitLimits& limits) {
  RETURN_IF_ERROR(port_.Poll());
  if (done()) return absl::OkStatus();
  if (idle_core_.Any() && !port_.is_restarting()) {
    const auto spin_end = std::chrono::steady_clock::now() + kSpin;
    while (std::chrono::steady_clock::now() < spin_end) {
      RETURN_IF_ERROR(port_.Poll());
      if (done()) return absl::OkStatus();
    }
  }
  CommandPort::Pause pause = CommandPort::Pause::kWoken;
  while (true) {
    AskWhetherItContinues();
    const bool is_under_way = hooks_.look();  // handles completions too: before done()
    const absl::Status alive = port_.PollAlive();
    if (done()) return absl::OkStatus();
    RETURN_IF_ERROR(alive);
    if (port_.is_restarting()) {
      RETURN_IF_ERROR(Reattach(limits));
      continue;
    }
    // The check runs only after a pause or a signal, because in Python it waits for the interpreter's lock.
    if (pause == CommandPort::Pause::kUndisturbed && limits.Interrupted()) {
      return MakeError(ErrorId::kInterrupted, "the call was interrupted; its outcome is unknown");
    }
    if (limits.deadline.Expired()) {
      return MakeError(ErrorId::kTimeout,
                       "the call's time ran out before the daemon answered; its outcome is unknown",
                       "another rank may not have come this far: see `forebay status`");
    }
    auto limit = limits.deadline.Remaining();
    const bool asks = limits.interrupt_check != nullptr && *limits.interrupt_check;
    if (asks) limit = std::min(limit, kInterruptPeriod);
    if (is_under_way) limit = std::min(limit, kLookPeriod);
    ASSIGN_OR_RETURN(pause, port_.Sleep(limit));
  }
}

absl::Status SessionLink::Send(const protocol::Command& command, const WaitLimits& limits,
                               CommandPort::OnDone on_done) {
  absl::StatusOr<bool> sent = port_.TrySend(command, on_done);
  if (sent.ok() && !*sent) {
    const auto try_again = [&] {
      sent = port_.TrySend(command, on_done);
      return !sent.ok() || *sent;
    };
    RETURN_IF_ERROR(Wait(try_again, limits));
  }
  return sent.status();
}

absl::StatusOr<uint64_t> SessionLink::WaitForOffset(
    absl::FunctionRef<std::optional<uint64_t>()> allocate, const WaitLimits& limits) {
  std::optional<uint64_t> offset;
  const auto done = [&] {
    if (!offset.has_value()) offset = allocate();
    return offset.has_value() || !over_.ok();
  };
  RETURN_IF_ERROR(Wait(done, limits));
  if (!offset.has_value()) return over_;
  return *offset;
}

absl::StatusOr<BusyRange> SessionLink::WaitForRange(uint64_t size_bytes, const WaitLimits& limits) {
  const auto allocate = [&] { return slots_.AllocateBusy(size_bytes); };
  ASSIGN_OR_RETURN(const uint64_t offset, WaitForOffset(allocate, limits));
  return BusyRange(slots_, offset);
}

void SessionLink::AskWhetherItContinues() {
  const auto now = std::chrono::steady_clock::now();
  if (has_asked_ || now < next_question_) return;
  next_question_ = now + kQuestionPeriod;
  CommandPort::OnDone on_answer = [this](const Completion& completion, const absl::Status& status) {
    UpdateCommittedStep(completion);
    has_asked_ = false;
    over_ = status;
  };
  const absl::StatusOr<bool> sent = TrySend(MakeCommand(protocol::Op::kCheck), on_answer);
  if (sent.ok()) has_asked_ = *sent;  // an error is returned by every call of the port
}

absl::Status SessionLink::WaitForCopies(absl::FunctionRef<bool()> ended, const WaitLimits& limits) {
  constexpr std::chrono::microseconds kPause{20};
  constexpr int kLooks = kInterruptPeriod / kPause;
  for (int looks = 1;; ++looks) {
    AskWhetherItContinues();
    hooks_.look();
    port_.Poll().IgnoreError();  // copies end even if the daemon has died
    if (ended()) return absl::OkStatus();
    RETURN_IF_ERROR(over_);
    if (port_.is_restarting()) RETURN_IF_ERROR(Reattach(limits));
    if (looks % kLooks == 0 && limits.Interrupted()) {
      return MakeError(ErrorId::kInterrupted, "the call was interrupted; its outcome is unknown");
    }
    if (limits.deadline.Expired()) {
      return MakeError(ErrorId::kTimeout,
                       "the call's time ran out before the device's copies ended",
                       "the device's stream waits for something: call again");
    }
    std::this_thread::sleep_for(kPause);
  }
}

// ---------------------------------------- the daemon's restart, and the end

absl::Status SessionLink::EndSession(absl::Status reason) {
  port_.Close(reason);
  return reason;
}

bool SessionLink::EndIfRestarting() {
  port_.PollAlive().IgnoreError();
  if (!port_.is_restarting()) return false;
  EndSession(DaemonGoneError()).IgnoreError();
  return true;
}

bool SessionLink::IsRestartingSoon(const absl::Status& met) {
  const ErrorId id = protocol::IdOf(met);
  // Errors that report a lost connection: E_DAEMON_GONE on this side, E_REMOTE from a gateway, E_FENCED from the daemon.
  const bool may_be =
      id == ErrorId::kDaemonGone || id == ErrorId::kRemote || id == ErrorId::kFenced;
  if (!may_be) return false;
  for (const Deadline end = Deadline::After(kNoticeLimit); !end.Expired();) {
    if (!port_.PollAlive().ok()) return false;
    if (port_.is_restarting()) return true;
    std::this_thread::sleep_for(kNoticePause);
  }
  return false;
}

absl::Status SessionLink::TryReattach(const WaitLimits& limits) {
  hooks_.look();
  // With weights on swap the request includes leases whose readers have ended meanwhile: the daemon reports only how many of
  // the requested leases it retained. Leases on weights in DRAM end with the daemon, and the weights stay in place.
  const std::vector<uint64_t> held =
      parts_.weights_on_swap ? port_.leases_held() : std::vector<uint64_t>();
  ASSIGN_OR_RETURN(GrantedSession granted,
                   parts_.attach_again({.held_leases = held,
                                        .grad_arena_inode = parts_.terms.grad_arena.inode,
                                        .newest_tag = port_.newest_tag(),
                                        .exchanges = exchanges_,
                                        .exchanged = exchanged_},
                                       limits));
  return ResumeWith(std::move(granted), held.size(), limits);
}

bool SessionLink::ReattachOrEnd(const WaitLimits& limits) {
  port_.PollAlive().IgnoreError();
  const bool has_daemon =
      !port_.is_restarting() || (parts_.attach_again && TryReattach(limits).ok());
  return !EndIfRestarting() && has_daemon;
}

absl::Status SessionLink::Reattach(const WaitLimits& limits) {
  if (!parts_.attach_again) {
    return EndSession(MakeError(
        ErrorId::kDaemonGone,
        "the daemon is being restarted; a session without a rank ends with it", "attach again"));
  }
  const bool is_new = !restart_deadline_.has_value();
  if (is_new) {
    restart_begin_ = std::chrono::steady_clock::now();
    restart_deadline_ = Deadline::After(parts_.daemon_wait);
  }
  // If the deadline passed between two calls, the daemon may have returned since: one more attempt is made.
  const bool is_late = !is_new && restart_deadline_->Expired();
  const Deadline until = is_late ? Deadline::After(kLastAttempt) : *restart_deadline_;
  const WaitLimits within{.deadline = Earlier(limits.deadline, until),
                          .interrupt_check = limits.interrupt_check};
  absl::Status last;
  for (std::chrono::milliseconds pause = kPauseMin;;) {
    absl::Status status = TryReattach(within);
    if (status.ok() || protocol::IdOf(status) == ErrorId::kInterrupted) return status;
    // ResumeWith has closed the port if the daemon lacks something that this session needs.
    if (!port_.is_restarting()) return status;
    if (protocol::IdOf(status) == ErrorId::kRankLost) return EndSession(std::move(status));
    if (!IsPassing(status)) {
      return EndSession(
          MakeError(ErrorId::kDaemonGone,
                    absl::StrCat("the daemon was restarted, and refuses this session: ",
                                 std::string(protocol::Info(protocol::IdOf(status)).name), ": ",
                                 std::string(status.message())),
                    protocol::HintOf(status).empty() ? kStartAgain : protocol::HintOf(status)));
    }
    // A timeout does not explain why no session was granted: an earlier error is reported instead.
    if (last.ok() || protocol::IdOf(status) != ErrorId::kTimeout) last = std::move(status);
    if (limits.Interrupted()) return InterruptedError();
    if (restart_deadline_->Expired()) {
      const std::chrono::duration<double> waited =
          std::chrono::steady_clock::now() - restart_begin_;
      return EndSession(MakeError(
          ErrorId::kDaemonGone,
          absl::StrCat("the daemon has ended, and none took this session back within ",
                       absl::StrFormat("%.1f", waited.count()),
                       " s: ", std::string(last.message())),
          "see in its log why forebayd does not start (journalctl -u forebayd; of a daemon on "
          "another node forebay-gateway there too), then start the trainer again; daemon_wait, or "
          "FOREBAY_DAEMON_WAIT in seconds, is how long a session waits for it"));
    }
    if (limits.deadline.Expired()) {
      return MakeError(ErrorId::kTimeout,
                       "the call's time ran out while there was no daemon; its outcome "
                       "is unknown",
                       "call again: the session goes on when the daemon is back");
    }
    for (const Deadline end = Deadline::After(pause);
         !end.Expired() && !within.deadline.Expired();) {
      const auto rest = std::min(end.Remaining(), within.deadline.Remaining());
      std::this_thread::sleep_for(std::min(rest, kInterruptPeriod));
      if (limits.Interrupted()) return InterruptedError();
    }
    pause = std::min(2 * pause, parts_.attach_pause_max);
  }
}

absl::Status SessionLink::ResumeWith(GrantedSession granted, uint64_t leases,
                                     const WaitLimits& limits) {
  SessionTerms expected = parts_.terms;
  expected.committed_step = parts_.committed_step();
  // A daemon that was killed may have published the step before it answered.
  const bool is_one_more = granted.terms.committed_step == expected.committed_step + 1;
  const bool may_be_decided =
      port_.IsPending(protocol::Op::kStep) || port_.IsPending(protocol::Op::kDecide);
  if (is_one_more && may_be_decided) ++expected.committed_step;
  const std::string difference = Difference(expected, granted.terms);
  if (!difference.empty()) {
    return EndSession(Gone(absl::StrCat("this session cannot go on: ", difference)));
  }
  if (granted.terms.leases != leases) {
    return EndSession(Gone(absl::StrCat("this session held ", leases,
                                        " leases on weights that are on swap, of which ",
                                        granted.terms.leases, " were kept")));
  }
  if (granted.connection != nullptr) {
    RETURN_IF_ERROR(granted.connection->control->Mapped(limits));
  }
  UpdateCalls();
  calls_before_ = parts_.gauge->rpc_calls;
  const absl::Status resumed = port_.Resume(
      std::move(granted.port), leases > 0 ? CommandPort::Leases::kGoOn : CommandPort::Leases::kEnd);
  connection_ = std::move(granted.connection);  // nothing uses the old one any more
  UpdateCalls();
  ++parts_.gauge->reattaches;
  restart_deadline_.reset();
  return resumed;
}

absl::StatusOr<std::vector<std::string>> SessionLink::Exchange(const std::string& bytes,
                                                               const WaitLimits& limits) {
  RETURN_IF_ERROR(parts_.CheckHasRank());
  RETURN_IF_ERROR(errors_.device);
  if (connection_ == nullptr) {
    return MakeError(ErrorId::kUnsupported, "an exchange without a daemon");
  }
  if (bytes.size() > protocol::kExchangeBytesMax) {
    return MakeError(ErrorId::kRange,
                     absl::StrCat("an exchange of ", bytes.size(), " bytes a rank; at most ",
                                  protocol::kExchangeBytesMax));
  }
  if (parts_.nodes.world_ranks > 0) return parts_.nodes.all_gather(bytes);
  while (true) {
    port_.PollAlive().IgnoreError();  // the control plane reports the error too
    if (port_.is_restarting()) RETURN_IF_ERROR(Reattach(limits));
    auto all = connection_->control->Exchange(bytes, exchanges_, limits);
    if (all.ok()) {
      ++exchanges_;
      exchanged_ = *all;
      return all;
    }
    // The daemon knows by the number whether the others have had the answer.
    if (!IsRestartingSoon(all.status())) return all;
  }
}

absl::Status SessionLink::Detach() {
  const WaitLimits limits{.deadline = Deadline::After(parts_.timeout)};
  const bool has_daemon = ReattachOrEnd(limits);
  const auto ended = [this] { return !hooks_.look(); };
  RETURN_IF_ERROR(WaitForCopies(ended, parts_.Limits(parts_.timeout)));
  bool asks =
      has_daemon && !EndIfRestarting() && connection_ != nullptr && phase_ == Phase::kAttached;
  phase_ = Phase::kDetached;
  absl::Status status;
  while (asks) {
    status = connection_->control->Detach(limits);
    // If the connection was lost meanwhile and cannot be restored, the session ends on this side only.
    const bool is_lost = IsRestartingSoon(status);
    if (is_lost) status = absl::OkStatus();
    asks = is_lost && !limits.deadline.Expired() && ReattachOrEnd(limits);
  }
  UpdateCalls();
  port_.Close(DaemonGoneError());
  connection_.reset();
  status.Update(errors_.device);
  return status;
}

void SessionLink::UpdateCalls() {
  if (connection_ == nullptr) return;
  parts_.gauge->rpc_calls = calls_before_ + connection_->control->thread().calls();
}

}  // namespace forebay::client::internal
