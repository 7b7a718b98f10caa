// SPDX-License-Identifier: Apache-2.0
// The one thread on which a client's Cap'n Proto connection lives, and calls into it from any
// other.
#pragma once

#include <capnp/capability.h>
#include <kj/async.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/internal/deadline.h"
#include "protocol/forebay.capnp.h"
#include "protocol/os/mutex.h"
#include "protocol/os/unique_fd.h"

namespace forebay::client::internal {

// Capabilities that the connection holds. Only the control thread uses them.
struct Peer {
  schema::Node::Client node;
  kj::Maybe<schema::Session::Client> session;
  kj::Maybe<schema::Admin::Client> admin;
};

// Calls and their outcomes cross between the threads under a lock of ours, not kj's, so that thread
// sanitizers see it; the caller waits in slices, so that it can be interrupted.
//
// Threads  Any.
class ControlThread {
 public:
  // Starts the thread for a connected Unix socket. E_LIMIT if no thread or descriptor is available.
  static absl::StatusOr<std::unique_ptr<ControlThread>> Start(protocol::UniqueFd socket);

  ControlThread(const ControlThread&) = delete;
  ControlThread& operator=(const ControlThread&) = delete;
  ~ControlThread();  // closes the connection; not to be run in a forked child

  // Runs `start` on the thread and waits for its promise. `what` names the call in errors.
  //
  // Errors  E_DAEMON_GONE, E_PROTOCOL  the connection broke, or the call returned an exception.
  //         E_TIMEOUT, E_INTERRUPTED   the call was cancelled here and at the daemon.
  template <typename T>
  absl::StatusOr<T> Call(const std::string& what, const WaitLimits& limits,
                         std::function<kj::Promise<absl::StatusOr<T>>(Peer&)> start) {
    auto result = std::make_shared<std::optional<absl::StatusOr<T>>>();
    const absl::Status status = Run(what, limits, [result, start = std::move(start)](Peer& peer) {
      return start(peer).then([result](absl::StatusOr<T> value) { *result = std::move(value); });
    });
    if (!status.ok()) return status;
    return *std::move(*result);
  }

  int gone_fd() const { return gone_fd_.get(); }  // readable once the connection is lost
  uint64_t calls() const;

 private:
  struct CallState {
    protocol::Mutex mutex;
    std::condition_variable_any ended;
    bool done ABSL_GUARDED_BY(mutex) = false;
    absl::Status status ABSL_GUARDED_BY(mutex);
  };
  using StartCall = std::function<kj::Promise<void>(Peer&)>;
  struct Request {
    enum class Kind : uint8_t { kStart, kCancel, kStop };
    Kind kind = Kind::kStart;
    uint64_t id = 0;
    std::string what;
    StartCall start;
    std::shared_ptr<CallState> state;
  };

  ControlThread(protocol::UniqueFd socket, protocol::UniqueFd wake_fd, protocol::UniqueFd gone_fd);

  absl::Status Run(const std::string& what, const WaitLimits& limits, StartCall start);
  void Post(Request request);
  std::deque<Request> DrainRequests();
  void Loop();
  void Serve();
  static void Finish(CallState& state, absl::Status status);

  protocol::UniqueFd socket_;
  protocol::UniqueFd wake_fd_;
  protocol::UniqueFd gone_fd_;
  mutable protocol::Mutex mutex_;
  std::deque<Request> requests_ ABSL_GUARDED_BY(mutex_);
  uint64_t calls_ ABSL_GUARDED_BY(mutex_) = 0;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;  // the loop runs no more: calls fail at once
  std::thread thread_;
};

}  // namespace forebay::client::internal
