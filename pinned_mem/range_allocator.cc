// SPDX-License-Identifier: Apache-2.0
#include "pinned_mem/range_allocator.h"

#include <iterator>

#include "protocol/os/check.h"

namespace forebay::pinned_mem {

RangeAllocator::RangeAllocator(uint64_t capacity_pages, size_t ranges_max)
    : capacity_pages_(capacity_pages), free_pages_(capacity_pages), ranges_max_(ranges_max) {
  if (capacity_pages > 0) InsertFree(0, capacity_pages);
}

std::optional<uint64_t> RangeAllocator::Allocate(uint64_t pages) {
  FOREBAY_CHECK(pages > 0);
  if (live_.size() >= ranges_max_) return std::nullopt;
  const auto best = free_by_size_.lower_bound({pages, 0});
  if (best == free_by_size_.end()) return std::nullopt;
  const auto [run_pages, first] = *best;
  EraseFree(free_by_offset_.find(first));
  if (run_pages > pages) InsertFree(first + pages, run_pages - pages);
  live_.emplace(first, pages);
  free_pages_ -= pages;
  return first;
}

void RangeAllocator::Release(uint64_t first_page) {
  const auto range = live_.find(first_page);
  FOREBAY_CHECK(range != live_.end());
  uint64_t first = range->first;
  uint64_t pages = range->second;
  free_pages_ += pages;
  live_.erase(range);

  const auto after = free_by_offset_.lower_bound(first);
  if (after != free_by_offset_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == first) {
      first = before->first;
      pages += before->second;
      EraseFree(before);
    }
  }
  if (after != free_by_offset_.end() && after->first == first + pages) {
    pages += after->second;
    EraseFree(after);
  }
  InsertFree(first, pages);
}

uint64_t RangeAllocator::largest_free_pages() const {
  return free_by_size_.empty() ? 0 : free_by_size_.rbegin()->first;
}

void RangeAllocator::InsertFree(uint64_t first, uint64_t pages) {
  free_by_offset_.emplace(first, pages);
  free_by_size_.emplace(pages, first);
}

void RangeAllocator::EraseFree(std::map<uint64_t, uint64_t>::iterator run) {
  free_by_size_.erase({run->second, run->first});
  free_by_offset_.erase(run);
}

}  // namespace forebay::pinned_mem
