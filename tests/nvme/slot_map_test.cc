// SPDX-License-Identifier: Apache-2.0
// Goal    The free space of the paths yields exactly as many slots as promised, distributed over the paths by weight. Freed
//         slots merge into contiguous space again.
// Method  Values computed by hand; random allocations against the promise, from printed seeds.

#include "nvme/slot_map.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace forebay::nvme {
namespace {

SlotMap Paths(const std::vector<PathSpace>& paths) { return SlotMap(paths); }

std::vector<uint32_t> PathsOf(const std::vector<Slot>& slots) {
  std::vector<uint32_t> paths;
  for (const Slot& slot : slots) paths.push_back(slot.path);
  return paths;
}

TEST(SlotMap, SpreadsSlotsOverThePathsByWeight) {
  SlotMap even = Paths({{0, 1 << 20}, {4096, 1 << 20}});
  EXPECT_THAT(PathsOf(*even.Allocate(5, 8192)), ::testing::ElementsAre(0, 1, 0, 1, 0));
  SlotMap weighted = Paths({{0, 1 << 20, 1}, {0, 1 << 20, 3}});
  const std::vector<uint32_t> paths = PathsOf(*weighted.Allocate(16, 8192));
  EXPECT_EQ(std::count(paths.begin(), paths.end(), 0u), 4);
  EXPECT_EQ(std::count(paths.begin(), paths.begin() + 8, 0u), 2) << "in every part of the run";
  EXPECT_EQ(weighted.used_bytes(0), 4 * 8192u);
  EXPECT_EQ(weighted.used_bytes(1), 12 * 8192u);
}

TEST(SlotMap, WeightsMayChangeForSlotsThatAreAllocatedLater) {
  SlotMap map = Paths({{0, 1 << 20}, {0, 1 << 20}});
  EXPECT_THAT(PathsOf(*map.Allocate(2, 8192)), ::testing::ElementsAre(0, 1));
  map.SetWeights(std::vector<uint32_t>{1, 3});
  EXPECT_THAT(PathsOf(*map.Allocate(4, 8192)), ::testing::ElementsAre(1, 1, 0, 1));
}

TEST(SlotMap, AllocatesOnOnePathAsLongAsItHasRoom) {
  SlotMap map = Paths({{0, 1 << 20}, {4096, 3 * 4096}});
  EXPECT_EQ(map.AllocateOn(1, 4096), (Slot{.path = 1, .offset_bytes = 4096, .size_bytes = 4096}));
  EXPECT_EQ(map.AllocateOn(1, 4096), (Slot{.path = 1, .offset_bytes = 8192, .size_bytes = 4096}));
  EXPECT_EQ(map.AllocateOn(1, 4096), std::nullopt);
  EXPECT_EQ(map.used_bytes(1), 8192U);
}

TEST(SlotMap, RefusesWhatDoesNotFitAndTakesNothing) {
  SlotMap map = Paths({{0, 3 * 4096 + 4095}, {0, 4096}});
  EXPECT_EQ(map.SlotsFree(4096), 4u);
  EXPECT_EQ(map.SlotsFree(8192), 1u);
  EXPECT_FALSE(map.Allocate(5, 4096).has_value());
  EXPECT_EQ(map.free_bytes(), 4 * 4096 + 4095u);
  EXPECT_TRUE(map.Allocate(4, 4096).has_value());
  EXPECT_EQ(map.SlotsFree(4096), 0u);
}

TEST(SlotMap, GivesEverySlotThatItPromisesHoweverFragmented) {
  for (uint32_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    SlotMap map = Paths({{4096, 300 * 4096}, {0, 123 * 4096, 2}, {0, 77 * 4096}});
    const uint64_t capacity = map.free_bytes();
    std::vector<std::vector<Slot>> jobs;
    for (int round = 0; round < 200; ++round) {
      if (random() % 3 == 0 && !jobs.empty()) {
        const size_t job = random() % jobs.size();
        map.Free(jobs[job]);
        jobs.erase(jobs.begin() + static_cast<ptrdiff_t>(job));
        continue;
      }
      const uint64_t bytes = 4096 * (1 + random() % 9);
      const uint64_t promised = map.SlotsFree(bytes);
      SlotMap all = map;
      EXPECT_TRUE(promised == 0 || all.Allocate(promised, bytes).has_value());
      EXPECT_FALSE(map.Allocate(promised + 1, bytes).has_value());
      if (promised > 0) jobs.push_back(*map.Allocate(1 + random() % promised, bytes));
    }
    for (const std::vector<Slot>& job : jobs) map.Free(job);
    EXPECT_EQ(map.free_bytes(), capacity);
    EXPECT_EQ(map.SlotsFree(299 * 4096), 1u) << "free ranges are merged";
  }
}

TEST(SlotMap, ReservesOneSlotUnlessSomeOfItIsUsed) {
  SlotMap map = Paths({{4096, 10 * 4096}});
  EXPECT_FALSE(map.Reserve({.path = 0, .offset_bytes = 0, .size_bytes = 8192}));
  EXPECT_FALSE(map.Reserve({.path = 1, .offset_bytes = 4096, .size_bytes = 4096}));
  EXPECT_TRUE(map.Reserve({.path = 0, .offset_bytes = 8192, .size_bytes = 8192}));
  EXPECT_FALSE(map.Reserve({.path = 0, .offset_bytes = 12288, .size_bytes = 8192}));
  EXPECT_FALSE(map.Reserve({.path = 0, .offset_bytes = 9 * 4096, .size_bytes = 8192}));
  EXPECT_EQ(map.SlotsFree(4096), 7u);
}

}  // namespace
}  // namespace forebay::nvme
