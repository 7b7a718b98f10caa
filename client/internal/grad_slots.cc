// SPDX-License-Identifier: Apache-2.0
#include "client/internal/grad_slots.h"

#include <algorithm>
#include <array>

#include "protocol/layout.h"
#include "protocol/os/check.h"
#include "protocol/units.h"

namespace forebay::client::internal {

// Calls `visit(begin, end)` for each run between those ranges until it returns true.
template <typename Visit>
void GradSlots::ForEachGap(Among among, Visit visit) const {
  uint64_t begin = 0;
  for (const auto& [offset, range] : ranges_) {
    if (among == Among::kOpen && range.use != Use::kOpen) continue;
    if (offset > begin && visit(begin, offset)) return;
    begin = offset + range.size_bytes;
  }
  if (options_.capacity_bytes > begin) visit(begin, options_.capacity_bytes);
}

std::optional<uint64_t> GradSlots::AllocateOpen(uint64_t size_bytes) {
  size_bytes = protocol::RoundUp(size_bytes, protocol::kGradAlignBytes);
  const std::optional<uint64_t> offset = FindOpen(Among::kAll, size_bytes);
  if (offset.has_value()) ranges_[*offset] = {.size_bytes = size_bytes, .use = Use::kOpen};
  return offset;
}

bool GradSlots::FitsWithoutBusy(uint64_t size_bytes) const {
  return FindOpen(Among::kOpen, protocol::RoundUp(size_bytes, protocol::kGradAlignBytes))
      .has_value();
}

std::optional<uint64_t> GradSlots::AllocateBusy(uint64_t size_bytes) {
  size_bytes = protocol::RoundUp(size_bytes, protocol::kGradAlignBytes);
  FOREBAY_CHECK(size_bytes > 0 && size_bytes <= options_.largest_bytes);
  std::optional<uint64_t> found;
  ForEachGap(Among::kAll, [&](uint64_t begin, uint64_t end) {
    if (end - begin >= size_bytes) found = begin;
    return found.has_value();
  });
  if (found.has_value()) ranges_[*found] = {.size_bytes = size_bytes, .use = Use::kBusy};
  return found;
}

void GradSlots::Deliver(uint64_t offset_bytes) {
  const auto range = ranges_.find(offset_bytes);
  FOREBAY_CHECK(range != ranges_.end() && range->second.use == Use::kOpen);
  range->second.use = Use::kBusy;
}

void GradSlots::Split(uint64_t offset_bytes, uint64_t size_bytes) {
  const auto range = ranges_.find(offset_bytes);
  FOREBAY_CHECK(range != ranges_.end() && range->second.use == Use::kOpen);
  FOREBAY_CHECK(size_bytes > 0 && size_bytes < range->second.size_bytes);
  ranges_[offset_bytes + size_bytes] = {.size_bytes = range->second.size_bytes - size_bytes,
                                        .use = Use::kOpen};
  range->second.size_bytes = size_bytes;
}

void GradSlots::Free(uint64_t offset_bytes) { FOREBAY_CHECK(ranges_.erase(offset_bytes) == 1); }

std::optional<uint64_t> GradSlots::FindOpen(Among among, uint64_t size_bytes) const {
  FOREBAY_CHECK(size_bytes > 0 && size_bytes <= options_.largest_bytes);
  std::optional<uint64_t> found;
  ForEachGap(among, [&](uint64_t begin, uint64_t end) {
    if (end - begin < size_bytes) return false;
    for (const uint64_t offset : std::array{begin, end - size_bytes}) {
      if (!found.has_value() && LeavesRoom(offset, size_bytes)) found = offset;
    }
    return found.has_value();
  });
  return found;
}

// Returns whether a free run for the largest piece remains if the given range, which lies between open ranges, opens too.
bool GradSlots::LeavesRoom(uint64_t offset_bytes, uint64_t size_bytes) const {
  const uint64_t end_bytes = offset_bytes + size_bytes;
  bool leaves_room = false;
  ForEachGap(Among::kOpen, [&](uint64_t begin, uint64_t end) {
    uint64_t longest = end - begin;
    if (begin <= offset_bytes && end_bytes <= end) {
      longest = std::max(offset_bytes - begin, end - end_bytes);
    }
    leaves_room = longest >= options_.largest_bytes;
    return leaves_room;
  });
  return leaves_room;
}

}  // namespace forebay::client::internal
