// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/update/gathered_blocks.h"

#include <algorithm>

#include "protocol/os/check.h"

namespace forebay::daemon {

GatheredBlocks::GatheredBlocks(const protocol::Layout& layout, const BlockMap& map,
                               const Blocks& blocks, const UpdateOrder& order,
                               std::pmr::memory_resource* memory)
    : map_(map),
      blocks_(blocks),
      order_(order),
      memory_(memory),
      places_(map.blocks(), Place::kNone),
      elems_(map.blocks(), 0),
      summed_(map.blocks(), 0),
      waiting_(memory),
      readers_(memory),
      partition_readers_(layout.partitions().size(), 0) {
  for (uint32_t block = 0; block < map_.state_blocks(); ++block) {
    uint64_t on_swap = 0;
    for (const BlockRun& run : map_.Runs(block)) {
      elems_[block] += run.elems;
      if (map_.is_on_swap(run.partition)) on_swap += run.elems;
    }
    if (!map_.has_weights(block)) {
      places_[block] = Place::kSlot;
    } else if (on_swap == elems_[block]) {
      places_[block] = Place::kBehindStates;
    }
  }
}

std::vector<uint32_t> GatheredBlocks::CountSums(uint32_t partition, uint64_t begin, uint64_t end,
                                                bool is_last) {
  std::vector<uint32_t> stale;
  for (const ElementRun& run : map_.LocateInPartition(partition, begin, end, memory_)) {
    if (!map_.has_states(run.block)) continue;
    uint64_t& summed = summed_[run.block];
    if (is_last) {
      summed += run.elems;
      FOREBAY_CHECK(summed <= elems_[run.block]);
      if (summed == elems_[run.block]) waiting_.insert(order_.position(run.block));
      continue;
    }
    FOREBAY_CHECK(summed >= run.elems);
    summed -= run.elems;
    waiting_.erase(order_.position(run.block));
    if (blocks_.is_early(run.block)) stale.push_back(run.block);
  }
  stale.erase(std::unique(stale.begin(), stale.end()), stale.end());
  return stale;
}

void GatheredBlocks::ForgetSums() {
  std::ranges::fill(summed_, 0);
  waiting_.clear();
}

void GatheredBlocks::Sort() {
  waiting_.clear();
  for (uint32_t block = 0; block < map_.blocks(); ++block) {
    const bool waits =
        elems_[block] > 0 && summed_[block] == elems_[block] && !blocks_.is_early(block);
    if (waits) waiting_.insert(order_.position(block));
  }
}

void GatheredBlocks::OnBegun(uint32_t block) {
  FOREBAY_CHECK(waiting_.erase(order_.position(block)) == 1);
  const auto [entry, is_new] = readers_.emplace(block, RangesOf(block));
  FOREBAY_CHECK(is_new);
  for (const Range& range : entry->second) ++partition_readers_[range.partition];
}

void GatheredBlocks::OnUpdated(uint32_t block) {
  const auto node = readers_.extract(block);
  if (node.empty()) return;
  for (const Range& range : node.mapped()) --partition_readers_[range.partition];
}

void GatheredBlocks::OnEnded(uint32_t block) {
  if (summed_[block] == elems_[block]) waiting_.insert(order_.position(block));
}

// Returns the ranges of partitions in a block. Elements of one partition are contiguous in a block.
std::pmr::vector<GatheredBlocks::Range> GatheredBlocks::RangesOf(uint32_t block) const {
  std::pmr::vector<Range> ranges(memory_);
  for (const BlockRun& run : map_.Runs(block, memory_)) {
    const uint64_t end = run.partition_elem + run.elems;
    if (!ranges.empty() && ranges.back().partition == run.partition) {
      ranges.back().begin = std::min(ranges.back().begin, run.partition_elem);
      ranges.back().end = std::max(ranges.back().end, end);
    } else {
      ranges.push_back({.partition = run.partition, .begin = run.partition_elem, .end = end});
    }
  }
  return ranges;
}

bool GatheredBlocks::ReadsSums(uint32_t partition, uint64_t begin, uint64_t end) const {
  if (partition_readers_[partition] == 0) return false;
  const Range asked{.partition = partition, .begin = begin, .end = end};
  return std::ranges::any_of(readers_, [&](const auto& entry) {
    return std::ranges::any_of(entry.second,
                               [&](const Range& range) { return range.Overlaps(asked); });
  });
}

}  // namespace forebay::daemon
