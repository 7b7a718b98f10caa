// Goal    What was written within a day is neither more nor less than that, however rarely anybody looks.
// Method  Hours that are counted by hand.

#include "daemon/exec/day_counter.h"

#include "gtest/gtest.h"

namespace forebay::daemon::day_counter_test {
namespace {

constexpr uint64_t kHour = DayCounter::kHourNs;

TEST(DayCounter, IsAllUntilADayIsOverAndTheLastDayFromThenOn) {
  DayCounter counter(/*start_ns=*/7);
  EXPECT_EQ(counter.next_ns(), 7 + kHour);
  uint64_t value = 0;
  for (uint64_t hour = 1; hour <= 100; ++hour) {
    value += hour;  // within this hour
    counter.Advance(7 + hour * kHour - 1, value);
    EXPECT_EQ(counter.next_ns(), 7 + hour * kHour) << "not before its end";
    counter.Advance(7 + hour * kHour, value);
    // The last 23 whole hours, or all.
    const uint64_t before = hour <= 23 ? 0 : (hour - 23) * (hour - 22) / 2;
    EXPECT_EQ(counter.InLastDay(value), value - before) << hour;
    EXPECT_EQ(counter.InLastDay(value + 5), value + 5 - before) << "of the hour that has begun";
  }
}

TEST(DayCounter, HoursThatNobodyLookedAtHadNothing) {
  DayCounter counter(0);
  counter.Advance(kHour, 1000);
  EXPECT_EQ(counter.InLastDay(1000), 1000U);
  counter.Advance(30 * kHour, 1000);
  EXPECT_EQ(counter.InLastDay(1000), 0U);
  EXPECT_EQ(counter.InLastDay(1007), 7U);
  EXPECT_EQ(counter.next_ns(), 31 * kHour);
}

}  // namespace
}  // namespace forebay::daemon::day_counter_test
