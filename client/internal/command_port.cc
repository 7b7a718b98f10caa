#include "client/internal/command_port.h"

#include <poll.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <climits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"

namespace forebay::client::internal {
namespace {

using protocol::ErrorId;
using protocol::MakeError;

constexpr std::chrono::microseconds kSpin{50};

bool Readable(int fd) {
  pollfd entry{.fd = fd, .events = POLLIN, .revents = 0};
  return fd >= 0 && ::poll(&entry, 1, 0) > 0;
}

}  // namespace

absl::Status DaemonGoneError() {
  return MakeError(ErrorId::kDaemonGone, "the daemon died or closed the connection",
                   "start the daemon, then attach again");
}

CommandPort::CommandPort(Options options) : options_(std::move(options)) {}

absl::Status CommandPort::Send(protocol::Command command, const WaitLimits& limits,
                               OnDone on_done) {
  RETURN_IF_ERROR(PollAlive());
  command.tag = next_tag_;
  bool sent = false;
  absl::Status send_error;
  const auto try_send = [&] {
    absl::StatusOr<bool> result = options_.channel->Send(command);
    if (!result.ok()) send_error = result.status();
    sent = result.ok() && *result;
    return sent || !send_error.ok();
  };
  if (!try_send()) RETURN_IF_ERROR(Wait(try_send, limits));
  if (!send_error.ok()) {
    broken_ = send_error;
    return send_error;
  }
  pending_.emplace(next_tag_, std::move(on_done));
  ++next_tag_;
  ++commands_;
  return absl::OkStatus();
}

absl::Status CommandPort::Poll() {
  RETURN_IF_ERROR(broken_);
  while (true) {
    absl::StatusOr<std::optional<protocol::Completion>> received = options_.channel->Receive();
    if (!received.ok()) return Break(received.status());
    if (!received->has_value()) break;
    const protocol::Completion& completion = **received;
    auto pending = pending_.extract(completion.tag);
    if (pending.empty()) {
      broken_ =
          MakeError(ErrorId::kProtocol, absl::StrCat("a completion with tag ", completion.tag,
                                                     " answers none of this session's commands"));
      return broken_;
    }
    const absl::Status status =
        completion.error == 0 ? absl::OkStatus() : options_.explain(completion);
    pending.mapped()(completion, status);
  }
  return absl::OkStatus();
}

absl::Status CommandPort::PollAlive() {
  const bool gone = DaemonGone();  // before: what a daemon answered before its death still counts
  RETURN_IF_ERROR(Poll());
  if (gone) broken_ = DaemonGoneError();
  return broken_;
}

absl::Status CommandPort::Wait(const std::function<bool()>& done, const WaitLimits& limits) {
  RETURN_IF_ERROR(Poll());
  if (done()) return absl::OkStatus();
  if (idle_core_.Any()) {
    const auto spin_end = std::chrono::steady_clock::now() + kSpin;
    while (std::chrono::steady_clock::now() < spin_end) {
      RETURN_IF_ERROR(Poll());
      if (done()) return absl::OkStatus();
    }
  }
  Pause pause = Pause::kWoken;
  while (true) {
    // Looked at before the ring: what a daemon answered before its death still counts.
    const bool gone = DaemonGone();
    RETURN_IF_ERROR(Poll());
    if (done()) return absl::OkStatus();
    if (gone) {
      broken_ = DaemonGoneError();
      return broken_;
    }
    // Asked after a pause or a signal alone: in Python the question costs a wait for the interpreter.
    if (pause == Pause::kUndisturbed && limits.Interrupted()) {
      return MakeError(ErrorId::kInterrupted, "the call was interrupted; its outcome is unknown");
    }
    if (limits.deadline.Expired()) {
      return MakeError(ErrorId::kTimeout,
                       "the call's time ran out before the daemon answered; its outcome is unknown",
                       "another rank may not have come this far: see `forebay status`");
    }
    ASSIGN_OR_RETURN(pause, Sleep(limits));
  }
}

absl::StatusOr<CommandPort::Pause> CommandPort::Sleep(const WaitLimits& limits) {
  absl::StatusOr<bool> may_sleep = options_.channel->PrepareSleep();
  if (!may_sleep.ok()) return Break(may_sleep.status());
  if (!*may_sleep) return Pause::kWoken;
  std::array<pollfd, 3> entries{
      pollfd{.fd = options_.channel->wait_fd(), .events = POLLIN, .revents = 0},
      pollfd{.fd = options_.daemon_pidfd, .events = POLLIN, .revents = 0},
      pollfd{.fd = options_.gone_fd, .events = POLLIN, .revents = 0}};
  auto limit = limits.deadline.Remaining();
  const bool asks = limits.interrupt_check != nullptr && *limits.interrupt_check;
  if (asks) limit = std::min(limit, kInterruptPeriod);
  limit = std::min(limit, std::chrono::milliseconds(INT_MAX));
  const int woken = ::poll(entries.data(), entries.size(), static_cast<int>(limit.count()));
  ++sleeps_;
  options_.channel->EndSleep();
  return woken > 0 ? Pause::kWoken : Pause::kUndisturbed;
}

// The channel knows that the session is over; the daemon knows why.
absl::Status CommandPort::Break(absl::Status status) {
  broken_ = std::move(status);
  if (protocol::IdOf(broken_) == ErrorId::kFenced) {
    protocol::Completion over{};  // tag 0: no command has it
    over.error = static_cast<uint16_t>(ErrorId::kFenced);
    broken_ = options_.explain(over);
  }
  return broken_;
}

bool CommandPort::DaemonGone() const {
  return Readable(options_.daemon_pidfd) || Readable(options_.gone_fd);
}

}  // namespace forebay::client::internal
