// SPDX-License-Identifier: Apache-2.0
// Clients that are refused before anything is made for them.
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

// Aborts each connection with the reason, which the client's first call returns. Nothing is read. The socket stays open for a
// second or two: a client that writes to a closed socket would see that error alone. If no descriptor is left for others, the
// socket is closed at once.
//
// Threads  The control thread.
// Limits   kHeldMax sockets, kHeldPerUidMax of one user; the oldest are closed before their time where
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
