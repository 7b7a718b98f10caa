#include "client/internal/grad_slots.h"

#include <algorithm>
#include <array>

#include "protocol/layout.h"
#include "protocol/os/check.h"
#include "protocol/units.h"

namespace forebay::client::internal {
namespace {

// Calls `visit(begin, end)` for each free run until it returns true.
template <typename Ranges, typename Visit>
void ForEachGap(const Ranges& ranges, uint64_t capacity_bytes, Visit visit) {
  uint64_t begin = 0;
  for (const auto& [offset, range] : ranges) {
    if (offset > begin && visit(begin, offset)) return;
    begin = offset + range.size_bytes;
  }
  if (capacity_bytes > begin) visit(begin, capacity_bytes);
}

}  // namespace

std::optional<uint64_t> GradSlots::AllocateOpen(uint64_t size_bytes) {
  size_bytes = protocol::RoundUp(size_bytes, protocol::kGradAlignBytes);
  const std::optional<uint64_t> offset = FindOpen(ranges_, size_bytes);
  if (offset.has_value()) ranges_[*offset] = {.size_bytes = size_bytes, .use = Use::kOpen};
  return offset;
}

bool GradSlots::FitsWithoutBusy(uint64_t size_bytes) const {
  return FindOpen(OpenRanges(), protocol::RoundUp(size_bytes, protocol::kGradAlignBytes))
      .has_value();
}

std::optional<uint64_t> GradSlots::AllocateBusy(uint64_t size_bytes) {
  size_bytes = protocol::RoundUp(size_bytes, protocol::kGradAlignBytes);
  FOREBAY_CHECK(size_bytes > 0 && size_bytes <= options_.largest_bytes);
  std::optional<uint64_t> found;
  ForEachGap(ranges_, options_.capacity_bytes, [&](uint64_t begin, uint64_t end) {
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

std::optional<uint64_t> GradSlots::FindOpen(const Ranges& ranges, uint64_t size_bytes) const {
  FOREBAY_CHECK(size_bytes > 0 && size_bytes <= options_.largest_bytes);
  std::optional<uint64_t> found;
  ForEachGap(ranges, options_.capacity_bytes, [&](uint64_t begin, uint64_t end) {
    if (end - begin < size_bytes) return false;
    for (const uint64_t offset : std::array{begin, end - size_bytes}) {
      if (!found.has_value() && LeavesRoom(offset, size_bytes)) found = offset;
    }
    return found.has_value();
  });
  return found;
}

bool GradSlots::LeavesRoom(uint64_t offset_bytes, uint64_t size_bytes) const {
  Ranges open = OpenRanges();
  open[offset_bytes] = {.size_bytes = size_bytes, .use = Use::kOpen};
  bool leaves_room = false;
  ForEachGap(open, options_.capacity_bytes, [&](uint64_t begin, uint64_t end) {
    leaves_room = end - begin >= options_.largest_bytes;
    return leaves_room;
  });
  return leaves_room;
}

GradSlots::Ranges GradSlots::OpenRanges() const {
  Ranges open;
  for (const auto& [offset, range] : ranges_) {
    if (range.use == Use::kOpen) open.emplace(offset, range);
  }
  return open;
}

}  // namespace forebay::client::internal
