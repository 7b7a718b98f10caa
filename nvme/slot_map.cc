#include "nvme/slot_map.h"

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
    if (path.free_bytes > 0) path.free.emplace(space.begin_bytes, path.free_bytes);
    paths_.push_back(std::move(path));
  }
}

uint64_t SlotMap::SlotsFree(uint64_t slot_bytes) const {
  uint64_t slots = 0;
  for (const Path& path : paths_) {
    for (const auto& [offset, size] : path.free) slots += size / slot_bytes;
  }
  return slots;
}

std::optional<uint64_t> SlotMap::FirstFit(const Path& path, uint64_t size_bytes) {
  for (const auto& [offset, size] : path.free) {
    if (size >= size_bytes) return offset;
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
      // The path with the fewest of these slots for its weight.
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
  auto range = path.free.upper_bound(slot.offset_bytes);
  if (range == path.free.begin()) return false;
  --range;
  const uint64_t begin = range->first;
  const uint64_t end = begin + range->second;
  if (slot.offset_bytes >= end || slot.size_bytes > end - slot.offset_bytes) return false;
  path.free.erase(range);
  const uint64_t slot_end = slot.offset_bytes + slot.size_bytes;
  if (slot.offset_bytes > begin) path.free[begin] = slot.offset_bytes - begin;
  if (end > slot_end) path.free[slot_end] = end - slot_end;
  path.free_bytes -= slot.size_bytes;
  return true;
}

void SlotMap::Free(std::span<const Slot> slots) {
  for (const Slot& slot : slots) {
    Path& path = paths_.at(slot.path);
    uint64_t offset = slot.offset_bytes;
    uint64_t size = slot.size_bytes;
    path.free_bytes += size;
    auto next = path.free.lower_bound(offset);
    FOREBAY_CHECK(next == path.free.end() || offset + size <= next->first);
    if (next != path.free.end() && offset + size == next->first) {
      size += next->second;
      next = path.free.erase(next);
    }
    if (next != path.free.begin()) {
      const auto before = std::prev(next);
      FOREBAY_CHECK(before->first + before->second <= offset);
      if (before->first + before->second == offset) {
        before->second += size;
        continue;
      }
    }
    path.free[offset] = size;
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
