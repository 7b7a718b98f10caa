// SPDX-License-Identifier: Apache-2.0
// Allocates pages of a segment. Computes offsets only: touches no memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace forebay::pinned_mem {

// Allocates runs of the pages [0, capacity): best fit, the lowest offset among equal runs. Adjacent free runs are merged.
//
// Limits   O(log runs) a call. At most `ranges_max` live ranges.
// Threads  One.
class RangeAllocator {
 public:
  RangeAllocator(uint64_t capacity_pages, size_t ranges_max);

  // Allocates a run of `pages` > 0 pages and returns its first page. Returns nothing if no free run is long enough, or if
  // ranges_max ranges are live.
  std::optional<uint64_t> Allocate(uint64_t pages);

  // Frees the range that starts at `first_page`. It is a bug if no live range starts at that page.
  void Release(uint64_t first_page);

  uint64_t capacity_pages() const { return capacity_pages_; }
  uint64_t free_pages() const { return free_pages_; }
  uint64_t largest_free_pages() const;
  size_t live_ranges() const { return live_.size(); }

 private:
  void InsertFree(uint64_t first, uint64_t pages);
  void EraseFree(std::map<uint64_t, uint64_t>::iterator run);

  uint64_t capacity_pages_;
  uint64_t free_pages_;
  size_t ranges_max_;
  std::map<uint64_t, uint64_t> live_;                     // first page → pages
  std::map<uint64_t, uint64_t> free_by_offset_;           // first page → pages
  std::set<std::pair<uint64_t, uint64_t>> free_by_size_;  // (pages, first page)
};

}  // namespace forebay::pinned_mem
