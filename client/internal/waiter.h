// SPDX-License-Identifier: Apache-2.0
// The blocking layer above CommandPort: time limits, interrupts, when to spin and when to sleep.
#pragma once

#include <functional>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "client/internal/command_port.h"
#include "client/internal/deadline.h"
#include "protocol/os/idle_core.h"

namespace forebay::client::internal {

// Threads  One at a time.
class Waiter {
 public:
  // Attaches again, so that the port continues (CommandPort::Resume), or closes the port.
  using Reattach = std::function<absl::Status(const WaitLimits&)>;

  // `look` runs in each round of a wait and handles completions. If it returns true, the next round begins within a
  // millisecond. `reattach` is called if the daemon is being restarted.
  Waiter(CommandPort& port, std::function<bool()> look, Reattach reattach)
      : port_(port), look_(std::move(look)), reattach_(std::move(reattach)) {}

  // Call CommandPort::Poll or PollAlive. If the daemon is being restarted, wait for the next one. Errors as Wait.
  absl::Status Poll(const WaitLimits& limits);
  absl::Status PollAlive(const WaitLimits& limits);

  // Handles completions until `done()` is true. Errors are looked at only while it is not.
  //
  // Errors  Those of CommandPort::Poll; E_TIMEOUT; E_INTERRUPTED.
  absl::Status Wait(absl::FunctionRef<bool()> done, const WaitLimits& limits);

  // CommandPort::TrySend, waiting while the ring is full. Errors as Wait.
  absl::Status Send(const protocol::Command& command, const WaitLimits& limits,
                    CommandPort::OnDone on_done);

 private:
  CommandPort& port_;
  const std::function<bool()> look_;
  const Reattach reattach_;
  protocol::IdleCore idle_core_;
};

}  // namespace forebay::client::internal
