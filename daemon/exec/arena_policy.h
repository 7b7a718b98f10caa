// SPDX-License-Identifier: Apache-2.0
// Options of this node's arenas: NUMA nodes, locked or not, number of threads that populate them.
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
  // Groups of the threads that run updates.
  std::vector<cpu_adam::WorkerGroup> workers = {};

  // Options of a private arena of `bytes`, rounded up to a page, that workers of every node touch.
  pinned_mem::ArenaOptions Shared(std::string name, uint64_t bytes) const;

  // Options of a private arena of `bytes`, rounded up to a page, in stripes of `stripe_bytes`. Only workers of a stripe's own
  // NUMA node touch the stripe (GroupAt).
  pinned_mem::ArenaOptions ByStripe(std::string name, uint64_t bytes, uint64_t stripe_bytes) const;

  // Returns the group of workers on the NUMA node where the middle of these bytes is placed. Returns WorkerPool::kAnyGroup if
  // no node was chosen, or if no group runs on the node.
  int GroupAt(const pinned_mem::PinnedArena& arena, uint64_t offset_bytes, uint64_t bytes) const;

 private:
  pinned_mem::ArenaOptions Make(std::string name, uint64_t bytes, pinned_mem::ArenaUse use,
                                uint64_t stripe_bytes) const;
};

}  // namespace forebay::daemon
