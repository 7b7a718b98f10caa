// SPDX-License-Identifier: Apache-2.0
// The agent: serves one trainer on its socket like a daemon, with the help of a gateway on another node.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "protocol/os/unique_fd.h"

namespace forebay::gateway {

struct AgentOptions {
  std::string address;         // "host:port", "[fd00::1]:port"
  std::string folder;          // folder for LoadCredentials()
  protocol::UniqueFd trainer;  // a connected Unix socket
  // A pidfd of the trainer. If it is not valid, only the socket shows when the trainer ends.
  protocol::UniqueFd lifetime;
  // Memfds of a rank that attaches again: the window and the gradient arena that an earlier agent has created. If they are
  // not valid, the agent creates both.
  protocol::UniqueFd weights;
  protocol::UniqueFd grad_arena;
};

// Serves until the trainer has closed its socket or has ended. Failures of the gateway are returned by the trainer's calls.
absl::Status ServeAgent(AgentOptions options);

}  // namespace forebay::gateway
