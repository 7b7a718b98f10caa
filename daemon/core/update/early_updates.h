// SPDX-License-Identifier: Apache-2.0
// Update at arrival: tracks which blocks of the gathered step have all their gradients, and which of them were updated before
// the decision.
#pragma once

#include <cstdint>
#include <map>
#include <memory_resource>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "daemon/core/blocks/block_map.h"
#include "daemon/core/plan/memory_plan.h"
#include "protocol/layout.h"

namespace forebay::daemon {

// An early update retains the old states of its block in their slot, and the old weights in the arena. It writes the new states
// to another slot, and the new weights behind these states or to a slot of the step arena. So the decision can accept or drop
// the update, with the same bits either way.
//
// A block has a number, and a position in the order of update. That order begins with the blocks that the next forward uses
// first. A backward delivers the gradients of these blocks last.
class EarlyUpdates {
 public:
  struct Block {
    std::optional<uint32_t> weights_slot = {};  // slot of the step arena with the new weights
    bool updated = false;                       // false while the update runs
    bool written = false;
    uint64_t overflows = 0;  // number of masters that became non-finite
  };

  // The arguments outlive this object. `position`: the position of each block.
  EarlyUpdates(const protocol::Layout& layout, const BlockMap& map, const MemoryPlan& plan,
               const std::vector<uint32_t>& position, std::pmr::memory_resource* memory);

  // Records that the gradient sum of a range is final for this step (`is_last`), or that it no longer is. Returns the blocks
  // whose early update was begun with a sum that is not final.
  std::vector<uint32_t> CountSums(uint32_t partition, uint64_t begin, uint64_t end, bool is_last);
  void ForgetSums();
  // Rebuilds waiting() after positions have changed.
  void Sort();

  // Returns the positions of blocks that have all their gradients and whose early update was not begun, ascending.
  const std::pmr::set<uint32_t>& waiting() const { return waiting_; }
  // True if the block's new weights fit behind its states or in a free slot of the step arena.
  bool HasPlace(uint32_t block) const {
    return places_[block] == Place::kBehindStates ||
           (places_[block] == Place::kSlot && !free_slots_.empty());
  }
  void Begin(uint32_t block);
  // Adds an early update that another daemon computed. Called on a new object.
  void Adopt(uint32_t block, const Block& made);
  bool has(uint32_t block) const { return blocks_.contains(block); }
  Block& at(uint32_t block) { return blocks_.at(block); }
  const std::pmr::map<uint32_t, Block>& all() const { return blocks_; }
  // Removes the early update of a block, because that update is now part of the step or is dropped. Another early update of the
  // block may begin.
  void Remove(uint32_t block);
  // Like Remove(), while a task of the update runs. The task may write the weights slot until EndRemoved().
  void RemoveRunning(uint32_t block);
  void EndRemoved(uint32_t block);
  // Offset of an element's new weights in the step arena, in bytes.
  uint64_t NewWeightsOffset(uint32_t slot, uint64_t block_elem) const;

  // Records that a worker reads the gradient sums of a block's partitions.
  void AddReader(uint32_t block);
  void RemoveReader(uint32_t block);
  bool ReadsSums(uint32_t partition, uint64_t begin, uint64_t end) const;

 private:
  // Place of a block's new weights: none, behind its new states, or a slot of the step arena.
  enum class Place : uint8_t { kNone, kBehindStates, kSlot };
  struct Range {
    uint32_t partition = 0;
    uint64_t begin = 0;
    uint64_t end = 0;
  };

  std::optional<uint32_t> Extract(uint32_t block);
  std::pmr::vector<Range> RangesOf(uint32_t block) const;

  const BlockMap& map_;
  const MemoryPlan& plan_;
  const std::vector<uint32_t>& position_;
  std::pmr::memory_resource* memory_;
  uint64_t weights_width_;
  std::vector<Place> places_;     // by block
  std::vector<uint64_t> elems_;   // number of elements without padding, by block
  std::vector<uint64_t> summed_;  // number of elements with a final sum, by block
  std::pmr::set<uint32_t> waiting_;
  std::pmr::map<uint32_t, Block> blocks_;
  std::pmr::set<uint32_t> free_slots_;
  std::pmr::map<uint32_t, uint32_t> removed_slots_;  // by block, slots that a task may still write
  std::pmr::map<uint32_t, std::pmr::vector<Range>> readers_;  // by block
  std::vector<uint32_t> partition_readers_;
};

}  // namespace forebay::daemon
