// SPDX-License-Identifier: Apache-2.0
// Places of a job's bytes: each block of states, and each partition's weights, in DRAM or on swap.
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
  kPromoteAndEvict,  // on its way to DRAM, and evicted as soon as it is there
};

struct BlockLocation {
  // Tier of the block. Until a move has ended, the tier before the move.
  Tier tier = Tier::kNvme;
  // Move for which the block is marked, or which is in progress.
  BlockMove move = BlockMove::kNone;
  bool comes_to_dram() const {
    return move == BlockMove::kPromote || move == BlockMove::kPromoteAndEvict;
  }
  // Place of the block in the state arena, which has a place for every block with states. The place has memory while the block
  // is in DRAM or on its way there.
  StatePart state;
};

struct PartitionLocation {
  Tier tier = Tier::kDram;            // kNvme: in the planes of its blocks; WeightsCache has copies
  uint64_t weights_offset_bytes = 0;  // in the weights arena
  uint64_t bytes = 0;
};

// This table alone knows where bytes are: no other code assumes which blocks are in DRAM. The table also has what the job was
// granted: the blocks that are in DRAM when all marked moves have ended.
class Placement {
 public:
  Placement() = default;
  // Places the lowest blocks with states that fit into `dram_bytes` in DRAM, all other blocks on swap. Weights are where `map`
  // has them: all in DRAM as the layout places them, or those in DRAM end to end. `durable`: the slots of a job with durable
  // steps.
  struct DurableSlots {
    uint32_t per_block = 0;  // 0: there are none
    uint32_t weights_parts = 0;
    uint32_t spare = 1;
  };
  Placement(const protocol::Layout& layout, const BlockMap& map, uint64_t dram_bytes,
            DurableSlots durable);
  // `resident`: true for each block in DRAM.
  Placement(const protocol::Layout& layout, const BlockMap& map, const std::vector<bool>& resident,
            DurableSlots durable);
  Placement(const protocol::Layout& layout, const BlockMap& map, uint64_t dram_bytes)
      : Placement(layout, map, dram_bytes, DurableSlots()) {}

  const BlockLocation& WhereBlock(uint32_t block) const { return blocks_.at(block); }
  PartitionLocation WherePartition(uint32_t partition) const { return partitions_.at(partition); }
  uint64_t weights_bytes() const { return weights_bytes_; }  // weights in DRAM, each on whole pages

  uint32_t blocks() const { return static_cast<uint32_t>(blocks_.size()); }
  uint32_t resident_blocks() const { return resident_blocks_; }
  uint32_t swapped_blocks() const { return blocks() - resident_blocks_; }
  // Number of swap slots for the blocks that are on swap or are to be evicted. Each block with states has kSwapSlotsPerBlock.
  // Each frozen block has one, and one more is for the next version of one frozen block at a time. With durable steps blocks in
  // DRAM and parts of the weights have slots too, each block that is to be evicted has two more, and one more is for a block
  // that leaves a slot in doubt.
  uint32_t slots_needed() const;
  // Number of these slots that one block has, in a job with durable steps.
  uint32_t slots_of(uint32_t block) const { return block < state_blocks_ ? durable_.per_block : 1; }
  // Gives up the slot for a block that leaves a slot in doubt: the job's swap has no room for it.
  void GiveUpSpareSlot() { durable_.spare = 0; }
  uint32_t frozen_blocks() const { return blocks() - state_blocks_; }
  // Bytes of DRAM for blocks: blocks in DRAM, including those to be evicted, and blocks to be promoted.
  uint64_t state_bytes() const { return state_bytes_; }
  // Like state_bytes(), without blocks to be evicted.
  uint64_t granted_bytes() const { return state_bytes_ - leaving_bytes_; }
  // Bytes of the state arena: places of all blocks.
  uint64_t arena_bytes() const;
  // Places of blocks in DRAM. Adjacent blocks are one part.
  std::vector<StatePart> ResidentParts() const;

  // Marks a block in DRAM as kEvict, a block on swap as kPromote, and a block that is being promoted as kPromoteAndEvict. In
  // the first two cases the block must have no mark.
  void Mark(uint32_t block);
  // Removes the mark: the block stays where it is. Not called while the block is moving.
  void Unmark(uint32_t block);
  // The next marked block: evictions first, from the highest; then promotions, from the lowest.
  std::optional<uint32_t> NextMarked() const;
  bool has_evictions() const { return !evictions_.empty(); }
  bool has_promotions() const { return !promotions_.empty(); }

  // Begins the move of a marked block. One block moves at a time.
  void BeginMove(uint32_t block);
  // Ends the move: the block is in the other tier now. A kPromoteAndEvict block is marked as kEvict.
  void FinishMove();
  // Ends the move: the block stays where it was, and has no mark any more.
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
