// SPDX-License-Identifier: Apache-2.0
#include "nvme/slot_map.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <optional>
#include <span>
#include <vector>

#include "protocol/os/check.h"

namespace forebay::nvme {

SlotMap::SlotMap(std::span<const PathSpace> paths) {
  for (const PathSpace& space : paths) {
    FOREBAY_CHECK(space.begin_bytes <= space.end_bytes && space.weight > 0);
    Path path{.space = space, .free = {}, .free_bytes = space.end_bytes - space.begin_bytes};
    if (path.free_bytes > 0) path.free.push_back({space.begin_bytes, path.free_bytes});
    paths_.push_back(std::move(path));
  }
}

uint64_t SlotMap::SlotsFree(uint64_t slot_bytes) const {
  uint64_t slots = 0;
  for (const Path& path : paths_) {
    for (const FreeRange& range : path.free) slots += range.size_bytes / slot_bytes;
  }
  return slots;
}

std::optional<uint64_t> SlotMap::FirstFit(const Path& path, uint64_t size_bytes) {
  for (const FreeRange& range : path.free) {
    if (range.size_bytes >= size_bytes) return range.offset_bytes;
  }
  return std::nullopt;
}

std::optional<std::vector<Slot>> SlotMap::Allocate(uint64_t count, uint64_t slot_bytes) {
  if (SlotsFree(slot_bytes) < count) return std::nullopt;
  std::vector<Slot> slots;
  std::vector<uint64_t> given(paths_.size(), 0);
  while (slots.size() < count) {
    std::optional<Slot> best;
    for (uint32_t i = 0; i < paths_.size(); ++i) {
      // Takes the path with the fewest of these slots in proportion to its weight.
      if (best && (given[i] + 1) * paths_[best->path].space.weight >=
                      (given[best->path] + 1) * paths_[i].space.weight) {
        continue;
      }
      const std::optional<uint64_t> offset = FirstFit(paths_[i], slot_bytes);
      if (offset) best = Slot{.path = i, .offset_bytes = *offset, .size_bytes = slot_bytes};
    }
    FOREBAY_CHECK(best.has_value() && Reserve(*best));
    ++given[best->path];
    slots.push_back(*best);
  }
  return slots;
}

std::optional<Slot> SlotMap::AllocateOn(uint32_t path, uint64_t slot_bytes) {
  const std::optional<uint64_t> offset = FirstFit(paths_.at(path), slot_bytes);
  if (!offset) return std::nullopt;
  const Slot slot = {.path = path, .offset_bytes = *offset, .size_bytes = slot_bytes};
  FOREBAY_CHECK(Reserve(slot));
  return slot;
}

void SlotMap::SetWeights(std::span<const uint32_t> weights) {
  FOREBAY_CHECK(weights.size() == paths_.size());
  for (size_t i = 0; i < paths_.size(); ++i) {
    FOREBAY_CHECK(weights[i] > 0);
    paths_[i].space.weight = weights[i];
  }
}

bool SlotMap::Reserve(const Slot& slot) {
  if (slot.path >= paths_.size() || slot.size_bytes == 0) return false;
  Path& path = paths_[slot.path];
  auto range = std::ranges::upper_bound(path.free, slot.offset_bytes, {}, &FreeRange::offset_bytes);
  if (range == path.free.begin()) return false;
  --range;
  const uint64_t end = range->end_bytes();
  if (slot.offset_bytes >= end || slot.size_bytes > end - slot.offset_bytes) return false;
  const FreeRange behind = {.offset_bytes = slot.offset_bytes + slot.size_bytes,
                            .size_bytes = end - slot.offset_bytes - slot.size_bytes};
  range->size_bytes = slot.offset_bytes - range->offset_bytes;
  if (range->size_bytes == 0 && behind.size_bytes == 0) {
    path.free.erase(range);
  } else if (range->size_bytes == 0) {
    *range = behind;
  } else if (behind.size_bytes > 0) {
    path.free.insert(range + 1, behind);
  }
  path.free_bytes -= slot.size_bytes;
  return true;
}

void SlotMap::Free(std::span<const Slot> slots) {
  for (const Slot& slot : slots) {
    Path& path = paths_.at(slot.path);
    FreeRange freed = {.offset_bytes = slot.offset_bytes, .size_bytes = slot.size_bytes};
    path.free_bytes += freed.size_bytes;
    auto next =
        std::ranges::lower_bound(path.free, freed.offset_bytes, {}, &FreeRange::offset_bytes);
    FOREBAY_CHECK(next == path.free.end() || freed.end_bytes() <= next->offset_bytes);
    if (next != path.free.end() && freed.end_bytes() == next->offset_bytes) {
      freed.size_bytes += next->size_bytes;
      next = path.free.erase(next);
    }
    if (next != path.free.begin()) {
      FreeRange& before = *std::prev(next);
      FOREBAY_CHECK(before.end_bytes() <= freed.offset_bytes);
      if (before.end_bytes() == freed.offset_bytes) {
        before.size_bytes += freed.size_bytes;
        continue;
      }
    }
    path.free.insert(next, freed);
  }
}

uint64_t SlotMap::capacity_bytes() const {
  uint64_t bytes = 0;
  for (const Path& path : paths_) bytes += path.space.end_bytes - path.space.begin_bytes;
  return bytes;
}

uint64_t SlotMap::free_bytes() const {
  uint64_t bytes = 0;
  for (const Path& path : paths_) bytes += path.free_bytes;
  return bytes;
}

uint64_t SlotMap::used_bytes(uint32_t path) const {
  const Path& of = paths_.at(path);
  return of.space.end_bytes - of.space.begin_bytes - of.free_bytes;
}

}  // namespace forebay::nvme
