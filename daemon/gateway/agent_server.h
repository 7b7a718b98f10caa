// SPDX-License-Identifier: Apache-2.0
// The agent: serves one trainer on its socket as a daemon would, from a gateway on another node.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "protocol/os/unique_fd.h"

namespace forebay::gateway {

struct AgentOptions {
  std::string address;         // "host:port", "[fd00::1]:port"
  std::string folder;          // of LoadCredentials()
  protocol::UniqueFd trainer;  // a connected Unix socket
  // A pidfd of the trainer; not valid: the socket alone says when it ends.
  protocol::UniqueFd lifetime;
  // Of a rank that comes back: the window and the gradient arena that an agent before this one has made. Not valid: they are
  // made.
  protocol::UniqueFd weights;
  protocol::UniqueFd grad_arena;
};

// Until the trainer has closed its socket or has ended. What goes wrong with the gateway is what the trainer's calls get.
absl::Status ServeAgent(AgentOptions options);

}  // namespace forebay::gateway
