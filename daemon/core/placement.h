// Where a job's bytes are: each block of states in DRAM or on swap, each partition's weights in DRAM.
#pragma once

#include <cstdint>
#include <vector>

#include "daemon/core/block_map.h"
#include "protocol/layout.h"

namespace forebay::daemon {

enum class Tier : uint8_t { kDram, kNvme };

struct BlockLocation {
  Tier tier = Tier::kNvme;
  // In DRAM: into the state arena.
  uint64_t state_offset_bytes = 0;
};

struct PartitionLocation {
  Tier tier = Tier::kDram;
  uint64_t weights_offset_bytes = 0;
  uint64_t bytes = 0;
};

// Whoever wants to know where bytes are asks this table, and assumes nothing about which blocks are
// in DRAM.
class Placement {
 public:
  Placement() = default;
  // The lowest blocks that fit into `dram_bytes` are in DRAM, side by side in the state arena; the
  // others are on swap.
  Placement(const protocol::Layout& layout, const BlockMap& map, uint64_t dram_bytes);

  BlockLocation WhereBlock(uint32_t block) const { return blocks_.at(block); }
  PartitionLocation WherePartition(uint32_t partition) const { return partitions_.at(partition); }

  uint32_t resident_blocks() const { return resident_blocks_; }
  uint32_t swapped_blocks() const {
    return static_cast<uint32_t>(blocks_.size()) - resident_blocks_;
  }
  // Of all blocks in DRAM.
  uint64_t state_bytes() const { return state_bytes_; }

 private:
  std::vector<BlockLocation> blocks_;
  std::vector<PartitionLocation> partitions_;
  uint32_t resident_blocks_ = 0;
  uint64_t state_bytes_ = 0;
};

}  // namespace forebay::daemon
