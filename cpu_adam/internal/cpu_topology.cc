// SPDX-License-Identifier: Apache-2.0
#include "cpu_adam/internal/cpu_topology.h"

#include <hwloc.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"

namespace forebay::cpu_adam::internal {
namespace {

using protocol::ErrorId;
using protocol::MakeError;

struct TopologyDeleter {
  void operator()(hwloc_topology_t topology) const { hwloc_topology_destroy(topology); }
};
using Topology = std::unique_ptr<hwloc_topology, TopologyDeleter>;

struct BitmapDeleter {
  void operator()(hwloc_bitmap_t bitmap) const { hwloc_bitmap_free(bitmap); }
};
using Bitmap = std::unique_ptr<hwloc_bitmap_s, BitmapDeleter>;

Topology LoadTopology(const std::string& synthetic) {
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0) return nullptr;
  Topology topology(raw);
  if (!synthetic.empty() && hwloc_topology_set_synthetic(raw, synthetic.c_str()) != 0) {
    return nullptr;
  }
  return hwloc_topology_load(raw) == 0 ? std::move(topology) : nullptr;
}

std::string ListOf(const Bitmap& set) {
  char* text = nullptr;
  if (hwloc_bitmap_list_asprintf(&text, set.get()) < 0) return "?";
  const std::unique_ptr<char, decltype(&free)> owner(text, &free);
  return text;
}

// CPUs that the calling thread may run on: those that are on-line and allowed, within the thread's own affinity.
Bitmap Allowed(const Topology& topology) {
  Bitmap allowed(hwloc_bitmap_dup(hwloc_topology_get_allowed_cpuset(topology.get())));
  const Bitmap bound(hwloc_bitmap_alloc());
  if (hwloc_get_cpubind(topology.get(), bound.get(), HWLOC_CPUBIND_THREAD) == 0) {
    hwloc_bitmap_and(allowed.get(), allowed.get(), bound.get());
  }
  return allowed;
}

int CountCores(const Topology& topology, const Bitmap& set) {
  std::set<unsigned> cores;
  unsigned cpu = 0;
  hwloc_bitmap_foreach_begin(cpu, set.get()) {
    const hwloc_obj_t pu = hwloc_get_pu_obj_by_os_index(topology.get(), cpu);
    if (pu == nullptr) continue;
    const hwloc_obj_t core = hwloc_get_ancestor_obj_by_type(topology.get(), HWLOC_OBJ_CORE, pu);
    // cores are unknown: each CPU counts as one
    cores.insert(core != nullptr ? core->logical_index : ~cpu);
  }
  hwloc_bitmap_foreach_end();
  return static_cast<int>(cores.size());
}

// Splits a set of CPUs by NUMA node. Nodes are ordered by the operating system's index. If several nodes are near the same CPUs
// (fast memory and DRAM), the first node has the CPUs.
std::vector<CpuSet> SplitByNode(const Topology& topology, const Bitmap& set) {
  std::map<unsigned, hwloc_obj_t> nodes;
  const int count = hwloc_get_nbobjs_by_type(topology.get(), HWLOC_OBJ_NUMANODE);
  for (int i = 0; i < count; ++i) {
    const hwloc_obj_t node =
        hwloc_get_obj_by_type(topology.get(), HWLOC_OBJ_NUMANODE, static_cast<unsigned>(i));
    if (node->attr->numanode.local_memory > 0) nodes.emplace(node->os_index, node);
  }
  const Bitmap left(hwloc_bitmap_dup(set.get()));
  const Bitmap part(hwloc_bitmap_alloc());
  std::vector<CpuSet> found;
  const auto add_part = [&] {
    if (hwloc_bitmap_iszero(part.get()) != 0) return;
    CpuSet& one = found.emplace_back();
    unsigned cpu = 0;
    hwloc_bitmap_foreach_begin(cpu, part.get()) { one.cpus.push_back(static_cast<int>(cpu)); }
    hwloc_bitmap_foreach_end();
    one.cores = CountCores(topology, part);
    hwloc_bitmap_andnot(left.get(), left.get(), part.get());
  };
  for (const auto& [index, node] : nodes) {
    hwloc_bitmap_and(part.get(), left.get(), node->cpuset);
    add_part();
  }
  hwloc_bitmap_copy(part.get(), left.get());  // CPUs of no node
  add_part();
  return found;
}

}  // namespace

absl::StatusOr<std::vector<CpuSet>> FindCpus(int numa_node, const std::vector<int>& wanted,
                                             const std::string& synthetic) {
  const Topology topology = LoadTopology(synthetic);
  if (topology == nullptr) {
    return MakeError(ErrorId::kInternal, "hwloc cannot read this machine's CPUs");
  }
  const Bitmap set = Allowed(topology);
  if (!wanted.empty()) {
    const Bitmap asked(hwloc_bitmap_alloc());
    for (const int cpu : wanted) {
      if (cpu < 0 || hwloc_bitmap_isset(set.get(), static_cast<unsigned>(cpu)) == 0) {
        return MakeError(
            ErrorId::kOption,
            absl::StrCat("CPU ", cpu, " is not one that this process may use: ", ListOf(set)));
      }
      hwloc_bitmap_set(asked.get(), static_cast<unsigned>(cpu));
    }
    hwloc_bitmap_copy(set.get(), asked.get());
  } else if (numa_node >= 0) {
    const int nodes = hwloc_get_nbobjs_by_type(topology.get(), HWLOC_OBJ_NUMANODE);
    const hwloc_obj_t node =
        hwloc_get_obj_by_type(topology.get(), HWLOC_OBJ_NUMANODE, static_cast<unsigned>(numa_node));
    if (node == nullptr) {
      return MakeError(ErrorId::kOption,
                       absl::StrCat("NUMA node ", numa_node, " does not exist: this machine has ",
                                    nodes, ", numbered from 0"));
    }
    hwloc_bitmap_and(set.get(), set.get(), node->cpuset);
  }
  if (hwloc_bitmap_iszero(set.get()) != 0) {
    return MakeError(ErrorId::kOption, absl::StrCat("NUMA node ", numa_node,
                                                    " has no CPU that this process may use"));
  }
  return SplitByNode(topology, set);
}

std::vector<int> ShareThreads(int threads, const std::vector<CpuSet>& sets) {
  int cores = 0;
  for (const CpuSet& set : sets) cores += set.cores;
  int left = (threads == 0 ? cores : std::min(threads, cores)) - static_cast<int>(sets.size());
  if (left < 0) return {};
  std::vector<int> shares(sets.size(), 1);
  for (; left > 0; --left) {
    size_t next = 0;  // the set with the most cores a thread
    for (size_t i = 1; i < sets.size(); ++i) {
      if (sets[i].cores * shares[next] > sets[next].cores * shares[i]) next = i;
    }
    ++shares[next];
  }
  return shares;
}

}  // namespace forebay::cpu_adam::internal
