// SPDX-License-Identifier: Apache-2.0
// Maps a layout to blocks: which elements of which parameters a block holds, and where an element's state lies.
#pragma once

#include <cstdint>
#include <memory>
#include <memory_resource>
#include <span>
#include <vector>

#include "protocol/layout.h"

namespace forebay::daemon {

// Elements of one box that are contiguous in a block, in the weights and in the gradient, without
// padding.
struct BlockRun {
  uint32_t partition = 0;
  uint32_t param = 0;
  // First element, counted from the start of the parameter, for stochastic rounding. In a strided box
  // of int8, whose scales span its runs, and in formats without stochastic rounding, elements are
  // counted through the box from its first one.
  uint64_t param_elem = 0;
  uint64_t partition_elem = 0;
  uint64_t block_elem = 0;
  uint64_t elems = 0;

  bool operator==(const BlockRun&) const = default;
};

// Consecutive elements of one parameter that are contiguous in a block and in a partition.
struct ElementRun {
  static constexpr uint32_t kNoBlock = UINT32_MAX;

  uint32_t block = 0;  // kNoBlock: of a frozen parameter whose weights are in DRAM
  uint64_t block_elem = 0;
  uint32_t partition = 0;
  uint64_t partition_elem = 0;
  uint64_t param_elem = 0;
  uint64_t elems = 0;

  bool operator==(const ElementRun&) const = default;
};

// The blocks of a job. Each owner's states, end to end in the order of the layout, are cut into blocks of `block_elems`. The
// last block of an owner may be short. If the weights of any partition in a block are on swap, the block has a plane of weights
// behind the planes of states, element by element like the states. Blocks are numbered in the order in which they are placed
// and updated: the first block of each owner, then the second of each, and so on (first layers first).
//
// Behind these blocks come blocks of each owner's frozen parameters whose weights are on swap. Such a block has a plane of
// weights only, in which each box begins at a multiple of states_align_elems(). It has as many elements as a full block of
// states has bytes for. Blocks of frozen parameters are never updated, and never in DRAM as a whole.
class BlockMap {
 public:
  // `block_elems` is a multiple of the layout's states_align_elems(). `on_swap`: true for each partition whose weights are on
  // swap; empty: none.
  BlockMap(std::shared_ptr<const protocol::Layout> layout, uint64_t block_elems,
           std::vector<bool> on_swap = {});

  uint32_t blocks() const { return static_cast<uint32_t>(cuts_.size()); }
  bool has_states(uint32_t block) const { return block < state_blocks_; }
  uint32_t state_blocks() const { return state_blocks_; }              // the first ones
  uint32_t owner(uint32_t block) const { return cuts_[block].owner; }  // in the order of the layout
  uint64_t elems(uint32_t block) const;                                // padding included
  uint64_t states_elems(uint32_t block) const { return has_states(block) ? elems(block) : 0; }
  uint64_t bytes(uint32_t block) const;  // all planes, each on whole pages
  uint64_t full_block_bytes() const;     // bytes of the largest block
  bool has_weights(uint32_t block) const { return has_weights_[block]; }
  uint64_t weights_plane_offset(uint32_t block) const {
    return has_states(block) ? BytesOf(elems(block)) : 0;
  }
  bool has_weights_on_swap() const { return !on_swap_.empty(); }
  const std::vector<bool>& on_swap() const { return on_swap_; }  // by partition; empty: none
  bool is_on_swap(uint32_t partition) const { return !on_swap_.empty() && on_swap_[partition]; }

  // Returns the runs of a block in ascending order: one for each box in the block, cut at the borders of runs if the format
  // rounds each element by its place in the parameter. The list is allocated from `memory`.
  std::pmr::vector<BlockRun> Runs(
      uint32_t block, std::pmr::memory_resource* memory = std::pmr::get_default_resource()) const;

  // Partitions with elements (not only padding) in a block, ascending.
  std::vector<uint32_t> Partitions(uint32_t block) const;

  // Returns the places of elements [first, first + elems) of a trainable parameter, in order: those of replica 0, or of all
  // replicas that the layout has if it is a part.
  std::pmr::vector<ElementRun> Locate(uint32_t param, uint64_t first, uint64_t elems) const;

  // Returns the places of elements [begin, end) of a partition, in order, including frozen parameters. `param_elem` has no
  // meaning in them.
  std::pmr::vector<ElementRun> LocateInPartition(
      uint32_t partition, uint64_t begin, uint64_t end,
      std::pmr::memory_resource* memory = std::pmr::get_default_resource()) const;

  // Bytes of all blocks' states, computed without a map: admission needs them before it accepts the layout.
  static uint64_t TotalBytes(const protocol::Layout& layout, uint64_t block_elems);

  // Bytes of frozen parameters' weights that are on swap. `on_swap`: by partition.
  static uint64_t FrozenBytes(const protocol::Layout& layout, const std::vector<bool>& on_swap);

  // The largest number of elements, a multiple of states_align_elems(), that fits into a block of
  // `bytes`; 0: none does. `has_weights`: with a plane of weights.
  static uint64_t ElemsWithin(const protocol::Layout& layout, uint64_t bytes, bool has_weights);

 private:
  struct Cut {
    uint32_t owner = 0;  // in the order of the layout
    uint64_t elem = 0;   // its first, in the owner's sequence
    uint64_t elems = 0;
  };
  // Elements that blocks of one kind are cut from: the states of an owner, or its frozen weights on swap.
  struct Sequence {
    uint64_t block_elems = 0;
    uint64_t elems = 0;
    std::vector<uint32_t> boxes = {};   // ascending
    std::vector<uint32_t> blocks = {};  // ascending
  };

  void FindBoxes();
  // Cuts the first block of each owner's sequence, then the second of each, and so on.
  void CutBlocks(std::vector<Sequence>& sequences);
  void SetHasWeights(const Sequence& sequence);
  const Sequence& SequenceOf(uint32_t block) const;
  uint64_t BytesOf(uint64_t elems) const;  // bytes of the planes of states
  uint64_t WeightsBytes(uint64_t elems) const;
  void AddRuns(const protocol::BoxPlace& place, uint64_t begin, uint64_t end, uint64_t block_elem,
               std::pmr::vector<BlockRun>& runs) const;
  void AddElements(uint32_t box, uint64_t box_elem, uint64_t param_elem, uint64_t elems,
                   std::pmr::vector<ElementRun>& runs) const;

  std::shared_ptr<const protocol::Layout> layout_;
  std::span<const protocol::Plane> planes_;
  uint64_t block_elems_;
  std::vector<bool> on_swap_;      // by partition
  std::vector<bool> has_weights_;  // by block
  std::vector<Cut> cuts_;          // by block
  uint32_t state_blocks_ = 0;
  std::vector<Sequence> states_;                    // by owner
  std::vector<Sequence> frozen_;                    // by owner
  std::vector<uint64_t> sequence_elems_;            // by box: its first element in its sequence
  std::vector<std::vector<uint32_t>> param_boxes_;  // by parameter: as for Locate()
  std::vector<uint32_t> owner_of_partition_;        // in the order of the layout
};

}  // namespace forebay::daemon
