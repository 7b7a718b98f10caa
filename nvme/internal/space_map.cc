#include "nvme/internal/space_map.h"

#include <algorithm>
#include <iterator>

#include "protocol/os/check.h"

namespace forebay::nvme::internal {

SpaceMap::SpaceMap(uint64_t begin_bytes, uint64_t end_bytes) {
  if (end_bytes > begin_bytes) Release(begin_bytes, end_bytes - begin_bytes);
}

std::optional<uint64_t> SpaceMap::Allocate(uint64_t size_bytes) {
  for (const auto& [offset, size] : free_) {
    if (size < size_bytes) continue;
    const uint64_t taken = offset;
    AllocateAt(taken, size_bytes);
    return taken;
  }
  return std::nullopt;
}

bool SpaceMap::AllocateAt(uint64_t offset_bytes, uint64_t size_bytes) {
  auto range = free_.upper_bound(offset_bytes);
  if (range == free_.begin()) return false;
  --range;
  const auto [begin, size] = *range;
  const uint64_t end = begin + size;
  if (offset_bytes >= end || size_bytes > end - offset_bytes) return false;
  free_.erase(range);
  if (offset_bytes > begin) free_[begin] = offset_bytes - begin;
  if (end > offset_bytes + size_bytes) {
    free_[offset_bytes + size_bytes] = end - offset_bytes - size_bytes;
  }
  free_bytes_ -= size_bytes;
  return true;
}

void SpaceMap::Release(uint64_t offset_bytes, uint64_t size_bytes) {
  free_bytes_ += size_bytes;
  auto next = free_.lower_bound(offset_bytes);
  FOREBAY_CHECK(next == free_.end() || offset_bytes + size_bytes <= next->first);
  if (next != free_.end() && offset_bytes + size_bytes == next->first) {
    size_bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    FOREBAY_CHECK(before->first + before->second <= offset_bytes);
    if (before->first + before->second == offset_bytes) {
      before->second += size_bytes;
      return;
    }
  }
  free_[offset_bytes] = size_bytes;
}

bool SpaceMap::Fits(uint64_t size_bytes) const {
  return std::any_of(free_.begin(), free_.end(),
                     [size_bytes](const auto& range) { return range.second >= size_bytes; });
}

}  // namespace forebay::nvme::internal
