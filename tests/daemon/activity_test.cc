// SPDX-License-Identifier: Apache-2.0
// Goal    The table says of each pair whether one activity excludes the other or why it does not; a set excludes what one of
//         its members excludes; pairs that exclude each other are those that a job must never have.
// Method  Enumerates all pairs.

#include "daemon/core/base/activity.h"

#include <array>
#include <optional>
#include <string_view>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace forebay::daemon {
namespace {

constexpr auto kWanted =
    std::to_array<Activity>({Activity::kDecision, Activity::kAccess, Activity::kMove,
                             Activity::kDoubtedMove, Activity::kEarlyUpdate, Activity::kWorldChange,
                             Activity::kFloatSums, Activity::kRecord, Activity::kStop});

TEST(Activity, ACellExcludesOrHasASentence) {
  for (const Activity wanted : kWanted) {
    for (const Activity under_way : kLastingActivities) {
      SCOPED_TRACE(::testing::Message()
                   << static_cast<int>(wanted) << " beside " << static_cast<int>(under_way));
      const std::optional<std::string_view> why = WhyNotExcluded(wanted, under_way);
      EXPECT_NE(Excludes(wanted, under_way), why.has_value());
      if (why) {
        EXPECT_GT(why->size(), 10U);
      }
    }
  }
}

TEST(Activity, ASetExcludesWhatOneOfItsMembersExcludes) {
  for (const Activity wanted : kWanted) {
    EXPECT_TRUE(MayBegin(wanted, {}));
    for (const Activity a : kLastingActivities) {
      for (const Activity b : kLastingActivities) {
        EXPECT_EQ(MayBegin(wanted, {a, b}), !Excludes(wanted, a) && !Excludes(wanted, b));
        const Activities one = Activities{a, b}.Without(b);
        EXPECT_EQ(MayBegin(wanted, one), a == b || !Excludes(wanted, a));
      }
    }
  }
}

TEST(Activity, APlannedStopWaitsForEveryOtherActivity) {
  for (const Activity activity : kLastingActivities) {
    EXPECT_TRUE(Excludes(Activity::kStop, activity));
  }
}

TEST(Activity, UpdatesAccessesAndMovesAreNeverTogether) {
  EXPECT_TRUE(AreNeverTogether(Activity::kUpdate, Activity::kAccess));
  EXPECT_TRUE(AreNeverTogether(Activity::kUpdate, Activity::kMove));
  EXPECT_TRUE(AreNeverTogether(Activity::kAccess, Activity::kMove));
  EXPECT_TRUE(AreNeverTogether(Activity::kAccess, Activity::kEarlyUpdate));
  EXPECT_TRUE(AreNeverTogether(Activity::kMove, Activity::kEarlyUpdate));
  // The decision accepts early updates, and a load of weights may begin beside anything.
  EXPECT_FALSE(AreNeverTogether(Activity::kUpdate, Activity::kEarlyUpdate));
  EXPECT_FALSE(AreNeverTogether(Activity::kAccess, Activity::kWeightsLoad));
  for (const Activity a : kLastingActivities) {
    for (const Activity b : kLastingActivities) {
      EXPECT_EQ(AreNeverTogether(a, b), AreNeverTogether(b, a));
    }
  }
}

}  // namespace
}  // namespace forebay::daemon
