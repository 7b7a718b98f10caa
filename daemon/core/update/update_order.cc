// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/update/update_order.h"

#include <algorithm>
#include <utility>

namespace forebay::daemon {

UpdateOrder::UpdateOrder(const protocol::Layout& layout, const BlockMap& map,
                         std::pmr::memory_resource* memory)
    : layout_(layout), memory_(memory), in_order_(map.blocks()), position_(map.blocks()) {
  for (uint32_t block = 0; block < map.blocks(); ++block) {
    partitions_.push_back(map.Partitions(block));
  }
  Sort();
}

bool UpdateOrder::Follow(const std::vector<uint32_t>& trace) {
  if (trace == trace_) return false;
  trace_ = trace;
  Sort();
  return true;
}

void UpdateOrder::Sort() {
  const auto partitions = static_cast<uint32_t>(layout_.partitions().size());
  std::pmr::vector<uint32_t> first_use(partitions, memory_);
  for (uint32_t partition = 0; partition < partitions; ++partition) {
    first_use[partition] = static_cast<uint32_t>(trace_.size()) + partition;
  }
  for (uint32_t i = 0; i < trace_.size(); ++i) first_use[trace_[i]] = i;
  std::pmr::vector<std::pair<uint32_t, uint32_t>> keys(memory_);  // first use, block
  for (uint32_t block = 0; block < partitions_.size(); ++block) {
    uint32_t first = UINT32_MAX;
    for (const uint32_t partition : partitions_[block]) {
      first = std::min(first, first_use[partition]);
    }
    keys.emplace_back(first, block);
  }
  std::ranges::sort(keys);
  for (uint32_t i = 0; i < keys.size(); ++i) {
    in_order_[i] = keys[i].second;
    position_[keys[i].second] = i;
  }
}

}  // namespace forebay::daemon
