// SPDX-License-Identifier: Apache-2.0
// The session with the daemon: its connection, its commands and their answers.
#pragma once

#include <chrono>
#include <functional>
#include <memory_resource>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "client/internal/grad_slots.h"
#include "client/internal/session_parts.h"
#include "protocol/os/idle_core.h"

namespace forebay::client::internal {

// Errors that came after their call had returned: the first of each kind.
struct StoredErrors {
  absl::Status device;    // E_DEVICE: ends the session
  absl::Status release;   // returned once
  absl::Status gradient;  // returned until the gradients are dropped, or their step has ended

  // Stores an E_DEVICE. Returns the status.
  absl::Status StoreDevice(absl::Status status);
  // Returns the device's error, else the release error, once.
  absl::Status PopRelease();
};

// Owns the connection, the port (ring and wakeups), the allocation of the gradient arena, and the stored errors.
//
// States   attached    commands travel to the daemon that granted the session.
//          restarting  the daemon is being restarted (CommandPort::is_restarting). The port retains commands. The next call
//                      that waits attaches again, which leads to attached or to ended.
//          ended       every call returns the reason: the daemon ended the session, no daemon granted the session again, or
//                      the device failed.
//          detached    after Detach.
//          An answer is sent, then arrived. If its caller gives up before, the answer is abandoned: when it arrives, its range
//          of the arena is freed, and its lease goes to Hooks::on_late_lease.
// Threads  One at a time, under Attachment's mutex. The class has no lock of its own.
class SessionLink {
 public:
  // The answer to a command, from the time it is sent.
  struct Answer {
    explicit Answer(SessionLink* of) : link(of) {}

    SessionLink* const link;
    bool arrived = false;
    bool abandoned = false;
    // Range of the arena that the command of an abandoned answer uses.
    std::optional<uint64_t> range;
    protocol::Completion completion{};
    absl::Status status;
  };
  struct Hooks {
    // Handles copies that have ended. Returns true if copies are in flight.
    std::function<bool()> look;
    std::function<void()> on_committed;  // the committed step has risen
    std::function<void(uint64_t)> on_late_lease;
  };

  // Moves connection and port out of `parts`. `memory`: for records of commands and calls.
  SessionLink(SessionParts& parts, Hooks hooks, std::pmr::memory_resource* memory);

  std::pmr::memory_resource* memory() const { return memory_; }
  GradSlots& slots() { return slots_; }
  StoredErrors& errors() { return errors_; }

  // Enclose each call of the user. E_FENCED after Detach.
  absl::Status BeginCall();
  void EndCall();
  // Poll() or PollAlive(), then return a stored error: the release error once, the gradient error as long as it is stored.
  absl::Status CheckStored(const WaitLimits& limits);
  absl::Status CheckStoredAlive(const WaitLimits& limits);

  // CommandPort::Poll and PollAlive. If the daemon is being restarted, wait for the next one.
  absl::Status Poll(const WaitLimits& limits);
  absl::Status PollAlive(const WaitLimits& limits);
  // Handles answers. Does not wait for the next daemon if the daemon is being restarted.
  absl::Status PollWithoutWait() { return port_.Poll(); }

  // Sends a command whose answer the caller looks at later.
  absl::StatusOr<std::shared_ptr<Answer>> Start(const protocol::Command& command,
                                                const WaitLimits& limits);
  absl::Status WaitFor(const Answer& answer, const WaitLimits& limits);
  // Calls Start, then WaitFor. If the caller gives up, the answer still arrives later, and `range` (if not null) is freed then.
  absl::StatusOr<protocol::Completion> Call(const protocol::Command& command, BusyRange* range,
                                            const WaitLimits& limits);
  void Abandon(Answer& answer);
  // CommandPort::TrySend, for commands without an Answer; Send waits while the ring is full. `on_done` calls UpdateCommittedStep.
  absl::Status Send(const protocol::Command& command, const WaitLimits& limits,
                    CommandPort::OnDone on_done);
  absl::StatusOr<bool> TrySend(const protocol::Command& command, CommandPort::OnDone& on_done) {
    return port_.TrySend(command, on_done);
  }
  void UpdateCommittedStep(const protocol::Completion& completion);

  // Waits until `allocate` returns an offset in the gradient arena.
  absl::StatusOr<uint64_t> WaitForOffset(absl::FunctionRef<std::optional<uint64_t>()> allocate,
                                         const WaitLimits& limits);
  absl::StatusOr<BusyRange> WaitForRange(uint64_t size_bytes, const WaitLimits& limits);
  // Looks at copies until `ended()` is true. E_TIMEOUT, E_INTERRUPTED.
  absl::Status WaitForCopies(absl::FunctionRef<bool()> ended, const WaitLimits& limits);

  // Does the work of Attachment::Exchange.
  absl::StatusOr<std::vector<std::string>> Exchange(const std::string& bytes,
                                                    const WaitLimits& limits);
  // Ends the session if its daemon is being restarted, for a caller that is about to end it. Does not wait for the next daemon,
  // which sees that the session does not return. Returns whether the session was ended.
  bool EndIfRestarting();
  // Does the work of Attachment::Detach. The session is not detached only if the device's copies do not end in time.
  absl::Status Detach();
  bool is_detached() const { return phase_ == Phase::kDetached; }

 private:
  enum class Phase : uint8_t {
    kAttached,  // attached, restarting, or ended for a reason that the port returns
    kEnded,     // ended because of the device
    kDetached,
  };

  // Handles answers until `done()` is true. Errors are looked at only while it is not. Spins, then sleeps.
  //
  // Errors  Those of CommandPort::Poll; E_TIMEOUT; E_INTERRUPTED.
  absl::Status Wait(absl::FunctionRef<bool()> done, const WaitLimits& limits);
  void OnAnswer(const protocol::Completion& completion, const absl::Status& status, Answer& answer);
  // Asks the daemon every second whether the session continues, while a call waits without an answer of the daemon to wait for.
  void AskWhetherItContinues();
  // Attaches again if the daemon was restarted. The session then continues as if nothing had happened: commands without an
  // answer are sent again.
  //
  // Errors  E_DAEMON_GONE             no daemon grants the session within its time, or not as it was: the
  //                                   session has ended.
  //         E_TIMEOUT, E_INTERRUPTED  a later call tries again.
  absl::Status Reattach(const WaitLimits& limits);
  // Asks the running daemon once to grant the session again. Errors of AttachAgain and ResumeWith.
  absl::Status TryReattach(const WaitLimits& limits);
  // Attaches again if the daemon was restarted, once, before a detach: the daemon then hears of the detach. Waits for no daemon
  // that is not running. If the daemon is on another node, a process is started for the attempt. Ends the session if the
  // attempt fails. Returns whether the session is with a daemon.
  bool ReattachOrEnd(const WaitLimits& limits);
  // Continues the session with the daemon that granted it. `leases`: number of leases that the session asked to retain, if
  // weights are on swap. Errors as Reattach, and those of the connection to the new daemon.
  absl::Status ResumeWith(GrantedSession granted, uint64_t leases, const WaitLimits& limits);
  absl::Status EndSession(absl::Status reason);
  // Returns whether an error of the control plane came from the end of a daemon, or of the way to it, that the session
  // survives. Waits until the data plane has seen that end too.
  bool IsRestartingSoon(const absl::Status& met);
  void UpdateCalls();

  const SessionParts& parts_;
  const Hooks hooks_;
  std::pmr::memory_resource* const memory_;
  std::unique_ptr<Connection> connection_;  // null in tests that play the daemon themselves
  CommandPort port_;
  protocol::IdleCore idle_core_;
  GradSlots slots_;
  StoredErrors errors_;
  Phase phase_ = Phase::kAttached;
  std::chrono::steady_clock::time_point next_question_{};
  bool has_asked_ = false;  // true: a question is unanswered
  absl::Status over_;       // answer to the last question; OK: the session continues
  // Set while the daemon is being restarted.
  std::optional<Deadline> restart_deadline_;
  std::chrono::steady_clock::time_point restart_begin_{};
  uint64_t calls_before_ = 0;           // calls of all earlier connections
  uint64_t exchanges_ = 0;              // number of exchanges that have succeeded
  std::vector<std::string> exchanged_;  // result of the last exchange
};

}  // namespace forebay::client::internal
