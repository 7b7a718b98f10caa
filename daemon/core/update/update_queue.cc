// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/update/update_queue.h"

#include <algorithm>

#include "protocol/os/check.h"

namespace forebay::daemon {

UpdateQueue::UpdateQueue(const protocol::Layout& layout, const UpdateOrder& order,
                         std::pmr::memory_resource* memory)
    : layout_(layout),
      order_(order),
      in_place_(memory),
      staged_(memory),
      to_install_(memory),
      partition_blocks_left_(layout.partitions().size(), 0) {}

void UpdateQueue::Open(const std::pmr::vector<bool>& params) {
  is_open_ = true;
  has_gradient_.assign(layout_.partitions().size(), false);
  for (const protocol::BoxPlace& place : layout_.boxes()) {
    if (params[place.box.param]) has_gradient_[place.partition] = true;
  }
}

void UpdateQueue::Close() {
  is_open_ = false;
  for (const uint32_t left : partition_blocks_left_) FOREBAY_CHECK(left == 0);
}

void UpdateQueue::Clear() {
  in_place_.clear();
  staged_.clear();
  blocks_left_ = 0;
  std::ranges::fill(partition_blocks_left_, 0);
}

void UpdateQueue::Add(uint32_t block) {
  for (const uint32_t partition : order_.partitions_of(block)) ++partition_blocks_left_[partition];
  ++blocks_left_;
}

void UpdateQueue::EndPartitionsOf(uint32_t block) {
  for (const uint32_t partition : order_.partitions_of(block)) --partition_blocks_left_[partition];
}

}  // namespace forebay::daemon
