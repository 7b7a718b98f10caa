// SPDX-License-Identifier: Apache-2.0
#include "client/internal/waiter.h"

#include <algorithm>
#include <chrono>

#include "protocol/error.h"
#include "protocol/os/status_macros.h"

namespace forebay::client::internal {
namespace {

using protocol::ErrorId;
using protocol::MakeError;

constexpr std::chrono::microseconds kSpin{50};
constexpr std::chrono::milliseconds kLookPeriod{1};

}  // namespace

absl::Status Waiter::Poll(const WaitLimits& limits) {
  RETURN_IF_ERROR(port_.Poll());
  return port_.is_restarting() ? reattach_(limits) : absl::OkStatus();
}

absl::Status Waiter::PollAlive(const WaitLimits& limits) {
  RETURN_IF_ERROR(port_.PollAlive());
  return port_.is_restarting() ? reattach_(limits) : absl::OkStatus();
}

absl::Status Waiter::Wait(absl::FunctionRef<bool()> done, const WaitLimits& limits) {
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
    const bool is_under_way = look_();  // handles completions too: before done()
    const absl::Status alive = port_.PollAlive();
    if (done()) return absl::OkStatus();
    RETURN_IF_ERROR(alive);
    if (port_.is_restarting()) {
      RETURN_IF_ERROR(reattach_(limits));
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

absl::Status Waiter::Send(const protocol::Command& command, const WaitLimits& limits,
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

}  // namespace forebay::client::internal
