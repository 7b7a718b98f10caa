// SPDX-License-Identifier: Apache-2.0
// How this node makes its arenas: on which NUMA nodes, locked or not, populated by how many threads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cpu_adam/worker_pool.h"
#include "pinned_mem/numa_placement.h"
#include "pinned_mem/pinned_arena.h"

namespace forebay::daemon {

struct ArenaPolicy {
  pinned_mem::LockPolicy lock = pinned_mem::LockPolicy::kRequired;
  pinned_mem::NumaTopology topology = {};
  // Of the threads that update.
  std::vector<cpu_adam::WorkerGroup> workers = {};

  // Options of a private arena of `bytes`, rounded up to a page, that workers of every node touch.
  pinned_mem::ArenaOptions Shared(std::string name, uint64_t bytes) const;

  // Of one of which each stripe is touched by workers of its own node (GroupAt).
  pinned_mem::ArenaOptions ByStripe(std::string name, uint64_t bytes, uint64_t stripe_bytes) const;

  // The group of workers for these bytes of an arena: that of the node in the middle, or any.
  int GroupAt(const pinned_mem::PinnedArena& arena, uint64_t offset_bytes, uint64_t bytes) const;

 private:
  pinned_mem::ArenaOptions Make(std::string name, uint64_t bytes, pinned_mem::ArenaUse use,
                                uint64_t stripe_bytes) const;
};

}  // namespace forebay::daemon
