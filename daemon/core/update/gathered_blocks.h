// SPDX-License-Identifier: Apache-2.0
// Blocks of the gathered step that have all their gradients, and the gradient sums that early updates read.
#pragma once

#include <cstdint>
#include <map>
#include <memory_resource>
#include <set>
#include <vector>

#include "daemon/core/blocks/block.h"
#include "daemon/core/blocks/block_map.h"
#include "daemon/core/update/update_order.h"
#include "protocol/layout.h"

namespace forebay::daemon {

// The order of update begins with the blocks that the next forward uses first. A backward delivers the gradients of these blocks last.
//
// Ownership  The arguments of the constructor outlive this object.
class GatheredBlocks {
 public:
  GatheredBlocks(const protocol::Layout& layout, const BlockMap& map, const Blocks& blocks,
                 const UpdateOrder& order, std::pmr::memory_resource* memory);

  // Records that the gradient sum of a range is final for this step (`is_last`), or that it no longer is. Returns the blocks
  // whose early update was begun with a sum that is not final.
  std::vector<uint32_t> CountSums(uint32_t partition, uint64_t begin, uint64_t end, bool is_last);
  void ForgetSums();
  // Rebuilds waiting() after positions have changed.
  void Sort();

  // Returns the positions of blocks that have all their gradients and whose early update was not begun, ascending.
  const std::pmr::set<uint32_t>& waiting() const { return waiting_; }
  // True if the block can be updated early: its new weights fit behind its states, or in a free slot of the step arena.
  bool HasPlace(uint32_t block) const {
    return places_[block] == Place::kBehindStates ||
           (places_[block] == Place::kSlot && blocks_.has_free_weights_slot());
  }
  Blocks::NewWeights NewWeightsOf(uint32_t block) const {
    return places_[block] == Place::kSlot ? Blocks::NewWeights::kInSlot
                                          : Blocks::NewWeights::kInBlock;
  }
  // OnBegun() reports that the early update of a block begins. OnUpdated() reports that its worker no longer reads gradient
  // sums. OnEnded() reports that the early update is part of a step or is dropped, so that another one may begin.
  void OnBegun(uint32_t block);
  void OnUpdated(uint32_t block);
  void OnEnded(uint32_t block);
  // True if a worker reads gradient sums of the range for an early update.
  bool ReadsSums(uint32_t partition, uint64_t begin, uint64_t end) const;

 private:
  // Place of a block's new weights: none, behind its new states, or a slot of the step arena.
  enum class Place : uint8_t { kNone, kBehindStates, kSlot };
  using Range = PartitionRange;

  std::pmr::vector<Range> RangesOf(uint32_t block) const;

  const BlockMap& map_;
  const Blocks& blocks_;
  const UpdateOrder& order_;
  std::pmr::memory_resource* memory_;
  std::vector<Place> places_;     // by block
  std::vector<uint64_t> elems_;   // number of elements without padding, by block
  std::vector<uint64_t> summed_;  // number of elements with a final sum, by block
  std::pmr::set<uint32_t> waiting_;
  std::pmr::map<uint32_t, std::pmr::vector<Range>> readers_;  // by block
  std::vector<uint32_t> partition_readers_;
};

}  // namespace forebay::daemon
