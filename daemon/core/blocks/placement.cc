// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/blocks/placement.h"

#include "daemon/core/base/limits.h"
#include "daemon/core/blocks/durable_content.h"
#include "protocol/os/check.h"
#include "protocol/units.h"

namespace forebay::daemon {

namespace {

std::vector<bool> LowestThatFit(const BlockMap& map, uint64_t dram_bytes) {
  std::vector<bool> resident(map.blocks(), false);
  for (uint32_t block = 0; block < map.state_blocks(); ++block) {
    if (map.bytes(block) > dram_bytes) break;
    dram_bytes -= map.bytes(block);
    resident[block] = true;
  }
  return resident;
}

}  // namespace

Placement::Placement(const protocol::Layout& layout, const BlockMap& map, uint64_t dram_bytes,
                     DurableSlots durable)
    : Placement(layout, map, LowestThatFit(map, dram_bytes), durable) {}

Placement::Placement(const protocol::Layout& layout, const BlockMap& map,
                     const std::vector<bool>& resident, DurableSlots durable)
    : durable_(durable), blocks_(map.blocks()), state_blocks_(map.state_blocks()) {
  FOREBAY_CHECK(resident.size() == blocks_.size());
  uint64_t offset_bytes = 0;
  for (uint32_t block = 0; block < state_blocks_; ++block) {
    const StatePart part = {.offset_bytes = offset_bytes, .bytes = map.bytes(block)};
    blocks_[block].state = part;
    offset_bytes += part.bytes;
    if (!resident[block]) continue;
    blocks_[block].tier = Tier::kDram;
    state_bytes_ += part.bytes;
    ++resident_blocks_;
  }
  const std::vector<uint64_t> weights_offsets = WeightsOffsets(layout, map.on_swap());
  for (uint32_t index = 0; index < layout.partitions().size(); ++index) {
    PartitionLocation& location = partitions_.emplace_back();
    location.bytes = layout.partition_bytes(index);
    if (map.is_on_swap(index)) {
      location.tier = Tier::kNvme;
      continue;
    }
    location.weights_offset_bytes = weights_offsets[index];
    weights_bytes_ += protocol::RoundUp(location.bytes, protocol::kPageBytes);
  }
}

uint32_t Placement::slots_needed() const {
  const uint32_t frozen = frozen_blocks();
  if (durable_.per_block > 0) {
    return durable_.per_block * state_blocks_ + kSwapSlotsPerWeightsPart * durable_.weights_parts +
           frozen + durable_.spare + kSwapSlotsPerBlock * static_cast<uint32_t>(evictions_.size());
  }
  const uint32_t with_states =
      state_blocks_ - resident_blocks_ + static_cast<uint32_t>(evictions_.size());
  return kSwapSlotsPerBlock * with_states + frozen + (frozen > 0 ? 1 : 0);
}

uint64_t Placement::arena_bytes() const {
  if (state_blocks_ == 0) return 0;
  const StatePart& last = blocks_[state_blocks_ - 1].state;
  return last.offset_bytes + last.bytes;
}

std::vector<StatePart> Placement::ResidentParts() const {
  std::vector<StatePart> parts;
  for (const BlockLocation& block : blocks_) {
    if (block.tier != Tier::kDram) continue;
    const StatePart& part = block.state;
    if (!parts.empty() && parts.back().offset_bytes + parts.back().bytes == part.offset_bytes) {
      parts.back().bytes += part.bytes;
    } else {
      parts.push_back(part);
    }
  }
  return parts;
}

void Placement::Mark(uint32_t block) {
  BlockLocation& of = blocks_.at(block);
  if (moving_ == block) {
    FOREBAY_CHECK(of.move == BlockMove::kPromote);
    of.move = BlockMove::kPromoteAndEvict;
    leaving_bytes_ += of.state.bytes;
    return;
  }
  FOREBAY_CHECK(of.move == BlockMove::kNone);
  if (of.tier == Tier::kDram) {
    of.move = BlockMove::kEvict;
    leaving_bytes_ += of.state.bytes;
    evictions_.insert(block);
  } else {
    of.move = BlockMove::kPromote;
    state_bytes_ += of.state.bytes;
    promotions_.insert(block);
  }
}

void Placement::Unmark(uint32_t block) {
  BlockLocation& of = blocks_.at(block);
  FOREBAY_CHECK(of.move != BlockMove::kNone && moving_ != block);
  if (of.move == BlockMove::kEvict) {
    leaving_bytes_ -= of.state.bytes;
    evictions_.erase(block);
  } else {
    state_bytes_ -= of.state.bytes;
    if (of.move == BlockMove::kPromoteAndEvict) leaving_bytes_ -= of.state.bytes;
    promotions_.erase(block);
  }
  of.move = BlockMove::kNone;
}

std::optional<uint32_t> Placement::NextMarked() const {
  if (!evictions_.empty()) return *evictions_.rbegin();
  if (!promotions_.empty()) return *promotions_.begin();
  return std::nullopt;
}

void Placement::BeginMove(uint32_t block) {
  FOREBAY_CHECK(!moving_ && blocks_.at(block).move != BlockMove::kNone);
  moving_ = block;
}

void Placement::CancelMove() { Unmark(*std::exchange(moving_, std::nullopt)); }

void Placement::FinishMove() {
  const uint32_t block = *moving_;
  BlockLocation& of = blocks_.at(block);
  const BlockMove move = of.move;
  CancelMove();
  of.tier = move == BlockMove::kEvict ? Tier::kNvme : Tier::kDram;
  if (move == BlockMove::kEvict) {
    state_bytes_ -= of.state.bytes;
    --resident_blocks_;
  } else {
    state_bytes_ += of.state.bytes;
    ++resident_blocks_;
  }
  if (move == BlockMove::kPromoteAndEvict) Mark(block);
}

}  // namespace forebay::daemon
