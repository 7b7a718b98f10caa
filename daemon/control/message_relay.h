// SPDX-License-Identifier: Apache-2.0
// Keeps the descriptors that clients send away from the control thread: whoever closes one may have to
// wait for as long as its sender likes (a TCP socket that lingers, a file of a FUSE server).
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

// Connections of each uid. One counts until all that its client sent has been closed, so that a uid
// whose descriptors do not close uses up its own connections.
//
// Threads  Any.
class ConnectionCounts {
 public:
  struct Limit {
    uint32_t uid;
    uint32_t max;
  };
  bool AddBelow(Limit limit);  // false, and nothing added, where `uid` has `max`
  void Remove(uint32_t uid);

  // False where some are left after `limit`.
  bool WaitUntilNone(std::chrono::milliseconds limit);

 private:
  protocol::Mutex mutex_;
  std::condition_variable_any removed_;
  std::map<uint32_t, uint32_t> counts_ ABSL_GUARDED_BY(mutex_);
};

// Starts a thread that carries whole Cap'n Proto messages between a client's socket and the returned
// one. Of what the client sends, sealed memfds that come with the first byte of a message pass, one a
// message; every other descriptor is closed by that thread, which also closes `client` at the end and
// then takes `uid` out of `counts`. It ends once the returned socket or the client's peer is closed.
//
// Ownership  The thread is detached: it shares nothing but `counts`.
// Errors     E_LIMIT  no descriptor or thread is left; `client` stays, `uid` is taken out.
absl::StatusOr<protocol::UniqueFd> StartRelay(protocol::UniqueFd& client, uint32_t uid,
                                              const std::shared_ptr<ConnectionCounts>& counts);

// Closes a socket whose queue may hold descriptors of a client, without waiting for any of them: a
// thread that ends closes it, and the kernel lets no socket linger in a thread that ends. Blocks until
// that thread has started.
//
// Errors  E_LIMIT  no thread is left; it was closed here, which may have waited.
absl::Status CloseUnread(protocol::UniqueFd socket);

}  // namespace forebay::daemon
