// SPDX-License-Identifier: Apache-2.0
// Places of a job's bytes: each block of states, and each partition's weights, in DRAM or on swap.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <vector>

#include "daemon/core/base/events.h"
#include "daemon/core/base/limits.h"
#include "daemon/core/blocks/block_map.h"
#include "protocol/layout.h"

namespace forebay::daemon {

enum class BlockMove : uint8_t {
  kNone,
  kEvict,
  kPromote,
  kPromoteAndEvict,  // being promoted, and evicted when the promotion ends
};

struct BlockLocation {
  // Tier of the block. During a move, the tier before the move.
  Tier tier = Tier::kNvme;
  // Move for which the block is marked, or which is in progress.
  BlockMove move = BlockMove::kNone;
  bool comes_to_dram() const {
    return move == BlockMove::kPromote || move == BlockMove::kPromoteAndEvict;
  }
  // Place of the block in the state arena, in which every block with states has a place. The place has memory while the block
  // is in DRAM or is being promoted.
  StatePart state;
};

struct PartitionLocation {
  Tier tier = Tier::kDram;            // kNvme: in planes of blocks; WeightsCache has copies
  uint64_t weights_offset_bytes = 0;  // offset in the weights arena
  uint64_t bytes = 0;
};

// Only this table knows the tier and place of each block and partition, and no other code makes assumptions about them. The
// table also has the blocks that the job was granted in DRAM: those that are in DRAM when all marked moves have ended.
class Placement {
 public:
  Placement() = default;
  // Places the lowest blocks with states that fit into `dram_bytes` in DRAM, all other blocks on swap. `map` says which weights
  // are on swap. If all weights are in DRAM, the layout places them. Otherwise the weights in DRAM are contiguous. `durable`:
  // the slots of a job with durable steps.
  struct DurableSlots {
    uint32_t per_block = 0;  // 0 if the job has no durable steps
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
  // Bytes of the weights in DRAM, each partition's rounded up to whole pages.
  uint64_t weights_bytes() const { return weights_bytes_; }

  uint32_t blocks() const { return static_cast<uint32_t>(blocks_.size()); }
  uint32_t resident_blocks() const { return resident_blocks_; }
  uint32_t swapped_blocks() const { return blocks() - resident_blocks_; }
  // Number of swap slots for the blocks that are on swap or are to be evicted. Each block with states has kSwapSlotsPerBlock.
  // Each frozen block has one slot, and one additional slot is for the next version of one frozen block at a time. With durable
  // steps every block with states, in DRAM too, has DurableSlots::per_block slots, and every part of the weights has
  // kSwapSlotsPerWeightsPart. Each block that is to be evicted then has kSwapSlotsPerBlock additional slots, and the one
  // additional slot is also for a block that leaves a slot in doubt (DurableSlots::spare).
  uint32_t slots_needed() const;
  // Returns the number of these slots that one block has, in a job with durable steps.
  uint32_t slots_of(uint32_t block) const { return block < state_blocks_ ? durable_.per_block : 1; }
  // Plans without the slot for a block that leaves a slot in doubt, because swap has no space for that slot.
  void GiveUpSpareSlot() { durable_.spare = 0; }
  uint32_t frozen_blocks() const { return blocks() - state_blocks_; }
  // Bytes of DRAM for blocks: blocks in DRAM, including those to be evicted, and blocks to be promoted.
  uint64_t state_bytes() const { return state_bytes_; }
  // Like state_bytes(), without blocks to be evicted.
  uint64_t granted_bytes() const { return state_bytes_ - leaving_bytes_; }
  // Returns the bytes of the state arena, which has the places of all blocks.
  uint64_t arena_bytes() const;
  // Returns the places of blocks in DRAM. Adjacent blocks are one part.
  std::vector<StatePart> ResidentParts() const;

  // Marks a block in DRAM as kEvict, a block on swap as kPromote, and a block that is being promoted as kPromoteAndEvict. In
  // the first two cases the block must have no mark.
  void Mark(uint32_t block);
  // Removes the mark: the block stays where it is. Not called while the block is moving.
  void Unmark(uint32_t block);
  // Returns the next marked block: the highest block to evict, or else the lowest block to promote.
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
  uint32_t state_blocks_ = 0;  // number of blocks with states
  uint32_t resident_blocks_ = 0;
  uint64_t weights_bytes_ = 0;
  uint64_t state_bytes_ = 0;
  uint64_t leaving_bytes_ = 0;
};

}  // namespace forebay::daemon
