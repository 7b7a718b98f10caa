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
  // The operating system's index.
  int index = 0;
  // The operating system's indices of the CPUs that belong to this node. Each CPU belongs to one node only.
  std::vector<int> cpus;
};

// Nodes with memory, by index. Those without CPUs (CXL, GPU memory) are in it too.
struct NumaTopology {
  std::vector<NumaNode> nodes;

  // The node that a CPU has as its own; -1: none.
  int NodeOf(int cpu) const;
};

// This machine's, without what this process may not use; or, for tests, of a machine that hwloc
// makes from `synthetic`, "numa:2 core:4 pu:1".
//
// Errors  E_INTERNAL  hwloc cannot read the machine or the text.
absl::StatusOr<NumaTopology> LoadNumaTopology(const std::string& synthetic = {});

enum class ArenaUse {
  // Workers of every node touch all of it.
  kShared,
  // Each stripe is touched by workers of its own node.
  kByStripe,
};

// Nodes of an arena, in turn: stripe i comes from nodes[i % nodes.size()].
struct Placement {
  // Empty: the kernel decides.
  std::vector<int> nodes;
  uint64_t stripe_bytes = protocol::kHugePageBytes;

  // -1 where the kernel decides.
  int NodeAt(uint64_t offset_bytes) const;
};

// The placement of an arena on which threads with these CPUs work (one entry a thread): interleaved
// over their nodes, for kByStripe in proportion to their number. On a machine with one node, and
// where no thread's node is known, the kernel decides.
//
// Limits  Pure.
Placement PlaceArena(const NumaTopology& topology, ArenaUse use,
                     const std::vector<std::vector<int>>& worker_cpus, uint64_t stripe_bytes);

}  // namespace forebay::pinned_mem
