// SPDX-License-Identifier: Apache-2.0
// Messages to the service manager. Messages are dropped if no service manager listens.
#pragma once

#include <chrono>
#include <string>
#include <string_view>

namespace forebay::daemon {

// Sends messages to the service manager's socket, $NOTIFY_SOCKET.
//
// Threads  Any. A call blocks while the socket is full.
// Source   sd_notify(3), which describes the protocol. libsystemd is not linked: the same program runs on machines
//          that do not have it.
class Notifier {
 public:
  Notifier() = default;
  // `socket`: value of $NOTIFY_SOCKET, a path, or '@' and an abstract name. Null or empty if no service manager listens.
  explicit Notifier(const char* socket) : socket_(socket == nullptr ? "" : socket) {}

  bool HasListener() const { return !socket_.empty(); }

  void Ready(const std::string& status) const { (void)Send("READY=1\nSTATUS=" + status); }
  void Stopping() const { (void)Send("STOPPING=1"); }
  void Watchdog() const { (void)Send("WATCHDOG=1"); }

  // Sends one message with a descriptor (-1: no descriptor), which the caller may close afterwards. Returns 0 if the message
  // was sent or no service manager listens, otherwise an errno.
  int Send(std::string_view message, int fd = -1) const;
  // Waits until all earlier messages were handled. Returns 0, ETIMEDOUT or another errno.
  int Barrier(std::chrono::microseconds timeout) const;

 private:
  std::string socket_;
};

// Returns the time that the service manager waits for Watchdog() before it kills this process; 0 if the service manager has no
// watchdog. `usec`, `pid`: values of $WATCHDOG_USEC and $WATCHDOG_PID, null if not set.
std::chrono::microseconds WatchdogLimit(const char* usec, const char* pid);

}  // namespace forebay::daemon
