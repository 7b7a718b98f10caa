// From a layout to blocks: which elements of which groups a block holds, and where an element's
// state lies.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "protocol/layout.h"

namespace forebay::daemon {

// A run of a block's elements that lies in one parameter. Padding is in none.
struct BlockRun {
  uint32_t group = 0;
  uint32_t param_group = 0;
  uint32_t param = 0;       // in the order of the layout
  uint64_t param_elem = 0;  // first element, from the start of the parameter
  uint64_t group_elem = 0;  // first element, from the start of the padded group
  uint64_t block_elem = 0;  // first element, from the start of the block
  uint64_t elems = 0;

  bool operator==(const BlockRun&) const = default;
};

// Elements of one padded group that lie side by side in one block.
struct ElementRun {
  uint32_t block = 0;
  uint64_t block_elem = 0;
  uint64_t elems = 0;

  bool operator==(const ElementRun&) const = default;
};

// The blocks of a job. A rank's partitions of all groups, end to end in the order of groups, are
// cut into blocks of `block_elems`; the last one may be short. Blocks are numbered in the order in
// which they are placed and updated: the first block of each rank, then the second of each, ...
// (first layers first).
class BlockMap {
 public:
  // `block_elems` is a multiple of kPartitionAlignElems (int8: kScaleElems).
  BlockMap(std::shared_ptr<const protocol::Layout> layout, uint64_t block_elems);

  uint32_t blocks() const { return blocks_per_rank_ * world_size_; }
  uint64_t elems(uint32_t block) const;  // padding included
  uint64_t bytes(uint32_t block) const;  // all planes, each on whole pages
  uint64_t full_block_bytes() const { return BytesOf(block_elems_); }

  // Where plane `plane` of a block starts, in bytes from the start of the block.
  uint64_t plane_offset_bytes(uint32_t block, uint32_t plane) const;

  // Runs of a block in ascending order, one for each parameter in it.
  std::vector<BlockRun> Runs(uint32_t block) const;

  // Groups with parameters (not only padding) in a block, ascending.
  std::vector<uint32_t> Groups(uint32_t block) const;

  // Where the states of elements [first, first + elems) of a padded group lie, in order.
  std::vector<ElementRun> Locate(uint32_t group, uint64_t first, uint64_t elems) const;

  // Bytes of every block without making a map: what admission reckons with before it believes a
  // layout.
  static uint64_t TotalBytes(const protocol::Layout& layout, uint64_t block_elems);
  static uint64_t Blocks(const protocol::Layout& layout, uint64_t block_elems);

  // The most elements, a multiple of kPartitionAlignElems (int8: kScaleElems), that a block of `bytes` has room for; 0
  // where there is none.
  static uint64_t ElemsWithin(const protocol::Layout& layout, uint64_t bytes);

 private:
  uint64_t BytesOf(uint64_t elems) const;

  std::shared_ptr<const protocol::Layout> layout_;
  std::span<const protocol::Plane> planes_;
  uint64_t block_elems_;
  uint32_t world_size_;
  uint32_t blocks_per_rank_;
  uint64_t rank_elems_;                 // of one rank's partitions
  std::vector<uint64_t> group_begins_;  // of each group within a rank's partitions, then the end
};

}  // namespace forebay::daemon
