// SPDX-License-Identifier: Apache-2.0
// The process that connects this process to a gateway on another node. UCX and TLS run in that process, so that their
// failures end that process alone.
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

// Returns "HOST:PORT" of "ucx://HOST:PORT". nullopt: `socket` is that of a daemon on this node.
std::optional<std::string> RemoteAddress(std::string_view socket);

// Arenas that the agent of a session has created. If the rank attaches again, the next agent gets the same arenas.
struct RemoteArenas {
  protocol::UniqueFd weights;
  protocol::UniqueFd grad_arena;
};

// A running agent: the process that connects a rank to a gateway on another node.
//
// Threads  One at a time.
class RemoteAgent {
 public:
  // Starts forebay-gateway (environment.h finds the program) in a new process group. The agent ends with this process, or when
  // its socket is closed. `arenas`: not null only for a rank that attaches again.
  //
  // Errors  E_UNSUPPORTED  the program was not found. E_LIMIT. E_OPTION: the address is not HOST:PORT.
  static absl::StatusOr<std::unique_ptr<RemoteAgent>> Start(const std::string& address,
                                                            const RemoteArenas* arenas);

  RemoteAgent(const RemoteAgent&) = delete;
  RemoteAgent& operator=(const RemoteAgent&) = delete;
  // To be called after the agent's socket was closed. Waits until the agent has ended.
  ~RemoteAgent();

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
