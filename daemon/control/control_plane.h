// SPDX-License-Identifier: Apache-2.0
// The control thread: Cap'n Proto RPC over a Unix socket, one process watched per connection.
#pragma once

#include <sys/types.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "daemon/exec/loop_queue.h"
#include "daemon/exec/reactor.h"
#include "protocol/durability.h"
#include "protocol/os/unique_fd.h"

namespace forebay::daemon {

// Connections of a user other than root and the daemon's own. Each rank, reader and command takes one: 16 jobs of 16 ranks fit.
// A connection costs the daemon a thread, up to kDescriptorsPerConnection descriptors, and 30 KiB of private memory, which
// dram.limit does not count.
inline constexpr uint32_t kConnectionsPerUidMax = 256;
// Descriptors of a connection with a session: sockets, pidfd, grad arena, ring and doorbells, and those that the client gets.
inline constexpr uint32_t kDescriptorsPerConnection = 24;
inline constexpr uint32_t kSessionsMax = 1024;
inline constexpr int kHelloSeconds = 5;  // a connection that has not said hello by then is closed

// Calls into the loop that may be refused stay below this number. Ends of sessions, one for each session, always fit.
inline constexpr size_t kCallsWaitingMax = 4096;
inline constexpr size_t kInboxCapacity = kCallsWaitingMax + 2 * kSessionsMax;

// A call that the loop thread wants done on the control thread. kj has fulfillers for this, but no race detector sees the lock
// inside kj; race detectors see the lock of this queue.
struct ControlContext;
using ControlCall = absl::AnyInvocable<void(ControlContext&)>;
using ControlQueue = LoopQueue<ControlCall>;

// Room for answers: one for each call that waits (kCallsWaitingMax at most, taken or not), and two for each session.
inline constexpr size_t kControlQueueCapacity = 4 * kInboxCapacity;

// Socket and identity of the daemon.
struct ServedAt {
  std::string socket_path;
  std::string identity;  // differs from the identity of every other daemon
};

struct ControlPlaneOptions {
  protocol::UniqueFd listener;  // bound and listening
  ServedAt served_at;
  // Group whose members see the jobs of all users.
  std::optional<gid_t> operators;
  uint32_t connections_per_uid_max = kConnectionsPerUidMax;
  // True if clients are served on a kernel without pidfd_open(2). A session then lasts until the client's socket is closed. A
  // fork of the client holds the socket open.
  bool serves_without_pidfds = false;
  // Durability of jobs whose attach asks for level memory.
  protocol::Durability least_durability = {};
};

// Returns kConnectionsPerUidMax, or fewer if the daemon may have only `descriptors_max` descriptors: the connections of one
// user take at most half of them.
constexpr uint32_t ConnectionsPerUidMax(uint64_t descriptors_max) {
  return static_cast<uint32_t>(std::clamp<uint64_t>(
      descriptors_max / (2 * kDescriptorsPerConnection), 1, kConnectionsPerUidMax));
}

// Threads  Create() and the destructor run on one thread. Everything else runs on the control thread.
class ControlPlane {
 public:
  // Starts the control thread. `inbox` and `replies` outlive the loop thread.
  static absl::StatusOr<std::unique_ptr<ControlPlane>> Create(ControlPlaneOptions options,
                                                              LoopInbox& inbox,
                                                              ControlQueue& replies);

  ControlPlane(const ControlPlane&) = delete;
  ControlPlane& operator=(const ControlPlane&) = delete;
  ~ControlPlane();  // ends every session, closes every connection, joins the thread

 private:
  struct State;
  explicit ControlPlane(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

}  // namespace forebay::daemon
