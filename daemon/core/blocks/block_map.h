// SPDX-License-Identifier: Apache-2.0
// Maps a layout to blocks: the elements of parameters that a block holds, and the place of an element's states.
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
  // Index of the first element in the parameter, for stochastic rounding. In a strided box of int8, whose scales span its runs,
  // and in formats without stochastic rounding, elements are counted through the box from the box's first element.
  uint64_t param_elem = 0;
  uint64_t partition_elem = 0;
  uint64_t block_elem = 0;
  uint64_t elems = 0;

  bool operator==(const BlockRun&) const = default;
};

// Consecutive elements of one parameter that are contiguous in a block and in a partition.
struct ElementRun {
  static constexpr uint32_t kNoBlock = UINT32_MAX;

  uint32_t block = 0;  // kNoBlock: a frozen parameter with weights in DRAM
  uint64_t block_elem = 0;
  uint32_t partition = 0;
  uint64_t partition_elem = 0;
  uint64_t param_elem = 0;
  uint64_t elems = 0;

  bool operator==(const ElementRun&) const = default;
};

// Elements [begin, end) of a partition.
struct PartitionRange {
  uint32_t partition = 0;
  uint64_t begin = 0;
  uint64_t end = 0;

  bool Overlaps(const PartitionRange& other) const {
    return partition == other.partition && begin < other.end && other.begin < end;
  }
};

// The blocks of a job. The states of each owner, concatenated in the order of the layout, are cut into blocks of `block_elems`.
// The last block of an owner may be short. If the weights of any partition in a block are on swap, the block has a plane of
// weights behind the planes of states, with the elements in the same order. Blocks are numbered in the order in which they are
// placed and updated: the first block of each owner, then the second of each, and so on (first layers first).
//
// The following numbers are blocks of each owner's frozen parameters whose weights are on swap. Such a block has only a plane
// of weights, in which each box begins at a multiple of states_align_elems(). The block has as many elements as fit into the
// bytes of a full block of states. Blocks of frozen parameters are never updated, and never in DRAM as a whole.
class BlockMap {
 public:
  // `block_elems` is a multiple of the layout's states_align_elems(). `on_swap`: true for each partition whose weights are on
  // swap. Empty if all weights are in DRAM.
  BlockMap(std::shared_ptr<const protocol::Layout> layout, uint64_t block_elems,
           std::vector<bool> on_swap = {});

  uint32_t blocks() const { return static_cast<uint32_t>(cuts_.size()); }
  bool has_states(uint32_t block) const { return block < state_blocks_; }
  uint32_t state_blocks() const { return state_blocks_; }  // number of blocks with states
  uint32_t owner(uint32_t block) const { return cuts_[block].owner; }  // index in the layout
  uint64_t elems(uint32_t block) const;                                // padding included
  uint64_t states_elems(uint32_t block) const { return has_states(block) ? elems(block) : 0; }
  uint64_t bytes(uint32_t block) const;  // bytes of all planes, each rounded up to pages
  uint64_t full_block_bytes() const;     // bytes of the largest block
  bool has_weights(uint32_t block) const { return has_weights_[block]; }
  uint64_t weights_plane_offset(uint32_t block) const {
    return has_states(block) ? BytesOf(elems(block)) : 0;
  }
  bool has_weights_on_swap() const { return !on_swap_.empty(); }
  const std::vector<bool>& on_swap() const { return on_swap_; }  // by partition, or empty
  bool is_on_swap(uint32_t partition) const { return !on_swap_.empty() && on_swap_[partition]; }

  // Returns the runs of a block in ascending order: one run for each box in the block. If the format rounds each element by its
  // place in the parameter, a box is also cut at the borders of its own runs. The list is allocated from `memory`.
  std::pmr::vector<BlockRun> Runs(
      uint32_t block, std::pmr::memory_resource* memory = std::pmr::get_default_resource()) const;

  // Returns the partitions with elements in a block, ascending. Padding does not count.
  std::vector<uint32_t> Partitions(uint32_t block) const;

  // Returns the places of elements [first, first + elems) of a trainable parameter, in order. The places are those of replica
  // 0, or of all replicas in the layout if the layout is a part.
  std::pmr::vector<ElementRun> Locate(uint32_t param, uint64_t first, uint64_t elems) const;

  // Returns the places of elements [begin, end) of a partition, in order, including frozen parameters. The field `param_elem`
  // of the results has no meaning.
  std::pmr::vector<ElementRun> LocateInPartition(
      uint32_t partition, uint64_t begin, uint64_t end,
      std::pmr::memory_resource* memory = std::pmr::get_default_resource()) const;

  // Returns the bytes of all blocks' states. Needs no BlockMap, because admission calls this function before it accepts the
  // layout.
  static uint64_t TotalBytes(const protocol::Layout& layout, uint64_t block_elems);

  // Returns the bytes of frozen parameters' weights that are on swap. `on_swap` is by partition.
  static uint64_t FrozenBytes(const protocol::Layout& layout, const std::vector<bool>& on_swap);

  // Returns the largest number of elements, a multiple of states_align_elems(), that fits into a block of `bytes`, or 0 if no
  // such number fits. `has_weights`: the block has a plane of weights.
  static uint64_t ElemsWithin(const protocol::Layout& layout, uint64_t bytes, bool has_weights);

 private:
  struct Cut {
    uint32_t owner = 0;  // index in the layout
    uint64_t elem = 0;   // first element of the block in the owner's sequence
    uint64_t elems = 0;
  };
  // Elements that are cut into blocks of one kind: the states of an owner, or the owner's frozen weights on swap.
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
  std::vector<std::vector<uint32_t>> param_boxes_;  // by parameter: boxes that Locate() searches
  std::vector<uint32_t> owner_of_partition_;        // index of the owner in the layout
};

}  // namespace forebay::daemon
