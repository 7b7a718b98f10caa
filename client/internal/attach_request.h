// SPDX-License-Identifier: Apache-2.0
// Makes the attach request from the caller's options.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "client/client.h"
#include "client/internal/control.h"
#include "protocol/layout.h"

namespace forebay::client::internal {

// State of a session that a restarted daemon needs to continue it.
struct SessionBefore {
  // Leases of the session. Empty unless weights are on swap.
  std::span<const uint64_t> held_leases = {};
  uint64_t grad_arena_inode = 0;
  uint64_t newest_tag = 0;  // tag of the newest command that was sent
  uint64_t exchanges = 0;   // number of exchanges between ranks that are answered
  std::span<const std::string> exchanged = {};  // answer of the newest exchange, by rank
};

// Makes the attach request from the options, with the defaults in place of zeros. layoutBytes is set when the request is sent.
AttachRequest MakeAttachRequest(const AttachOptions& options, const protocol::Layout& layout);

// Makes the request by which the rank of `first` attaches again.
AttachRequest MakeReattachRequest(const AttachRequest& first, const SessionBefore& before);

}  // namespace forebay::client::internal
