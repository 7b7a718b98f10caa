// SPDX-License-Identifier: Apache-2.0
// The part of an attach request that a job's memory depends on: its world, and the memory of each of its sessions.
#pragma once

#include <cstdint>

#include "protocol/durability.h"

namespace forebay::daemon {

struct SessionRequest {
  uint32_t world_size = 1;   // ranks on this node
  uint32_t world_ranks = 0;  // ranks on all nodes; 0: the job is on one node
  uint64_t grad_arena_bytes = 0;
  uint64_t extra_state_bytes = 0;
  uint64_t activation_bytes = 0;
  bool trace = false;
  bool accumulate = false;  // sums of gradients are float32 from the start
  bool early_updates = false;
  protocol::Durability durability = {};

  bool operator==(const SessionRequest&) const = default;
};

}  // namespace forebay::daemon
