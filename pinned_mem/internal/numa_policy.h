// SPDX-License-Identifier: Apache-2.0
// Requests pages on NUMA nodes, and finds the nodes of pages.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "pinned_mem/numa_placement.h"

namespace forebay::pinned_mem::internal {

// Sets the preferred node of pages that this thread touches for the first time. The kernel uses another node if the preferred
// node has no memory. The destructor restores the kernel's default.
//
// Source  set_mempolicy(2) MPOL_PREFERRED.
class PreferredNode {
 public:
  PreferredNode() = default;
  PreferredNode(const PreferredNode&) = delete;
  PreferredNode& operator=(const PreferredNode&) = delete;
  ~PreferredNode() { Set(-1); }

  // Sets the preferred node; -1: no node is preferred. Best effort.
  void Set(int node);

 private:
  int node_ = -1;
};

// Prevents the move of populated pages to other nodes (NUMA balancing). Later pages come from the nodes of the placement. Best
// effort.
//
// Source  mbind(2).
void KeepOnNodes(std::span<std::byte> bytes, const Placement& placement);

// Returns the nodes of the pages, ascending. Checks one page of each 2 MiB. Empty if the kernel does not report nodes.
//
// Source  move_pages(2).
std::vector<int> NodesOfPages(std::span<std::byte> bytes);

}  // namespace forebay::pinned_mem::internal
