// SPDX-License-Identifier: Apache-2.0
// NUMA nodes of pages: how the kernel is asked for one, and on which they are.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "pinned_mem/numa_placement.h"

namespace forebay::pinned_mem::internal {

// Pages that this thread touches for the first time come from the preferred node while it has
// memory. The destructor restores the kernel's default.
//
// Source  set_mempolicy(2) MPOL_PREFERRED.
class PreferredNode {
 public:
  PreferredNode() = default;
  PreferredNode(const PreferredNode&) = delete;
  PreferredNode& operator=(const PreferredNode&) = delete;
  ~PreferredNode() { Set(-1); }

  // -1: no node is preferred. Best effort.
  void Set(int node);

 private:
  int node_ = -1;
};

// Pages that are populated stay where they are (no NUMA balancing), and pages that come later come
// from the nodes of the placement. Best effort.
//
// Source  mbind(2).
void KeepOnNodes(std::span<std::byte> bytes, const Placement& placement);

// Nodes of the pages, ascending, one page of 2 MiB looked at. Empty: the kernel does not say.
//
// Source  move_pages(2).
std::vector<int> NodesOfPages(std::span<std::byte> bytes);

}  // namespace forebay::pinned_mem::internal
