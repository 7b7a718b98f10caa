// SPDX-License-Identifier: Apache-2.0
// The order in which the blocks of a job are updated.
#pragma once

#include <cstdint>
#include <memory_resource>
#include <vector>

#include "daemon/core/blocks/block_map.h"
#include "protocol/layout.h"

namespace forebay::daemon {

// Blocks are ordered by the earliest position in a trace of fetches of any partition of the block. Blocks without a partition in
// the trace come last.
//
// Ownership  The arguments of the constructor outlive this object.
class UpdateOrder {
 public:
  UpdateOrder(const protocol::Layout& layout, const BlockMap& map,
              std::pmr::memory_resource* memory);

  // Orders the blocks by `trace`. False if they are in that order already.
  bool Follow(const std::vector<uint32_t>& trace);
  // Blocks, in order.
  const std::vector<uint32_t>& blocks() const { return in_order_; }
  // Index of a block into blocks().
  uint32_t position(uint32_t block) const { return position_[block]; }
  const std::vector<uint32_t>& partitions_of(uint32_t block) const { return partitions_[block]; }

 private:
  void Sort();

  const protocol::Layout& layout_;
  std::pmr::memory_resource* memory_;
  std::vector<std::vector<uint32_t>> partitions_;  // by block
  std::vector<uint32_t> trace_;
  std::vector<uint32_t> in_order_;
  std::vector<uint32_t> position_;
};

}  // namespace forebay::daemon
