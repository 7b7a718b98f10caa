// SPDX-License-Identifier: Apache-2.0
// Relays that keep clients' descriptors away from the control thread: to close such a descriptor may block for as long as the
// client likes (a TCP socket that lingers, a file of a FUSE server).
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "protocol/os/mutex.h"
#include "protocol/os/unique_fd.h"

namespace forebay::daemon {

// Number of connections of each uid. A connection counts until all descriptors that its client sent are closed. A uid whose
// descriptors do not close therefore uses up only its own connections.
//
// Threads  Any.
class ConnectionCounts {
 public:
  struct Limit {
    uint32_t uid;
    uint32_t max;
  };
  // False, without a change, if `uid` has `max` connections.
  bool AddBelow(Limit limit);
  void Remove(uint32_t uid);

  // Waits until there are no connections. Returns false if connections remain after `limit`.
  bool WaitUntilNone(std::chrono::milliseconds limit);

 private:
  protocol::Mutex mutex_;
  std::condition_variable_any removed_;
  std::map<uint32_t, uint32_t> counts_ ABSL_GUARDED_BY(mutex_);
};

// Starts a thread that forwards whole Cap'n Proto messages between a client's socket and the returned socket. Forwards at most
// one descriptor of a message from the client: a sealed memfd that comes with the message's first byte. Closes every other
// descriptor on the thread. The thread ends once the returned socket or the client's end is closed. It then closes `client` and
// removes `uid` from `counts`.
//
// Ownership  The thread is detached: it shares nothing but `counts`.
// Errors     E_LIMIT  no descriptor or thread is available; `client` stays open, and `uid` is removed from `counts`.
absl::StatusOr<protocol::UniqueFd> StartRelay(protocol::UniqueFd& client, uint32_t uid,
                                              const std::shared_ptr<ConnectionCounts>& counts);

// Closes a socket whose queue may hold descriptors of a client, without waiting for these descriptors. A thread closes the
// socket by ending: the kernel lets no socket linger in a thread that ends. Blocks until that thread has started.
//
// Errors  E_LIMIT  no thread could be started: the calling thread closed the socket, which may have blocked.
absl::Status CloseUnread(protocol::UniqueFd socket);

}  // namespace forebay::daemon
