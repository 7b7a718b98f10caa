// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/arena_policy.h"

#include <algorithm>
#include <utility>

#include "protocol/units.h"

namespace forebay::daemon {

pinned_mem::ArenaOptions ArenaPolicy::Shared(std::string name, uint64_t bytes) const {
  return Make(std::move(name), bytes, pinned_mem::ArenaUse::kShared, protocol::kHugePageBytes);
}

pinned_mem::ArenaOptions ArenaPolicy::ByStripe(std::string name, uint64_t bytes,
                                               uint64_t stripe_bytes) const {
  return Make(std::move(name), bytes, pinned_mem::ArenaUse::kByStripe, stripe_bytes);
}

pinned_mem::ArenaOptions ArenaPolicy::Make(std::string name, uint64_t bytes,
                                           pinned_mem::ArenaUse use, uint64_t stripe_bytes) const {
  std::vector<std::vector<int>> worker_cpus;
  for (const cpu_adam::WorkerGroup& group : workers) {
    worker_cpus.insert(worker_cpus.end(), static_cast<size_t>(group.threads), group.cpus);
  }
  return {.name = std::move(name),
          .capacity_bytes = protocol::RoundUp(bytes, protocol::kPageBytes),
          .lock = lock,
          .placement = pinned_mem::PlaceArena(topology, use, worker_cpus, stripe_bytes),
          .threads = std::max(1, static_cast<int>(worker_cpus.size()))};
}

int ArenaPolicy::GroupAt(const pinned_mem::PinnedArena& arena, uint64_t offset_bytes,
                         uint64_t bytes) const {
  const int node = arena.PlacedNode(offset_bytes + bytes / 2);
  if (node < 0 || workers.size() < 2) return cpu_adam::WorkerPool::kAnyGroup;
  const auto found = std::ranges::find_if(workers, [&](const cpu_adam::WorkerGroup& group) {
    return topology.NodeOf(group.cpus.front()) == node;
  });
  return found == workers.end() ? cpu_adam::WorkerPool::kAnyGroup
                                : static_cast<int>(found - workers.begin());
}

}  // namespace forebay::daemon
