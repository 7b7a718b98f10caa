// SPDX-License-Identifier: Apache-2.0
// Attaches a session again after its daemon was restarted, and continues the session.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/internal/attachment_state.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"

namespace forebay::client {

using internal::CommandPort;
using internal::Deadline;
using internal::GrantedSession;
using internal::WaitLimits;
using protocol::ErrorId;
using protocol::MakeError;

namespace {

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

// Whether another attempt may end otherwise, time permitting.
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

}  // namespace

absl::Status Attachment::State::EndSession(absl::Status reason) {
  port.Close(reason);
  restart_deadline.reset();
  return reason;
}

bool Attachment::State::EndIfRestarting() {
  port.PollAlive().IgnoreError();
  if (!port.is_restarting()) return false;
  port.Close(internal::DaemonGoneError());
  return true;
}

bool Attachment::State::IsRestartingSoon(const absl::Status& met) {
  const ErrorId id = protocol::IdOf(met);
  // Errors that report a lost connection: E_DAEMON_GONE on this side, E_REMOTE from a gateway, E_FENCED from the daemon.
  const bool may_be =
      id == ErrorId::kDaemonGone || id == ErrorId::kRemote || id == ErrorId::kFenced;
  if (!may_be) return false;
  for (const Deadline end = Deadline::After(kNoticeLimit); !end.Expired();) {
    if (!port.PollAlive().ok()) return false;
    if (port.is_restarting()) return true;
    std::this_thread::sleep_for(kNoticePause);
  }
  return false;
}

absl::Status Attachment::State::ReattachIfRestarting(const WaitLimits& limits) {
  port.PollAlive().IgnoreError();  // the control plane says it too
  return port.is_restarting() ? Reattach(limits) : absl::OkStatus();
}

absl::Status Attachment::State::TryReattach(const WaitLimits& limits) {
  LookAtCopies();
  // With weights on swap the request includes leases whose readers have ended meanwhile: the daemon reports only how many of
  // the requested leases it retained. Leases on weights in DRAM end with the daemon, and the weights stay in place.
  const std::vector<uint64_t> held =
      parts.weights_on_swap ? port.leases_held() : std::vector<uint64_t>();
  ASSIGN_OR_RETURN(GrantedSession granted,
                   parts.attach_again({.held_leases = held,
                                       .grad_arena_inode = parts.terms.grad_arena.inode,
                                       .newest_tag = port.newest_tag(),
                                       .exchanges = exchanges,
                                       .exchanged = exchanged},
                                      limits));
  return GoOnWith(std::move(granted), held.size(), limits);
}

bool Attachment::State::ReattachOnce(const WaitLimits& limits) {
  port.PollAlive().IgnoreError();
  if (!port.is_restarting()) return true;
  if (!parts.attach_again) return false;
  return TryReattach(limits).ok();
}

absl::Status Attachment::State::Reattach(const WaitLimits& limits) {
  if (!parts.attach_again) {
    return EndSession(MakeError(
        ErrorId::kDaemonGone,
        "the daemon is being restarted; a session without a rank ends with it", "attach again"));
  }
  const bool is_new = !restart_deadline.has_value();
  if (is_new) {
    restart_begin = std::chrono::steady_clock::now();
    restart_deadline = Deadline::After(parts.daemon_wait);
  }
  // If the deadline passed between two calls, the daemon may have returned since: one more attempt is made.
  const bool is_late = !is_new && restart_deadline->Expired();
  const Deadline until = is_late ? Deadline::After(kLastAttempt) : *restart_deadline;
  const WaitLimits within{.deadline = Earlier(limits.deadline, until),
                          .interrupt_check = limits.interrupt_check};
  absl::Status last;
  for (std::chrono::milliseconds pause = kPauseMin;;) {
    absl::Status status = TryReattach(within);
    if (status.ok() || protocol::IdOf(status) == ErrorId::kInterrupted) return status;
    // GoOnWith has closed the port if the daemon lacks something that this session needs.
    if (!port.is_restarting()) return status;
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
    if (restart_deadline->Expired()) {
      const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - restart_begin;
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
      std::this_thread::sleep_for(std::min(rest, internal::kInterruptPeriod));
      if (limits.Interrupted()) return InterruptedError();
    }
    pause = std::min(2 * pause, parts.attach_pause_max);
  }
}

absl::Status Attachment::State::GoOnWith(GrantedSession granted, uint64_t leases,
                                         const WaitLimits& limits) {
  internal::SessionTerms expected = parts.terms;
  expected.committed_step = parts.committed_step();
  // A daemon that was killed may have published the step before it answered.
  const bool is_one_more = granted.terms.committed_step == expected.committed_step + 1;
  const bool may_be_decided =
      port.IsPending(protocol::Op::kStep) || port.IsPending(protocol::Op::kDecide);
  if (is_one_more && may_be_decided) ++expected.committed_step;
  const std::string difference = internal::Difference(expected, granted.terms);
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
  calls_before = gauge.rpc_calls;
  const absl::Status resumed = port.Resume(
      std::move(granted.port), leases > 0 ? CommandPort::Leases::kGoOn : CommandPort::Leases::kEnd);
  parts.connection = std::move(granted.connection);  // nothing uses the old one any more
  UpdateCalls();
  ++gauge.reattaches;
  gauge.commands = port.commands();
  restart_deadline.reset();
  return resumed;
}

void Attachment::State::UpdateCalls() {
  if (parts.connection == nullptr) return;
  gauge.rpc_calls = calls_before + parts.connection->control->thread().calls();
}

}  // namespace forebay::client
