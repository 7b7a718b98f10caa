// SPDX-License-Identifier: Apache-2.0
// Goal    Each durability level has one text, which parses to the level. Every other text is refused with a message that
//         contains it.
// Method  All levels at the limits of their numbers; a list of invalid texts that resemble a level.

#include "protocol/durability.h"

#include <string>
#include <string_view>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "tests/support/status_test.h"

namespace forebay::protocol::durability_test {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

Durability EveryNSteps(uint32_t steps) {
  return {.level = DurabilityLevel::kEpoch, .steps = steps};
}

TEST(Durability, IsWrittenInOneFormThatReadsBack) {
  const struct {
    Durability durability;
    std::string text;
  } all[] = {
      {{}, "memory"},
      {{.level = DurabilityLevel::kStep, .steps = 1}, "step"},
      {EveryNSteps(1), "epoch=1"},
      {EveryNSteps(10), "epoch=10"},
      {EveryNSteps(Durability::kStepsMax), "epoch=1000000"},
  };
  for (const auto& one : all) {
    EXPECT_EQ(FormatDurability(one.durability), one.text);
    const absl::StatusOr<Durability> parsed = ParseDurability(one.text);
    ASSERT_OK(parsed.status()) << one.text;
    EXPECT_EQ(*parsed, one.durability) << one.text;
  }
}

TEST(Durability, OfEveryStepIsAnotherLevelThanStep) {
  EXPECT_NE(*ParseDurability("epoch=1"), *ParseDurability("step"));
}

TEST(Durability, ReadsANumberWithZerosInFrontOfIt) {
  EXPECT_EQ(*ParseDurability("epoch=007"), EveryNSteps(7));
}

TEST(Durability, RefusesEveryOtherTextAndRepeatsIt) {
  const std::string_view others[] = {"",
                                     "Memory",
                                     "STEP",
                                     " step",
                                     "step ",
                                     "steps",
                                     "step=1",
                                     "memory=1",
                                     "epoch",
                                     "epoch=",
                                     "epoch=0",
                                     "epoch=-1",
                                     "epoch=+1",
                                     "epoch= 1",
                                     "epoch=1 ",
                                     "epoch =1",
                                     "epoch=1.0",
                                     "epoch=1e3",
                                     "epoch=0x10",
                                     "epoch=ten",
                                     "epoch=1,2",
                                     "epoch:1",
                                     "EPOCH=1",
                                     "epoch==1",
                                     "1",
                                     "epoch=1step",
                                     "epoch=1000001",
                                     "epoch=4294967296",
                                     "epoch=4294967297",
                                     "epoch=18446744073709551617"};
  for (const std::string_view text : others) {
    const absl::Status status = ParseDurability(text).status();
    EXPECT_THAT(status, testing::HasError(ErrorId::kOption)) << text;
    EXPECT_THAT(std::string(status.message()), StartsWith("\"" + std::string(text) + "\" is"));
    EXPECT_THAT(HintOf(status), HasSubstr("memory, step, or epoch=N"));
    EXPECT_THAT(HintOf(status), HasSubstr("1000000"));
  }
}

TEST(Durability, RepeatsAnUnreadableTextAsReadable) {
  using std::string_view_literals::operator""sv;
  const std::pair<std::string_view, std::string> others[] = {{"step\0"sv, "\"step?\" is"},
                                                             {"epoch=1\0"sv, "\"epoch=1?\" is"},
                                                             {"memory\n", "\"memory?\" is"},
                                                             {"\x1b[31m", "\"?[31m\" is"},
                                                             {"\xc3\xa9poch=2", "\"??poch=2\" is"}};
  for (const auto& [text, shown] : others) {
    const absl::Status status = ParseDurability(text).status();
    EXPECT_THAT(status, testing::HasError(ErrorId::kOption)) << shown;
    EXPECT_THAT(std::string(status.message()), StartsWith(shown));
  }
}

TEST(Durability, RepeatsOnlyTheBeginningOfALongText) {
  const std::string text = "epoch=" + std::string(100'000, '9');
  const absl::Status status = ParseDurability(text).status();
  EXPECT_THAT(status, testing::HasError(ErrorId::kOption));
  EXPECT_THAT(std::string(status.message()), StartsWith("\"epoch=9999"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("9...\""));
  EXPECT_LT(status.message().size(), 100U);
}

}  // namespace
}  // namespace forebay::protocol::durability_test
