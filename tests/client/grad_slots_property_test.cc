// SPDX-License-Identifier: Apache-2.0
// Goal    No two ranges overlap, and all ranges are inside the arena. Whatever ranges are open, the largest gradient finds room
//         once the daemon has freed all delivered ranges.
// Method  Random takes, deliveries and frees, by a seed, are compared with a list of ranges. After every operation the largest
//         gradient is allocated in a copy of the slots.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <random>
#include <vector>

#include "client/internal/grad_slots.h"
#include "gtest/gtest.h"

namespace forebay::client::internal::grad_slots_property_test {
namespace {

struct Held {
  uint64_t offset;
  uint64_t size;
  bool open;
};

void ExpectDisjoint(const std::vector<Held>& held, uint64_t capacity) {
  for (size_t i = 0; i < held.size(); ++i) {
    ASSERT_LE(held[i].offset + held[i].size, capacity);
    ASSERT_EQ(held[i].offset % 64, 0U);
    for (size_t j = i + 1; j < held.size(); ++j) {
      ASSERT_TRUE(held[i].offset + held[i].size <= held[j].offset ||
                  held[j].offset + held[j].size <= held[i].offset);
    }
  }
}

TEST(GradSlotsProperty, OneLargestGradientCanAlwaysTravel) {
  constexpr uint64_t kLargest = 64 * 16;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    std::mt19937_64 random(seed);
    const uint64_t capacity = 2 * kLargest + 64 * (random() % 48);
    GradSlots slots({.capacity_bytes = capacity, .largest_bytes = kLargest});
    std::vector<Held> held;
    for (int turn = 0; turn < 2000; ++turn) {
      const uint64_t size = 64 * (1 + random() % 16);
      switch (random() % 4) {
        case 0: {
          const std::optional<uint64_t> offset = slots.AllocateOpen(size);
          if (offset.has_value()) held.push_back({*offset, size, true});
          break;
        }
        case 1: {
          const std::optional<uint64_t> offset = slots.AllocateBusy(size);
          if (offset.has_value()) held.push_back({*offset, size, false});
          break;
        }
        case 2:
          if (!held.empty()) {
            Held& one = held[random() % held.size()];
            if (one.open) slots.Deliver(one.offset);
            one.open = false;
          }
          break;
        default:
          if (!held.empty()) {
            const size_t index = random() % held.size();
            slots.Free(held[index].offset);
            held.erase(held.begin() + static_cast<ptrdiff_t>(index));
          }
      }
      ExpectDisjoint(held, capacity);
      GradSlots later = slots;
      for (const Held& one : held) {
        if (!one.open) later.Free(one.offset);
      }
      ASSERT_EQ(slots.FitsWithoutBusy(size), GradSlots(later).AllocateOpen(size).has_value());
      ASSERT_TRUE(later.AllocateBusy(kLargest).has_value());
    }
  }
}

TEST(GradSlots, TwoOfThreeLargestCanBeOpen) {
  GradSlots slots({.capacity_bytes = 3 * 128, .largest_bytes = 128});
  EXPECT_TRUE(slots.AllocateOpen(128).has_value());
  EXPECT_TRUE(slots.AllocateOpen(128).has_value());
  EXPECT_FALSE(slots.AllocateOpen(128).has_value());
  EXPECT_FALSE(slots.FitsWithoutBusy(128));
  EXPECT_TRUE(slots.AllocateBusy(128).has_value());
}

TEST(GradSlots, WaitingHelpsWhereBusyRangesAreInTheWay) {
  GradSlots slots({.capacity_bytes = 2 * 128, .largest_bytes = 128});
  const std::optional<uint64_t> first = slots.AllocateBusy(128);
  const std::optional<uint64_t> second = slots.AllocateBusy(128);
  ASSERT_TRUE(first.has_value() && second.has_value());
  EXPECT_FALSE(slots.AllocateOpen(64).has_value());
  EXPECT_TRUE(slots.FitsWithoutBusy(64));
  slots.Free(*second);
  EXPECT_TRUE(slots.AllocateOpen(64).has_value());
}

TEST(BusyRange, GivesItsRangeBackUnlessItIsHandedOver) {
  GradSlots slots({.capacity_bytes = 256, .largest_bytes = 256});
  { const BusyRange range(slots, *slots.AllocateBusy(256)); }
  uint64_t offset = 0;
  {
    BusyRange range(slots, *slots.AllocateBusy(256));
    offset = range.HandOver();
  }
  EXPECT_FALSE(slots.AllocateBusy(1).has_value());
  slots.Free(offset);
  EXPECT_TRUE(slots.AllocateBusy(256).has_value());
}

}  // namespace
}  // namespace forebay::client::internal::grad_slots_property_test
