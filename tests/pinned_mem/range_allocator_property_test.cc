// SPDX-License-Identifier: Apache-2.0
// Goal    Ranges never overlap, no range is lost, and free space is found: best fit, always one contiguous run.
// Method  Run seeded random allocations and frees on the allocator and on an oracle with one flag per page; compare offsets,
//         free counts and runs after each operation.

#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "pinned_mem/range_allocator.h"

namespace forebay::pinned_mem {
namespace {

class Oracle {
 public:
  explicit Oracle(size_t pages) : taken_(pages, false) {}

  struct Runs {
    uint64_t longest = 0;
    std::optional<uint64_t> best;  // shortest sufficient run, lowest among equals
  };

  Runs FreeRuns(uint64_t wanted) const {
    Runs runs;
    uint64_t best_pages = UINT64_MAX;
    for (uint64_t i = 0; i < taken_.size();) {
      uint64_t end = i;
      while (end < taken_.size() && !taken_[end]) ++end;
      if (end > i) {
        runs.longest = std::max(runs.longest, end - i);
        if (end - i >= wanted && end - i < best_pages) {
          best_pages = end - i;
          runs.best = i;
        }
      }
      i = end + 1;
    }
    return runs;
  }

  void Mark(uint64_t first, uint64_t pages, bool taken) {
    for (uint64_t i = first; i < first + pages; ++i) {
      ASSERT_NE(taken_[i], taken) << "page " << i;
      taken_[i] = taken;
    }
  }

  uint64_t free_pages() const {
    return static_cast<uint64_t>(std::count(taken_.begin(), taken_.end(), false));
  }

 private:
  std::vector<bool> taken_;
};

class RangeAllocatorProperty : public ::testing::TestWithParam<uint32_t> {};

TEST_P(RangeAllocatorProperty, AgreesWithAMapOfPages) {
  constexpr uint64_t kPages = 301;
  constexpr size_t kRangesMax = 40;
  SCOPED_TRACE(::testing::Message() << "seed " << GetParam());
  std::mt19937 random(GetParam());
  RangeAllocator allocator(kPages, kRangesMax);
  Oracle oracle(kPages);
  std::vector<std::pair<uint64_t, uint64_t>> live;
  int refused = 0;
  for (int i = 0; i < 4000; ++i) {
    if (live.empty() || random() % 100 < 52) {
      const uint64_t pages = 1 + random() % (random() % 10 == 0 ? 200 : 16);
      const Oracle::Runs runs = oracle.FreeRuns(pages);
      const std::optional<uint64_t> first = allocator.Allocate(pages);
      if (live.size() == kRangesMax) {
        ASSERT_FALSE(first.has_value()) << "above the named maximum";
      } else {
        ASSERT_EQ(first, runs.best) << "operation " << i;
      }
      refused += first.has_value() ? 0 : 1;
      if (first.has_value()) {
        ASSERT_NO_FATAL_FAILURE(oracle.Mark(*first, pages, true));
        live.emplace_back(*first, pages);
      }
    } else {
      const size_t victim = random() % live.size();
      const auto [first, pages] = std::exchange(live[victim], live.back());
      live.pop_back();
      allocator.Release(first);
      ASSERT_NO_FATAL_FAILURE(oracle.Mark(first, pages, false));
    }
    const Oracle::Runs runs = oracle.FreeRuns(1);
    ASSERT_EQ(allocator.free_pages(), oracle.free_pages());
    ASSERT_EQ(allocator.largest_free_pages(), runs.longest) << "free neighbours are one run";
    ASSERT_EQ(allocator.live_ranges(), live.size());
  }
  EXPECT_GT(refused, 0) << "the full arena was never reached";
  for (const auto& [first, pages] : live) allocator.Release(first);
  EXPECT_EQ(allocator.free_pages(), kPages);
  EXPECT_EQ(allocator.Allocate(kPages), 0u) << "all of it is one run again";
}

INSTANTIATE_TEST_SUITE_P(Seeds, RangeAllocatorProperty, ::testing::Values(1, 2, 3, 4, 5));

TEST(RangeAllocator, AnEmptyOneHasNothing) {
  RangeAllocator allocator(0, 1);
  EXPECT_EQ(allocator.Allocate(1), std::nullopt);
  EXPECT_EQ(allocator.largest_free_pages(), 0u);
}

TEST(RangeAllocatorDeathTest, AReleaseOfWhatIsNotTakenStopsTheProcess) {
  RangeAllocator allocator(10, 10);
  ASSERT_EQ(allocator.Allocate(4), 0u);
  EXPECT_DEATH(allocator.Release(1), "CHECK failed");
  allocator.Release(0);
  EXPECT_DEATH(allocator.Release(0), "CHECK failed");
}

}  // namespace
}  // namespace forebay::pinned_mem
