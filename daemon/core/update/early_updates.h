// SPDX-License-Identifier: Apache-2.0
// Update at arrival: which blocks of the step that is being gathered have all their gradients, and what has
// been made of them before the decision.
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

// An early update leaves the states that its block had in their slot, and the weights in the arena: it writes
// new states to another slot, and new weights behind them or to a slot of the step arena. So the decision can
// take it or leave it, with the same bits either way.
//
// Blocks are named by number, and by their position in the order of update, which begins with what the next
// forward uses first: with what a backward delivers last.
class EarlyUpdates {
 public:
  struct Block {
    std::optional<uint32_t> weights_slot = {};  // of the step arena: where its new weights are
    bool updated = false;                       // else its update runs
    bool written = false;
    uint64_t overflows = 0;  // masters that became non-finite
  };

  // What is given outlives it. `position`: by block.
  EarlyUpdates(const protocol::Layout& layout, const BlockMap& map, const MemoryPlan& plan,
               const std::vector<uint32_t>& position, std::pmr::memory_resource* memory);

  // The sum of a range's gradients is the last one of this step, or it is not after all: blocks that
  // were begun with another sum are returned.
  std::vector<uint32_t> CountSums(uint32_t partition, uint64_t begin, uint64_t end, bool is_last);
  void ForgetSums();
  // Positions have changed.
  void Sort();

  // Positions of blocks that have all their gradients and were not begun, ascending.
  const std::pmr::set<uint32_t>& waiting() const { return waiting_; }
  // There is a place for its new weights.
  bool HasPlace(uint32_t block) const {
    return places_[block] == Place::kBehindStates ||
           (places_[block] == Place::kSlot && !free_slots_.empty());
  }
  void Begin(uint32_t block);
  // Of a new one: what another daemon has made of the block.
  void Adopt(uint32_t block, const Block& made);
  bool has(uint32_t block) const { return blocks_.contains(block); }
  Block& at(uint32_t block) { return blocks_.at(block); }
  const std::pmr::map<uint32_t, Block>& all() const { return blocks_; }
  // Forgets a block whose update is part of the step now, or of no use. It may be begun again.
  void Remove(uint32_t block);
  // The same while a task of it runs: until EndRemoved() that may write its weights slot.
  void RemoveRunning(uint32_t block);
  void EndRemoved(uint32_t block);
  // Where an element's new weights are in the step arena.
  uint64_t NewWeightsOffset(uint32_t slot, uint64_t block_elem) const;

  // A worker reads the sums of a block's partitions.
  void AddReader(uint32_t block);
  void RemoveReader(uint32_t block);
  bool ReadsSums(uint32_t partition, uint64_t begin, uint64_t end) const;

 private:
  // Of its new weights.
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
  std::vector<uint64_t> elems_;   // by block, without padding
  std::vector<uint64_t> summed_;  // of these, that have their last sum
  std::pmr::set<uint32_t> waiting_;
  std::pmr::map<uint32_t, Block> blocks_;
  std::pmr::set<uint32_t> free_slots_;
  std::pmr::map<uint32_t, uint32_t> removed_slots_;  // by block, that a task may still write
  std::pmr::map<uint32_t, std::pmr::vector<Range>> readers_;  // by block
  std::vector<uint32_t> partition_readers_;
};

}  // namespace forebay::daemon
