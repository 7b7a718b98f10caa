// SPDX-License-Identifier: Apache-2.0
// Chooses the NUMA node of each part of an arena.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "protocol/units.h"

namespace forebay::pinned_mem {

struct NumaNode {
  // Number of the node in the operating system.
  int index = 0;
  // Numbers of the CPUs that belong to this node, in the operating system. Each CPU belongs to one node only.
  std::vector<int> cpus;
};

// Nodes with memory, sorted by index, including nodes without CPUs (CXL, GPU memory).
struct NumaTopology {
  std::vector<NumaNode> nodes;

  // Returns the node that the CPU belongs to; -1 if no node has the CPU.
  int NodeOf(int cpu) const;
};

// Returns the topology of this machine, without nodes and CPUs that this process may not use. For tests: the topology of a
// machine that hwloc makes from `synthetic`, "numa:2 core:4 pu:1".
//
// Errors  E_INTERNAL  hwloc cannot read the machine or the text.
absl::StatusOr<NumaTopology> LoadNumaTopology(const std::string& synthetic = {});

enum class ArenaUse {
  // Workers of every node touch the whole arena.
  kShared,
  // Only workers on the NUMA node of a stripe touch the stripe.
  kByStripe,
};

// Nodes of an arena, in turn: stripe i comes from nodes[i % nodes.size()].
struct Placement {
  // Nodes in turn. Empty: the kernel chooses the nodes.
  std::vector<int> nodes;
  uint64_t stripe_bytes = protocol::kHugePageBytes;

  // Returns the node of the byte at the offset; -1 if the kernel chooses it.
  int NodeAt(uint64_t offset_bytes) const;
};

// Returns the placement of an arena for threads with these CPUs (one entry for each thread). Interleaves the arena over the
// threads' nodes; for kByStripe in proportion to the number of threads. The kernel chooses the nodes on a machine with one
// node, or if the node of no thread is known.
//
// Limits  Pure.
Placement PlaceArena(const NumaTopology& topology, ArenaUse use,
                     const std::vector<std::vector<int>>& worker_cpus, uint64_t stripe_bytes);

}  // namespace forebay::pinned_mem
