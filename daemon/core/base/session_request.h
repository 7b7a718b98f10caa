// SPDX-License-Identifier: Apache-2.0
// The part of an attach request that a job's memory depends on: its world, and the memory of each of its sessions.
#pragma once

#include <cstdint>

#include "protocol/durability.h"

namespace forebay::daemon {

struct SessionRequest {
  uint32_t world_size = 1;         // ranks on this node
  uint32_t world_ranks = 0;        // ranks on all nodes; 0: the job is on one node
  uint64_t grad_arena_bytes = 0;   // bytes of the grad arena for gradients
  uint64_t extra_state_bytes = 0;  // bytes for extra_state of one step
  uint64_t activation_bytes = 0;   // bytes for saved activations
  bool trace = false;              // true to add a TraceMemory
  // A step has several backward passes; the sums are float32 from the start.
  bool accumulate = false;
  // True to allocate DRAM for new weights, so that blocks on swap can be updated before a step's decision (kAnnounceStep).
  bool early_updates = false;
  protocol::Durability durability = {};  // durability of the job

  bool operator==(const SessionRequest&) const = default;
};

}  // namespace forebay::daemon
