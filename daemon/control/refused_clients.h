// SPDX-License-Identifier: Apache-2.0
// Connections that are refused before anything is created for them.
#pragma once

#include <kj/async.h>
#include <kj/time.h>
#include <kj/timer.h>

#include <cstddef>
#include <cstdint>
#include <deque>

#include "absl/status/status.h"
#include "daemon/control/client_log.h"
#include "protocol/os/unique_fd.h"

namespace forebay::daemon {

// Aborts each refused connection with a reason, which the client's first call returns. Reads nothing from the client. Holds the
// socket open for a second or two, because a client that writes to a closed socket would not see the reason. Closes the socket
// at once if the process cannot open more descriptors.
//
// Threads  The control thread.
// Limits   kHeldMax sockets, kHeldPerUidMax of one user; the oldest are closed before their time if
//          there are more.
class RefusedClients final : private kj::TaskSet::ErrorHandler {
 public:
  static constexpr size_t kHeldMax = 128;
  static constexpr size_t kHeldPerUidMax = 16;

  RefusedClients(kj::Timer& timer, ClientLog& log) : timer_(timer), log_(log), closing_(*this) {}
  RefusedClients(const RefusedClients&) = delete;
  RefusedClients& operator=(const RefusedClients&) = delete;
  ~RefusedClients() noexcept(false);

  void Refuse(uint32_t uid, protocol::UniqueFd client, const absl::Status& why);
  // Closes the socket without a reason: the client has ended.
  void Close(uint32_t uid, protocol::UniqueFd client);

 private:
  struct Held {
    kj::TimePoint since;
    uint32_t uid;
    protocol::UniqueFd client;
  };

  kj::Promise<void> CloseLater();
  void CloseHeld(const std::deque<Held>::iterator& one);
  void taskFailed(kj::Exception&&) override {}

  kj::Timer& timer_;
  ClientLog& log_;
  std::deque<Held> held_;  // the oldest first
  kj::TaskSet closing_;
};

}  // namespace forebay::daemon
