#include "daemon/core/placement.h"

namespace forebay::daemon {

Placement::Placement(const protocol::Layout& layout, const BlockMap& map, uint64_t dram_bytes)
    : blocks_(map.blocks()) {
  for (BlockLocation& block : blocks_) {
    const uint64_t bytes = map.bytes(resident_blocks_);
    if (bytes > dram_bytes - state_bytes_) break;
    block = {.tier = Tier::kDram, .state_offset_bytes = state_bytes_};
    state_bytes_ += bytes;
    ++resident_blocks_;
  }
  for (uint32_t partition = 0; partition < layout.groups().size(); ++partition) {
    partitions_.push_back({.tier = Tier::kDram,
                           .weights_offset_bytes = layout.groups()[partition].weights_offset_bytes,
                           .bytes = layout.group_bytes(partition)});
  }
}

}  // namespace forebay::daemon
