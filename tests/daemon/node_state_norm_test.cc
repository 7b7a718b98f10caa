// SPDX-License-Identifier: Apache-2.0
// Goal    With shared attachment a rank may ask for norms of the job's gradient before it calls step. The answer comes when
//         every other rank has asked too or has called step. It is the same on all ranks, and does not change the step. A rank
//         that has asked for a norm delivers no more gradients.
// Method  The harness. The workers report a square of one for each contribution in a sum, so that a norm gives the number of
//         contributions.

#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/wire.h"
#include "tests/support/node_harness.h"

namespace forebay::daemon::node_state_norm_test {
namespace {

using ::forebay::testing::MakeLayout;
using ::forebay::testing::NodeHarness;
using ::forebay::testing::RoomyOptions;
using protocol::ErrorId;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr ErrorId kUnanswered = ErrorId::kTimeout;

// Two groups of one parameter each.
class NodeStateNorm : public ::testing::Test {
 protected:
  static constexpr uint32_t kWorld = 3;

  void SetUp() override {
    for (uint32_t rank = 0; rank < kWorld; ++rank) {
      sessions_.push_back(node_.Attach(layout_, {.rank = rank}));
    }
  }
  void TearDown() override { EXPECT_EQ(node_.fault(), ""); }

  void Deliver(uint32_t rank, uint32_t group, uint64_t step = 1) {
    node_.Gradient(sessions_[rank], group, step);
    node_.RunTasks();
  }
  uint64_t Ask(uint32_t rank, uint32_t param) {
    const uint64_t tag = node_.GradNorm(sessions_[rank], param);
    node_.RunTasks();
    return tag;
  }
  double NormOf(uint64_t tag) {
    EXPECT_EQ(node_.ErrorOf(tag), ErrorId::kNone) << node_.answer(tag)->status.message();
    return node_.answer(tag)->completion.norm;
  }
  std::vector<ErrorId> StepAll(uint64_t step) { return node_.StepAll(sessions_, step); }

  const std::shared_ptr<const protocol::Layout> layout_ = MakeLayout({100, 5000});
  NodeHarness node_{RoomyOptions(), kWorld};
  std::vector<uint64_t> sessions_;
};

TEST_F(NodeStateNorm, IsThatOfTheMeanOverTheRanksOnceAllHaveAsked) {
  for (uint32_t rank = 0; rank < kWorld; ++rank) Deliver(rank, 0);
  Deliver(1, 1);
  const uint64_t first = Ask(0, 0);
  const uint64_t second = Ask(2, 0);
  EXPECT_EQ(node_.ErrorOf(first), kUnanswered);
  const uint64_t third = Ask(1, 1);
  EXPECT_EQ(NormOf(first), std::sqrt(3.0) / 3);
  EXPECT_EQ(NormOf(second), NormOf(first));
  EXPECT_EQ(NormOf(third), 1.0 / 3) << "of one rank; the others count as zero";
  EXPECT_EQ(NormOf(Ask(0, protocol::kAllParams)), std::sqrt(3.0 + 1.0) / 3) << "at once now";
  EXPECT_THAT(StepAll(1), Each(ErrorId::kNone));
  // The next step begins with empty sums.
  for (uint32_t rank = 0; rank < kWorld; ++rank) Deliver(rank, 1, 2);
  EXPECT_THAT(StepAll(2), Each(ErrorId::kNone));
}

TEST_F(NodeStateNorm, OneRankMayAskAloneWhereTheOthersCallStep) {
  for (uint32_t rank = 0; rank < kWorld; ++rank) Deliver(rank, 0);
  const uint64_t asked = Ask(1, 0);
  const uint64_t nobodys = node_.GradNorm(sessions_[1], 1);
  const uint64_t first = node_.Step(sessions_[0], 1);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(asked), kUnanswered);
  const uint64_t third = node_.Step(sessions_[2], 1);
  node_.RunTasks();
  EXPECT_EQ(NormOf(asked), std::sqrt(3.0) / 3);
  EXPECT_EQ(NormOf(nobodys), 0.0) << "no rank has a gradient of it";
  EXPECT_EQ(node_.ErrorOf(first), kUnanswered) << "the step waits for the rank that has asked";
  const uint64_t second = node_.Step(sessions_[1], 1);
  node_.RunTasks();
  for (const uint64_t tag : {first, second, third}) EXPECT_EQ(node_.ErrorOf(tag), ErrorId::kNone);
}

TEST_F(NodeStateNorm, ARankThatNeverDeliversIsNotWaitedForInAnyOrder) {
  Deliver(1, 0);
  const uint64_t asked = Ask(1, 0);
  Ask(2, 0);
  const uint64_t last = Ask(0, 1);  // Rank 0 will deliver no gradient.
  EXPECT_EQ(NormOf(asked), 1.0 / 3);
  EXPECT_EQ(NormOf(last), 0.0);
  EXPECT_THAT(StepAll(1), Each(ErrorId::kNone));
}

TEST_F(NodeStateNorm, WhoeverHasAskedDeliversNoMore) {
  Deliver(0, 0);
  const uint64_t asked = Ask(0, 0);
  const uint64_t late = node_.Gradient(sessions_[0], 1, 1);
  EXPECT_EQ(node_.ErrorOf(late), ErrorId::kStep);
  EXPECT_THAT(std::string(node_.answer(late)->status.message()),
              HasSubstr("rank 0 has asked for a norm in step 1"));
  Ask(1, 0);
  Ask(2, 0);
  EXPECT_EQ(NormOf(asked), 1.0 / 3);
}

TEST_F(NodeStateNorm, AGradientThatIsNotFiniteAnswersEveryRank) {
  Deliver(0, 0);
  const uint64_t first = Ask(0, 0);
  const uint64_t second = Ask(1, protocol::kAllParams);
  node_.Gradient(sessions_[2], 1, 1, /*finite=*/false);
  node_.RunTasks();
  const uint64_t third = Ask(2, 0);
  for (const uint64_t tag : {first, second, third}) {
    EXPECT_EQ(node_.ErrorOf(tag), ErrorId::kNonfinite);
  }
  EXPECT_THAT(StepAll(1), Each(ErrorId::kNonfinite)) << "says it again";
}

TEST_F(NodeStateNorm, AnAttemptBegunAnewAnswersThoseWhoWait) {
  Deliver(0, 0);
  const uint64_t asked = Ask(0, 0);
  Deliver(1, 0);
  node_.SetAttempt(sessions_[1], 1);
  Deliver(1, 0);
  EXPECT_EQ(node_.ErrorOf(asked), ErrorId::kGradDropped);
  EXPECT_EQ(node_.ErrorOf(Ask(0, 0)), ErrorId::kGradDropped) << "of the older attempt";
  for (const uint32_t rank : {0U, 2U}) node_.SetAttempt(sessions_[rank], 1);
  for (const uint32_t rank : {0U, 2U}) Deliver(rank, 0);
  std::vector<uint64_t> tags;
  for (uint32_t rank = 0; rank < kWorld; ++rank) tags.push_back(Ask(rank, 0));
  for (const uint64_t tag : tags) EXPECT_EQ(NormOf(tag), std::sqrt(3.0) / 3);
  EXPECT_THAT(StepAll(1), Each(ErrorId::kNone));
}

TEST_F(NodeStateNorm, ARankThatLeavesAnswersThoseWhoWait) {
  Deliver(0, 0);
  const uint64_t asked = Ask(0, 0);
  node_.End(sessions_[2], EndCause::kDetached);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(asked), ErrorId::kRankLost);
  EXPECT_EQ(node_.ErrorOf(Ask(0, 0)), ErrorId::kRankLost);
  sessions_[2] = node_.Attach(layout_, {.rank = 2});
  const uint64_t again = Ask(0, 0);
  Ask(1, 0);
  Ask(2, 0);
  EXPECT_EQ(NormOf(again), 1.0 / 3);
  EXPECT_THAT(StepAll(1), Each(ErrorId::kNone));
}

TEST_F(NodeStateNorm, ARankThatDiesAnswersThoseWhoWait) {
  Deliver(0, 0);
  Deliver(2, 0);
  const uint64_t asked = Ask(0, 0);
  node_.End(sessions_[2], EndCause::kLost);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(asked), ErrorId::kRankLost);
}

TEST_F(NodeStateNorm, AStepThatIsRefusedKeepsWhatWasAsked) {
  for (uint32_t rank = 0; rank < kWorld; ++rank) Deliver(rank, 0);
  const uint64_t asked = Ask(0, 0);
  const uint64_t refused = node_.Step(sessions_[1], 1, /*lr=*/0.1);
  node_.RunTasks();
  const uint64_t other = node_.Step(sessions_[2], 1, /*lr=*/0.2);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(refused), ErrorId::kStep);
  EXPECT_EQ(node_.ErrorOf(other), ErrorId::kStep);
  EXPECT_EQ(node_.ErrorOf(asked), kUnanswered) << "the others may deliver more now";
  Ask(1, 0);
  Ask(2, 0);
  EXPECT_EQ(NormOf(asked), std::sqrt(3.0) / 3);
  EXPECT_THAT(StepAll(1), Each(ErrorId::kNone));
}

}  // namespace
}  // namespace forebay::daemon::node_state_norm_test
