// SPDX-License-Identifier: Apache-2.0
#include "pinned_mem/internal/numa_policy.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <set>

#include "protocol/units.h"

namespace forebay::pinned_mem::internal {
namespace {

using protocol::kHugePageBytes;

constexpr size_t kNodesMax = 1024;  // CONFIG_NODES_SHIFT is at most 10
constexpr size_t kWordBits = 8 * sizeof(unsigned long);

struct NodeMask {
  unsigned long words[kNodesMax / kWordBits] = {};

  void Add(int node) {
    const auto bit = static_cast<size_t>(node);
    if (bit < kNodesMax) words[bit / kWordBits] |= 1UL << (bit % kWordBits);
  }
};

}  // namespace

void PreferredNode::Set(int node) {
  if (node == node_) return;
  node_ = node;
  NodeMask mask;
  if (node >= 0) mask.Add(node);
  (void)syscall(SYS_set_mempolicy, node < 0 ? MPOL_DEFAULT : MPOL_PREFERRED,
                node < 0 ? nullptr : mask.words, node < 0 ? 0 : kNodesMax + 1);
}

void KeepOnNodes(std::span<std::byte> bytes, const Placement& placement) {
  if (placement.nodes.empty()) return;
  NodeMask mask;
  for (const int node : placement.nodes) mask.Add(node);
  const bool one = std::ranges::count(placement.nodes, placement.nodes.front()) ==
                   static_cast<std::ptrdiff_t>(placement.nodes.size());
  (void)syscall(SYS_mbind, bytes.data(), bytes.size(), one ? MPOL_PREFERRED : MPOL_INTERLEAVE,
                mask.words, kNodesMax + 1, 0);
}

std::vector<int> NodesOfPages(std::span<std::byte> bytes) {
  constexpr size_t kPagesPerCall = 512;
  std::set<int> nodes;
  std::vector<void*> pages;
  for (uint64_t at = 0; at < bytes.size();) {
    pages.clear();
    for (; at < bytes.size() && pages.size() < kPagesPerCall; at += kHugePageBytes) {
      pages.push_back(bytes.data() + at);
    }
    std::vector<int> found(pages.size(), -1);
    if (syscall(SYS_move_pages, 0, pages.size(), pages.data(), nullptr, found.data(), 0) != 0) {
      return {};
    }
    for (const int node : found) {
      if (node >= 0) nodes.insert(node);
    }
  }
  return {nodes.begin(), nodes.end()};
}

}  // namespace forebay::pinned_mem::internal
