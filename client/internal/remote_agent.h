// SPDX-License-Identifier: Apache-2.0
// The process that stands between this one and a gateway on another node: UCX and TLS live there, and what fails in
// them ends that process and not this one.
#pragma once

#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "protocol/os/unique_fd.h"

namespace forebay::client::internal {

// "HOST:PORT" of "ucx://HOST:PORT"; nothing: the socket of a daemon on this node.
std::optional<std::string> RemoteAddress(std::string_view socket);

// Arenas of a session that an agent has made; those of a rank that comes back are given to the next one.
struct RemoteArenas {
  protocol::UniqueFd weights;
  protocol::UniqueFd grad_arena;
};

// Threads  One at a time.
class RemoteAgent {
 public:
  // Starts forebay-gateway (environment.h says which) in a process group of its own. It ends with this process, or
  // when its socket is closed. `arenas`: null but for a rank that comes back.
  //
  // Errors  E_UNSUPPORTED  there is no such program. E_LIMIT. E_OPTION: the address is not HOST:PORT.
  static absl::StatusOr<std::unique_ptr<RemoteAgent>> Start(const std::string& address,
                                                            const RemoteArenas* arenas);

  RemoteAgent(const RemoteAgent&) = delete;
  RemoteAgent& operator=(const RemoteAgent&) = delete;
  ~RemoteAgent();  // once its socket is closed; waits until it has ended

  protocol::UniqueFd ReleaseSocket() { return std::move(socket_); }
  // Returns why the agent has ended: the error that it printed, E_UNSUPPORTED if its libraries could not be loaded, else
  // E_REMOTE. Returns `otherwise` if the agent still runs after a second.
  absl::Status WhyItEnded(const absl::Status& otherwise);

 private:
  RemoteAgent(pid_t pid, protocol::UniqueFd socket, protocol::UniqueFd log)
      : pid_(pid), socket_(std::move(socket)), log_(std::move(log)) {}
  bool HasEnded(int wait_ms);

  pid_t pid_;
  std::optional<int> exit_status_;
  protocol::UniqueFd socket_;
  protocol::UniqueFd log_;  // output of the agent
};

}  // namespace forebay::client::internal
