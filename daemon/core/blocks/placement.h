// SPDX-License-Identifier: Apache-2.0
// Where a job's bytes are: each block of states, and each partition's weights, in DRAM or on swap.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <vector>

#include "daemon/core/base/events.h"
#include "daemon/core/blocks/block_map.h"
#include "protocol/layout.h"

namespace forebay::daemon {

enum class BlockMove : uint8_t {
  kNone,
  kEvict,
  kPromote,
  kPromoteAndEvict,  // it is on its way to DRAM, and leaves it as soon as it is there
};

struct BlockLocation {
  // Until its move has ended, where it was before.
  Tier tier = Tier::kNvme;
  // Marked for it, or on its way.
  BlockMove move = BlockMove::kNone;
  bool comes_to_dram() const {
    return move == BlockMove::kPromote || move == BlockMove::kPromoteAndEvict;
  }
  // Its place in the state arena, which has one for every block with states. There is memory while the block is
  // in DRAM or on its way there.
  StatePart state;
};

struct PartitionLocation {
  Tier tier = Tier::kDram;            // kNvme: in the planes of its blocks; WeightsCache has copies
  uint64_t weights_offset_bytes = 0;  // in the weights arena
  uint64_t bytes = 0;
};

// Whoever wants to know where bytes are asks this table, and assumes nothing about which blocks are
// in DRAM. It also says what the job was granted: the blocks that are in DRAM when all marked moves
// have ended.
class Placement {
 public:
  Placement() = default;
  // The lowest blocks with states that fit into `dram_bytes` are in DRAM, the others on swap. Weights are where `map` has
  // them: all of them in DRAM as the layout places them, or those that are, end to end.
  // `durable`: of a job with durable steps.
  struct DurableSlots {
    uint32_t per_block = 0;  // 0: there are none
    uint32_t weights_parts = 0;
    uint32_t spare = 1;
  };
  Placement(const protocol::Layout& layout, const BlockMap& map, uint64_t dram_bytes,
            DurableSlots durable);
  // By block: those in DRAM.
  Placement(const protocol::Layout& layout, const BlockMap& map, const std::vector<bool>& resident,
            DurableSlots durable);
  Placement(const protocol::Layout& layout, const BlockMap& map, uint64_t dram_bytes)
      : Placement(layout, map, dram_bytes, DurableSlots()) {}

  const BlockLocation& WhereBlock(uint32_t block) const { return blocks_.at(block); }
  PartitionLocation WherePartition(uint32_t partition) const { return partitions_.at(partition); }
  uint64_t weights_bytes() const {
    return weights_bytes_;
  }  // of those in DRAM, each on whole pages

  uint32_t blocks() const { return static_cast<uint32_t>(blocks_.size()); }
  uint32_t resident_blocks() const { return resident_blocks_; }
  uint32_t swapped_blocks() const { return blocks() - resident_blocks_; }
  // Of swap slots for the blocks that are on swap or are to be evicted: kSwapSlotsPerBlock for each that has
  // states; one for each other, and one more for the next version of one at a time. With durable steps also those
  // of blocks in DRAM and of the weights, two more for each that is to be evicted, and one more for a block that leaves
  // a slot in doubt.
  uint32_t slots_needed() const;
  // Of them, those of a block of a job with durable steps.
  uint32_t slots_of(uint32_t block) const { return block < state_blocks_ ? durable_.per_block : 1; }
  // The one more is not needed: the job's swap has no room for it.
  void GiveUpSpareSlot() { durable_.spare = 0; }
  uint32_t frozen_blocks() const { return blocks() - state_blocks_; }
  // DRAM that blocks take: of those in DRAM, those to be evicted included, and of those to be promoted.
  uint64_t state_bytes() const { return state_bytes_; }
  // The same without blocks to be evicted.
  uint64_t granted_bytes() const { return state_bytes_ - leaving_bytes_; }
  // Of the state arena: places of all blocks.
  uint64_t arena_bytes() const;
  // Blocks in DRAM, neighbours in one part.
  std::vector<StatePart> ResidentParts() const;

  // Marks a block in DRAM as kEvict, one on swap as kPromote, one that is being promoted as kPromoteAndEvict. Any other
  // has no mark.
  void Mark(uint32_t block);
  // Takes the mark away: the block stays where it is. Not while it is moving.
  void Unmark(uint32_t block);
  // The next marked block: evictions first, from the highest; then promotions, from the lowest.
  std::optional<uint32_t> NextMarked() const;
  bool has_evictions() const { return !evictions_.empty(); }
  bool has_promotions() const { return !promotions_.empty(); }

  // One block at a time moves; it is marked.
  void BeginMove(uint32_t block);
  // It is in the other tier now. A block of kPromoteAndEvict is marked as kEvict.
  void FinishMove();
  // It is where it was, and has no mark any more.
  void CancelMove();
  std::optional<uint32_t> moving() const { return moving_; }

 private:
  DurableSlots durable_;
  std::vector<BlockLocation> blocks_;
  std::vector<PartitionLocation> partitions_;
  std::set<uint32_t> evictions_;
  std::set<uint32_t> promotions_;
  std::optional<uint32_t> moving_;
  uint32_t state_blocks_ = 0;  // the first ones
  uint32_t resident_blocks_ = 0;
  uint64_t weights_bytes_ = 0;
  uint64_t state_bytes_ = 0;
  uint64_t leaving_bytes_ = 0;
};

}  // namespace forebay::daemon
