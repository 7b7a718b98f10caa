// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/blocks/block_map.h"

#include <algorithm>
#include <utility>

#include "protocol/os/check.h"
#include "protocol/units.h"

namespace forebay::daemon {
namespace {

using protocol::Layout;
using protocol::Plane;

std::span<const Plane> PlanesOf(const Layout& layout) {
  const protocol::LayoutSpec& spec = layout.spec();
  return protocol::StatePlanes(spec.optimizer, spec.format, spec.dtype);
}

uint64_t PagesOf(const Plane& plane, uint64_t elems) {
  return protocol::RoundUp(PlaneBytes(plane, elems), protocol::kPageBytes);
}

uint64_t BlockBytes(std::span<const Plane> planes, uint64_t elems) {
  uint64_t bytes = 0;
  for (const Plane& plane : planes) bytes += PagesOf(plane, elems);
  return bytes;
}

}  // namespace

BlockMap::BlockMap(std::shared_ptr<const Layout> layout, uint64_t block_elems,
                   std::vector<bool> on_swap)
    : layout_(std::move(layout)),
      planes_(PlanesOf(*layout_)),
      block_elems_(block_elems),
      on_swap_(std::move(on_swap)),
      states_(layout_->owners().size(), {.block_elems = block_elems}),
      // The bytes of a full block are whole pages, so the plane of weights fills a frozen block completely.
      frozen_(layout_->owners().size(),
              {.block_elems = full_block_bytes() / protocol::SizeBytes(layout_->spec().dtype)}),
      param_boxes_(layout_->params().size()) {
  FOREBAY_CHECK(block_elems_ > 0 && block_elems_ % layout_->states_align_elems() == 0);
  FindBoxes();
  CutBlocks(states_);
  state_blocks_ = blocks();
  CutBlocks(frozen_);
  has_weights_.assign(cuts_.size(), false);
  for (const Sequence& sequence : states_) SetHasWeights(sequence);
  for (const Sequence& sequence : frozen_) SetHasWeights(sequence);
}

void BlockMap::SetHasWeights(const Sequence& sequence) {
  for (const uint32_t box : sequence.boxes) {
    const protocol::BoxPlace& place = layout_->boxes()[box];
    if (!is_on_swap(place.partition)) continue;
    const uint64_t last = (sequence_elems_[box] + place.box.elems() - 1) / sequence.block_elems;
    for (uint64_t i = sequence_elems_[box] / sequence.block_elems; i <= last; ++i) {
      has_weights_[sequence.blocks[i]] = true;
    }
  }
}

void BlockMap::FindBoxes() {
  const auto owners = layout_->owners();
  for (const protocol::PartitionPlace& partition : layout_->partitions()) {
    const auto owner = std::find_if(owners.begin(), owners.end(), [&](const auto& place) {
      return place.owner == partition.owner;
    });
    owner_of_partition_.push_back(static_cast<uint32_t>(owner - owners.begin()));
  }
  for (size_t owner = 0; owner < owners.size(); ++owner) {
    states_[owner].elems = owners[owner].states_elems;
  }
  const auto boxes = layout_->boxes();
  for (uint32_t i = 0; i < boxes.size(); ++i) {
    const protocol::BoxPlace& place = boxes[i];
    const uint32_t owner = owner_of_partition_[place.partition];
    sequence_elems_.push_back(place.states_elem);
    if (layout_->params()[place.box.param].trainable) {
      states_[owner].boxes.push_back(i);
      if (layout_->partitions()[place.partition].replica == 0 || layout_->spec().is_part) {
        param_boxes_[place.box.param].push_back(i);
      }
    } else if (is_on_swap(place.partition)) {
      Sequence& frozen = frozen_[owner];
      sequence_elems_.back() = frozen.elems;
      frozen.boxes.push_back(i);
      frozen.elems =
          protocol::RoundUp(frozen.elems + place.box.elems(), layout_->states_align_elems());
    }
  }
}

void BlockMap::CutBlocks(std::vector<Sequence>& sequences) {
  bool cut_one = true;
  for (uint64_t i = 0; cut_one; ++i) {
    cut_one = false;
    for (uint32_t owner = 0; owner < sequences.size(); ++owner) {
      Sequence& sequence = sequences[owner];
      const uint64_t begin = i * sequence.block_elems;
      if (begin >= sequence.elems) continue;
      sequence.blocks.push_back(blocks());
      cuts_.push_back({.owner = owner,
                       .elem = begin,
                       .elems = std::min(sequence.block_elems, sequence.elems - begin)});
      cut_one = true;
    }
  }
}

const BlockMap::Sequence& BlockMap::SequenceOf(uint32_t block) const {
  return (has_states(block) ? states_ : frozen_)[cuts_[block].owner];
}

uint64_t BlockMap::elems(uint32_t block) const { return cuts_[block].elems; }

uint64_t BlockMap::bytes(uint32_t block) const {
  return weights_plane_offset(block) + (has_weights_[block] ? WeightsBytes(elems(block)) : 0);
}

uint64_t BlockMap::full_block_bytes() const {
  return BytesOf(block_elems_) + (on_swap_.empty() ? 0 : WeightsBytes(block_elems_));
}

uint64_t BlockMap::WeightsBytes(uint64_t elems) const {
  return protocol::RoundUp(elems * protocol::SizeBytes(layout_->spec().dtype),
                           protocol::kPageBytes);
}

uint64_t BlockMap::BytesOf(uint64_t elems) const { return BlockBytes(planes_, elems); }

// Adds the runs of a box's elements [begin, end), which are counted from the start of the box.
void BlockMap::AddRuns(const protocol::BoxPlace& place, uint64_t begin, uint64_t end,
                       uint64_t block_elem, std::pmr::vector<BlockRun>& runs) const {
  const protocol::BoxSpec& box = place.box;
  const bool cuts_runs = box.runs > 1 && layout_->spec().format == protocol::Format::kBf16;
  for (uint64_t elem = begin; elem < end;) {
    const uint64_t in_run = cuts_runs ? elem % box.run_elems : elem;
    const uint64_t stop = cuts_runs ? std::min(end, elem - in_run + box.run_elems) : end;
    const uint64_t run_begin = cuts_runs ? elem / box.run_elems * box.stride_elems : 0;
    runs.push_back({.partition = place.partition,
                    .param = box.param,
                    .param_elem = box.first_elem + run_begin + in_run,
                    .partition_elem = place.partition_elem + elem,
                    .block_elem = block_elem + elem - begin,
                    .elems = stop - elem});
    elem = stop;
  }
}

std::pmr::vector<BlockRun> BlockMap::Runs(uint32_t block, std::pmr::memory_resource* memory) const {
  const uint64_t begin = cuts_[block].elem;
  const uint64_t end = begin + elems(block);
  const std::vector<uint32_t>& boxes = SequenceOf(block).boxes;
  auto box = std::upper_bound(
      boxes.begin(), boxes.end(), begin,
      [&](uint64_t elem, uint32_t index) { return elem < sequence_elems_[index]; });
  if (box != boxes.begin()) --box;
  std::pmr::vector<BlockRun> runs(memory);
  for (; box != boxes.end() && sequence_elems_[*box] < end; ++box) {
    const protocol::BoxPlace& place = layout_->boxes()[*box];
    const uint64_t box_begin = sequence_elems_[*box];
    const uint64_t from = std::max(begin, box_begin) - box_begin;
    const uint64_t to = std::min(end - box_begin, place.box.elems());
    if (from < to) AddRuns(place, from, to, box_begin + from - begin, runs);
  }
  return runs;
}

std::vector<uint32_t> BlockMap::Partitions(uint32_t block) const {
  std::vector<uint32_t> partitions;
  for (const BlockRun& run : Runs(block)) {
    if (partitions.empty() || partitions.back() != run.partition) {
      partitions.push_back(run.partition);
    }
  }
  return partitions;
}

// Adds `elems` elements of a box from `box_elem` on, which are consecutive in the parameter.
void BlockMap::AddElements(uint32_t box, uint64_t box_elem, uint64_t param_elem, uint64_t elems,
                           std::pmr::vector<ElementRun>& runs) const {
  const protocol::BoxPlace& place = layout_->boxes()[box];
  const uint32_t owner = owner_of_partition_[place.partition];
  const bool has_states = layout_->params()[place.box.param].trainable;
  const Sequence& sequence = (has_states ? states_ : frozen_)[owner];
  for (uint64_t done = 0; done < elems;) {
    const uint64_t elem = sequence_elems_[box] + box_elem + done;
    const uint64_t block_elem = elem % sequence.block_elems;
    const uint64_t count = std::min(elems - done, sequence.block_elems - block_elem);
    runs.push_back({.block = sequence.blocks[elem / sequence.block_elems],
                    .block_elem = block_elem,
                    .partition = place.partition,
                    .partition_elem = place.partition_elem + box_elem + done,
                    .param_elem = param_elem + done,
                    .elems = count});
    done += count;
  }
}

std::pmr::vector<ElementRun> BlockMap::Locate(uint32_t param, uint64_t first,
                                              uint64_t elems) const {
  std::pmr::vector<ElementRun> runs;
  const uint64_t end = first + elems;
  for (const uint32_t index : param_boxes_[param]) {
    const protocol::BoxSpec& box = layout_->boxes()[index].box;
    uint64_t run = 0;
    if (first >= box.first_elem + box.run_elems) {
      run = (first - box.first_elem - box.run_elems) / box.stride_elems + 1;
    }
    for (; run < box.runs && box.first_elem + run * box.stride_elems < end; ++run) {
      const uint64_t run_begin = box.first_elem + run * box.stride_elems;
      const uint64_t from = std::max(first, run_begin);
      const uint64_t to = std::min(end, run_begin + box.run_elems);
      AddElements(index, run * box.run_elems + from - run_begin, from, to - from, runs);
    }
  }
  std::sort(runs.begin(), runs.end(),
            [](const ElementRun& a, const ElementRun& b) { return a.param_elem < b.param_elem; });
  return runs;
}

std::pmr::vector<ElementRun> BlockMap::LocateInPartition(uint32_t partition, uint64_t begin,
                                                         uint64_t end,
                                                         std::pmr::memory_resource* memory) const {
  std::pmr::vector<ElementRun> runs(memory);
  const protocol::PartitionPlace& of = layout_->partitions()[partition];
  for (uint32_t box = of.box_begin; box < of.box_end; ++box) {
    const protocol::BoxPlace& place = layout_->boxes()[box];
    const uint64_t from = std::max(begin, place.partition_elem);
    const uint64_t to = std::min(end, place.partition_elem + place.box.elems());
    if (from >= to) continue;
    if (layout_->params()[place.box.param].trainable || is_on_swap(partition)) {
      AddElements(box, from - place.partition_elem, 0, to - from, runs);
    } else {
      runs.push_back({.block = ElementRun::kNoBlock,
                      .partition = partition,
                      .partition_elem = from,
                      .elems = to - from});
    }
  }
  return runs;
}

uint64_t BlockMap::FrozenBytes(const protocol::Layout& layout, const std::vector<bool>& on_swap) {
  uint64_t bytes = 0;
  for (const protocol::BoxPlace& place : layout.boxes()) {
    if (layout.params()[place.box.param].trainable || !on_swap[place.partition]) continue;
    bytes += place.box.elems() * protocol::SizeBytes(layout.spec().dtype);
  }
  return bytes;
}

uint64_t BlockMap::ElemsWithin(const Layout& layout, uint64_t bytes, bool has_weights) {
  const std::span<const Plane> planes = PlanesOf(layout);
  const uint64_t align = layout.states_align_elems();
  const uint64_t width = has_weights ? protocol::SizeBytes(layout.spec().dtype) : 0;
  uint64_t align_bytes = align * width;
  for (const Plane& plane : planes) align_bytes += protocol::PlaneBytes(plane, align);
  const auto block_bytes = [&](uint64_t elems) {
    return BlockBytes(planes, elems) + protocol::RoundUp(elems * width, protocol::kPageBytes);
  };
  uint64_t elems = bytes / align_bytes * align;
  while (elems > 0 && block_bytes(elems) > bytes) elems -= align;
  return elems;
}

uint64_t BlockMap::TotalBytes(const Layout& layout, uint64_t block_elems) {
  const auto planes = PlanesOf(layout);
  uint64_t bytes = 0;
  for (const protocol::OwnerPlace& owner : layout.owners()) {
    bytes += owner.states_elems / block_elems * BlockBytes(planes, block_elems) +
             BlockBytes(planes, owner.states_elems % block_elems);
  }
  return bytes;
}

}  // namespace forebay::daemon
