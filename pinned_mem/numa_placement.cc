// SPDX-License-Identifier: Apache-2.0
#include "pinned_mem/numa_placement.h"

#include <hwloc.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <set>

#include "protocol/error.h"
#include "protocol/os/check.h"

namespace forebay::pinned_mem {
namespace {

using protocol::ErrorId;
using protocol::MakeError;

// Most entries of a pattern, which limits its length for uneven proportions.
constexpr size_t kPatternMax = 64;

struct TopologyDeleter {
  void operator()(hwloc_topology_t topology) const { hwloc_topology_destroy(topology); }
};

// Returns nodes in proportion to their threads, mixed as evenly as possible: 4 and 2 threads give 0, 1, 0.
std::vector<int> Pattern(const std::map<int, size_t>& threads_by_node) {
  size_t divisor = 0;
  size_t total = 0;
  for (const auto& [node, threads] : threads_by_node) {
    divisor = std::gcd(divisor, threads);
    total += threads;
  }
  const size_t length = std::min(total / divisor, kPatternMax);
  std::map<int, size_t> credit;
  std::vector<int> pattern;
  while (pattern.size() < length) {
    for (const auto& [node, threads] : threads_by_node) credit[node] += threads;
    const auto next = std::ranges::max_element(
        credit, {}, [](const auto& entry) { return static_cast<int64_t>(entry.second); });
    pattern.push_back(next->first);
    next->second -= total;
  }
  return pattern;
}

}  // namespace

int NumaTopology::NodeOf(int cpu) const {
  for (const NumaNode& node : nodes) {
    if (std::ranges::binary_search(node.cpus, cpu)) return node.index;
  }
  return -1;
}

absl::StatusOr<NumaTopology> LoadNumaTopology(const std::string& synthetic) {
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0) return MakeError(ErrorId::kInternal, "hwloc cannot start");
  const std::unique_ptr<hwloc_topology, TopologyDeleter> owner(raw);
  if ((!synthetic.empty() && hwloc_topology_set_synthetic(raw, synthetic.c_str()) != 0) ||
      hwloc_topology_load(raw) != 0) {
    return MakeError(ErrorId::kInternal, "hwloc cannot read the NUMA nodes of this machine");
  }
  NumaTopology topology;
  std::map<int, hwloc_obj_t> by_index;
  const int count = hwloc_get_nbobjs_by_type(raw, HWLOC_OBJ_NUMANODE);
  for (int i = 0; i < count; ++i) {
    const hwloc_obj_t node =
        hwloc_get_obj_by_type(raw, HWLOC_OBJ_NUMANODE, static_cast<unsigned>(i));
    if (node->attr->numanode.local_memory == 0) continue;
    by_index.emplace(static_cast<int>(node->os_index), node);
  }
  // Several nodes may be near the same CPUs (for example fast memory and DRAM). Linux gives the lowest number to the node that
  // those CPUs use by default, so the CPUs belong to that node.
  std::set<int> assigned;
  for (const auto& [index, node] : by_index) {
    NumaNode& one = topology.nodes.emplace_back(NumaNode{.index = index, .cpus = {}});
    unsigned cpu = 0;
    hwloc_bitmap_foreach_begin(cpu, node->cpuset) {
      if (assigned.insert(static_cast<int>(cpu)).second) one.cpus.push_back(static_cast<int>(cpu));
    }
    hwloc_bitmap_foreach_end();
  }
  return topology;
}

int Placement::NodeAt(uint64_t offset_bytes) const {
  return nodes.empty() ? -1 : nodes[offset_bytes / stripe_bytes % nodes.size()];
}

Placement PlaceArena(const NumaTopology& topology, ArenaUse use,
                     const std::vector<std::vector<int>>& worker_cpus, uint64_t stripe_bytes) {
  if (topology.nodes.size() < 2) return {};
  std::map<int, size_t> threads_by_node;
  for (const std::vector<int>& cpus : worker_cpus) {
    std::set<int> nodes;
    for (const int cpu : cpus) nodes.insert(topology.NodeOf(cpu));
    nodes.erase(-1);
    for (const int node : nodes) ++threads_by_node[node];
  }
  if (threads_by_node.empty()) return {};
  if (use == ArenaUse::kShared) {
    for (auto& [node, threads] : threads_by_node) threads = 1;
    return {.nodes = Pattern(threads_by_node)};
  }
  FOREBAY_CHECK(stripe_bytes > 0);
  return {.nodes = Pattern(threads_by_node), .stripe_bytes = stripe_bytes};
}

}  // namespace forebay::pinned_mem
