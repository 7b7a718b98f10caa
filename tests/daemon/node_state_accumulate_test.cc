// SPDX-License-Identifier: Apache-2.0
// Goal    With sharded attachment a step may take several backward passes. Each pass is added to the earlier ones in float32,
//         however the passes are split into ranges. Norms of parameters are norms of the sum. The caller's gradient scale
//         applies before clipping. If sums have 16 bits, the first further pass allocates memory for float32 sums, or is
//         refused with the sizes as numbers.
// Method  The harness with a sharded job. The workers report a square of one for each contribution in a sum, so that a norm
//         gives the number of contributions.

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/sharded_job.h"

namespace forebay::daemon::node_state_accumulate_test {
namespace {

using ::forebay::testing::MakeShardedLayout;
using ::forebay::testing::RoomyOptions;
using ::forebay::testing::ShardedJob;
using protocol::ErrorId;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr ErrorId kUnanswered = ErrorId::kTimeout;

// A layout with one group of two parameters, p0 and p1, whose rows are split over two ranks.
std::shared_ptr<const protocol::Layout> TwoParameters() {
  return MakeShardedLayout({{{.rows = 2 * 9000}, {.rows = 2 * 100}}});
}

class NodeStateAccumulate : public ::testing::Test, public ShardedJob {
 protected:
  NodeStateAccumulate() : ShardedJob(TwoParameters(), 2) {}
  void SetUp() override { AttachAll(); }
  void TearDown() override { EXPECT_EQ(node_.fault(), ""); }

  void Deliver(uint32_t rank, uint64_t begin, uint64_t end) {
    const uint64_t tag = node_.GradientRange(sessions_[rank], rank, begin, end, 1);
    node_.RunTasks();
    ASSERT_EQ(node_.ErrorOf(tag), ErrorId::kNone) << MessageOf(tag);
  }
  double NormOf(uint32_t rank, uint32_t param) {
    const uint64_t tag = node_.GradNorm(sessions_[rank], param);
    node_.RunTasks();
    EXPECT_EQ(node_.ErrorOf(tag), ErrorId::kNone) << MessageOf(tag);
    return node_.answer(tag)->completion.norm;
  }
};

TEST_F(NodeStateAccumulate, EveryPassIsInTheSum) {
  for (uint32_t pass = 0; pass < 3; ++pass) {
    for (uint32_t rank = 0; rank < 2; ++rank) {
      if (pass > 0) node_.BeginPass(sessions_[rank]);
      Deliver(rank, 0, 9100);
      EXPECT_EQ(NormOf(rank, 0), std::sqrt(pass + 1.0));
    }
  }
  EXPECT_THAT(StepAll(1, 1.0), Each(ErrorId::kNone));
  EXPECT_EQ(node_.answer(tags_[0])->completion.norm, std::sqrt(6.0)) << "of both ranks";
  const std::vector<AddGradients> adds = node_.Logged<AddGradients>();
  ASSERT_EQ(adds.size(), 6U);
  EXPECT_TRUE(adds[0].assign && adds[1].assign);
  for (size_t i = 2; i < adds.size(); ++i) EXPECT_FALSE(adds[i].assign) << i;
  // The next step begins with empty sums.
  for (uint32_t rank = 0; rank < 2; ++rank) {
    const uint64_t tag = node_.Gradient(sessions_[rank], rank, 2);
    node_.RunTasks();
    EXPECT_EQ(node_.ErrorOf(tag), ErrorId::kNone);
  }
  EXPECT_THAT(StepAll(2, 1.0), Each(ErrorId::kNone));
  EXPECT_EQ(node_.answer(tags_[0])->completion.norm, std::sqrt(2.0));
}

TEST_F(NodeStateAccumulate, PassesMayBeCutDifferentlyAndCoverDifferentElements) {
  Deliver(0, 0, 9100);
  node_.BeginPass(sessions_[0]);
  Deliver(0, 4096, 8192);  // Rank 0 delivers no other gradient in this pass.
  node_.BeginPass(sessions_[0]);
  Deliver(0, 0, 8192);
  Deliver(0, 8192, 9100);
  Deliver(1, 0, 9100);
  EXPECT_THAT(StepAll(1, 1.0), Each(ErrorId::kNone));
  // The units of rank 0 have 2, 3 and 2 contributions. Units of one cell are counted once.
  EXPECT_EQ(node_.answer(tags_[0])->completion.norm, std::sqrt(2 + 3 + 2 + 1.0));
}

TEST_F(NodeStateAccumulate, APassThatArrivesWhileTheOneBeforeIsAddedWaitsForIt) {
  const uint64_t first = node_.Gradient(sessions_[0], 0, 1);
  node_.BeginPass(sessions_[0]);
  const uint64_t second = node_.GradientRange(sessions_[0], 0, 0, 4096, 1);
  const uint64_t third = node_.GradientRange(sessions_[0], 0, 4096, 9100, 1);
  const uint64_t norm = node_.GradNorm(sessions_[0], 0);
  EXPECT_EQ(node_.Running<AddGradients>().size(), 1U);
  EXPECT_EQ(node_.ErrorOf(norm), kUnanswered);
  node_.RunTasks();
  for (const uint64_t tag : {first, second, third, norm}) {
    EXPECT_EQ(node_.ErrorOf(tag), ErrorId::kNone);
  }
  DeliverOwn(1, 1);
  EXPECT_THAT(StepAll(1, 1.0), Each(ErrorId::kNone));
  EXPECT_EQ(node_.answer(tags_[0])->completion.norm, std::sqrt(2 + 2 + 1.0));
}

TEST_F(NodeStateAccumulate, NothingIsAddedToWhatANormIsBeingTakenOf) {
  Deliver(0, 0, 9100);
  const uint64_t of_first = node_.GradNorm(sessions_[0], 0);
  ASSERT_EQ(node_.Running<SumGradient>().size(), 1U);
  node_.BeginPass(sessions_[0]);
  const uint64_t second = node_.GradientRange(sessions_[0], 0, 0, 9100, 1);
  EXPECT_TRUE(node_.Running<AddGradients>().empty());
  node_.RunTasks();
  EXPECT_EQ(node_.answer(of_first)->completion.norm, 1.0) << "of the pass before";
  EXPECT_EQ(node_.ErrorOf(second), ErrorId::kNone);
  EXPECT_EQ(NormOf(0, 0), std::sqrt(2.0));
  // p1 is the last parameter of the partition. While its norm is computed, gradients may be added to elements before p1.
  node_.GradNorm(sessions_[0], 1);
  node_.BeginPass(sessions_[0]);
  const uint64_t elsewhere = node_.GradientRange(sessions_[0], 0, 0, 4096, 1);
  EXPECT_EQ(node_.Running<AddGradients>().size(), 1U);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(elsewhere), ErrorId::kNone);
}

TEST_F(NodeStateAccumulate, WithoutAFurtherPassASecondGradientIsRefused) {
  Deliver(0, 0, 9100);
  const uint64_t tag = node_.Gradient(sessions_[0], 0, 1);
  EXPECT_EQ(node_.ErrorOf(tag), ErrorId::kGradRepeat);
}

TEST_F(NodeStateAccumulate, ASumThatIsNotFiniteEndsTheAttemptAndAnswersNorms) {
  Deliver(0, 0, 9100);
  node_.BeginPass(sessions_[0]);
  node_.Gradient(sessions_[0], 0, 1, /*finite=*/false);
  const uint64_t norm = node_.GradNorm(sessions_[0], 0);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(norm), ErrorId::kNonfinite);
}

TEST_F(NodeStateAccumulate, TheNormOfAParameterWithoutAGradientIsZero) {
  EXPECT_EQ(NormOf(0, 1), 0.0);
  const uint64_t unknown = node_.GradNorm(sessions_[0], 2);
  EXPECT_EQ(node_.ErrorOf(unknown), ErrorId::kRange);
}

TEST_F(NodeStateAccumulate, NormsOfARankThatHasCalledStepAreRefusedAndThoseOfOneThatDiedGone) {
  DeliverOwn(0, 1);
  const uint64_t waits = node_.Step(sessions_[0], 1);
  EXPECT_EQ(node_.ErrorOf(node_.GradNorm(sessions_[0], 0)), ErrorId::kStep);
  node_.Gradient(sessions_[1], 1, 1);
  node_.GradNorm(sessions_[1], 0);
  node_.End(sessions_[1], EndCause::kLost);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(waits), ErrorId::kRankLost);
}

TEST_F(NodeStateAccumulate, AScaleOfTheCallersAppliesBeforeClipping) {
  for (uint32_t rank = 0; rank < 2; ++rank) Deliver(rank, 0, 9100);
  node_.set_grad_scale(0.25);
  EXPECT_THAT(StepAll(1, 1.0), Each(ErrorId::kNone));
  EXPECT_EQ(node_.answer(tags_[0])->completion.norm, 0.25 * std::sqrt(2.0));
  for (const UpdateBlock& update : node_.Logged<UpdateBlock>()) {
    for (const UpdateSegment& segment : update.segments) {
      EXPECT_EQ(segment.scalars.grad_scale, 0.25F);
    }
  }
}

TEST_F(NodeStateAccumulate, ScalesThatDifferOrAreNoNumbersAreRefused) {
  for (uint32_t rank = 0; rank < 2; ++rank) Deliver(rank, 0, 9100);
  node_.set_grad_scale(0.5);
  node_.Step(sessions_[0], 1);
  node_.set_grad_scale(0.25);
  const uint64_t other = node_.Step(sessions_[1], 1);
  EXPECT_EQ(node_.ErrorOf(other), ErrorId::kStep);
  EXPECT_THAT(MessageOf(other), HasSubstr("grad_scale: 0.5 and 0.25"));
  for (const double bad : {1e39, -1e39, std::nan(""), std::numeric_limits<double>::infinity()}) {
    node_.set_grad_scale(bad);
    EXPECT_EQ(node_.ErrorOf(node_.Step(sessions_[0], 1)), ErrorId::kOption) << bad;
  }
}

// -------------------------------------------------------------------------------- sums in 16 bits

// Two ranks whose gradients, and at first their sums, have 16 bits.
std::shared_ptr<const protocol::Layout> NarrowParameters() {
  return MakeShardedLayout({{{.rows = 2 * 9000}, {.rows = 2 * 100}}},
                           {.dtype = protocol::DType::kBFloat16});
}

// Bytes of float32 sums of two partitions of 9100 elements, in whole pages.
constexpr uint64_t kFloatSumsBytes = 2 * 9 * 4096;

class NodeStateAccumulateNarrow : public ::testing::Test, public ShardedJob {
 protected:
  explicit NodeStateAccumulateNarrow(const NodeState::Options& options = RoomyOptions())
      : ShardedJob(NarrowParameters(), 2, options) {}
  void SetUp() override { AttachAll(); }
  void TearDown() override { EXPECT_EQ(node_.fault(), ""); }

  uint64_t DramUsed() { return node_.state().Node().dram_used_bytes; }
  uint64_t SumsOfPlan() {
    const auto plan = node_.state().PlanOfJob({.uid = 1000, .name = "job"}, std::nullopt);
    return plan.ok() ? plan->sums : 0;
  }
  uint64_t GradientOfAll(uint32_t rank, uint64_t step) {
    return node_.GradientRange(sessions_[rank], rank, 0, 9100, step);
  }
  std::vector<UpdateBlock> UpdatesOfSteps() {
    std::vector<UpdateBlock> updates = node_.Logged<UpdateBlock>();
    std::erase_if(updates, [](const auto& one) { return one.pass == UpdatePass::kMasters; });
    return updates;
  }
  // Delivers the first passes of both ranks, and a second pass of rank 0 that waits for float32 sums.
  uint64_t DeliverFurther() {
    DeliverOwn(0, 1);
    DeliverOwn(1, 1);
    node_.BeginPass(sessions_[0]);
    const uint64_t further = GradientOfAll(0, 1);
    EXPECT_EQ(node_.ErrorOf(further), kUnanswered);
    return further;
  }
};

TEST_F(NodeStateAccumulateNarrow, AskedForAtAttachSumsAreFloat32FromTheStart) {
  ShardedJob job(NarrowParameters(), 1);
  job.layout_ =
      MakeShardedLayout({{{.rows = 9000}}}, {.ranks = 1, .dtype = protocol::DType::kBFloat16});
  const uint64_t session = job.node_.Attach(job.layout_, {.accumulate = true});
  ASSERT_OK(job.StatusOf(session));
  job.node_.Gradient(session, 0, 1);
  job.node_.RunTasks();
  job.node_.BeginPass(session);
  const uint64_t second = job.node_.Gradient(session, 0, 1);
  job.node_.RunTasks();
  EXPECT_EQ(job.node_.ErrorOf(second), ErrorId::kNone);
  EXPECT_EQ(job.node_.Logged<AddGradients>()[0].sum_dtype, protocol::DType::kFloat32);
  EXPECT_TRUE(job.node_.Logged<PopulateStepArena>().empty());
  EXPECT_EQ(job.node_.fault(), "");
}

TEST_F(NodeStateAccumulateNarrow, TakeMemoryForFloat32SumsWithTheFirstFurtherPass) {
  const uint64_t used_bytes = DramUsed();
  const uint64_t planned_bytes = SumsOfPlan();
  const uint64_t further = DeliverFurther();
  ASSERT_EQ(node_.Running<PopulateStepArena>().size(), 1U);
  EXPECT_EQ(node_.Running<PopulateStepArena>()[0].bytes, kFloatSumsBytes);
  EXPECT_EQ(DramUsed(), used_bytes + kFloatSumsBytes);
  EXPECT_TRUE(node_.Running<AddGradients>().empty()) << "the old sums have no room for more";
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(further), ErrorId::kNone);
  EXPECT_THAT(StepAll(1, 1.0), Each(ErrorId::kNone));
  EXPECT_EQ(node_.answer(tags_[0])->completion.norm, std::sqrt(2 + 1.0)) << "both passes";
  for (const UpdateBlock& update : UpdatesOfSteps()) {
    EXPECT_EQ(update.sum_dtype, protocol::DType::kFloat32);
  }
  // The float32 sums remain: later steps use them from their first pass on.
  const size_t sums_before = node_.Logged<AddGradients>().size();
  DeliverOwn(0, 2);
  DeliverOwn(1, 2);
  EXPECT_THAT(StepAll(2, 1.0), Each(ErrorId::kNone));
  EXPECT_EQ(node_.answer(tags_[0])->completion.norm, std::sqrt(2.0));
  EXPECT_EQ(node_.Logged<PopulateStepArena>().size(), 1U);
  EXPECT_EQ(node_.Logged<AddGradients>()[sums_before].sum_dtype, protocol::DType::kFloat32);
  EXPECT_EQ(DramUsed(), used_bytes + kFloatSumsBytes);
  EXPECT_EQ(SumsOfPlan(), planned_bytes + kFloatSumsBytes);
  // A rank that detaches and attaches again may now announce that it accumulates.
  node_.End(sessions_[1], EndCause::kDetached);
  node_.RunTasks();
  EXPECT_OK(StatusOf(node_.AttachOnly(layout_, {.rank = 1, .accumulate = true})));
}

TEST_F(NodeStateAccumulateNarrow, KeepNarrowSumsHoweverTheyAreCut) {
  node_.GradientRange(sessions_[0], 0, 0, 4096, 1);
  node_.GradientRange(sessions_[0], 0, 8192, 9100, 1);
  const uint64_t before = node_.GradNorm(sessions_[0], 1);
  DeliverOwn(1, 1);
  EXPECT_EQ(node_.ErrorOf(before), ErrorId::kNone);
  node_.BeginPass(sessions_[0]);
  node_.GradientRange(sessions_[0], 0, 0, 8192, 1);
  node_.GradientRange(sessions_[0], 0, 8192, 9100, 1);
  node_.SetPresent(sessions_[0], 0, true);
  node_.RunTasks();
  EXPECT_THAT(StepAll(1, 1.0), Each(ErrorId::kNone));
  EXPECT_EQ(node_.answer(tags_[0])->completion.norm, std::sqrt(2 + 1 + 2 + 1.0));
}

TEST_F(NodeStateAccumulateNarrow, WaitForReadersOfNarrowSums) {
  DeliverOwn(0, 1);
  const uint64_t norm = node_.GradNorm(sessions_[0], 0);
  ASSERT_EQ(node_.Running<SumGradient>().size(), 1U);
  const uint64_t other = GradientOfAll(1, 1);
  ASSERT_EQ(node_.Running<AddGradients>().size(), 1U);
  node_.BeginPass(sessions_[0]);
  const uint64_t further = GradientOfAll(0, 1);
  node_.FinishAll<PopulateStepArena>();
  EXPECT_EQ(node_.Running<AddGradients>().size(), 1U) << "that of the old sums alone";
  node_.FinishAll<SumGradient>();
  EXPECT_EQ(node_.Running<AddGradients>().size(), 1U);
  node_.RunTasks();
  EXPECT_EQ(node_.answer(norm)->completion.norm, 1.0) << "of the pass before";
  EXPECT_EQ(node_.ErrorOf(other), ErrorId::kNone);
  EXPECT_EQ(node_.ErrorOf(further), ErrorId::kNone);
  EXPECT_THAT(StepAll(1, 1.0), Each(ErrorId::kNone));
  EXPECT_EQ(node_.answer(tags_[0])->completion.norm, std::sqrt(2 + 1.0));
}

TEST_F(NodeStateAccumulateNarrow, ComeAfterAllRanksHaveCalledStep) {
  const uint64_t further = DeliverFurther();
  const uint64_t first = node_.Step(sessions_[0], 1, 0.1, 1.0);
  const uint64_t second = node_.Step(sessions_[1], 1, 0.1, 1.0);
  EXPECT_TRUE(UpdatesOfSteps().empty());
  node_.RunTasks();
  for (const uint64_t tag : {further, first, second}) EXPECT_EQ(node_.ErrorOf(tag), ErrorId::kNone);
  EXPECT_EQ(node_.answer(first)->completion.norm, std::sqrt(2 + 1.0));
}

TEST_F(NodeStateAccumulateNarrow, OfAnAttemptThatIsDroppedMeanwhileServeTheNext) {
  DeliverFurther();
  node_.SetAttempt(sessions_[0], 1);  // Rank 0 calls zero_grad.
  GradientOfAll(0, 1);
  node_.FinishAll<AddGradients>();
  node_.RunTasks();
  node_.SetAttempt(sessions_[1], 1);
  DeliverOwn(1, 1);
  EXPECT_EQ(node_.Logged<PopulateStepArena>().size(), 1U);
  EXPECT_THAT(StepAll(1, 1.0), Each(ErrorId::kNone));
  EXPECT_GE(node_.answer(tags_[0])->completion.norm, std::sqrt(2.0));
}

TEST_F(NodeStateAccumulateNarrow, ThatCannotBeMadeEndTheAttemptOfAllRanks) {
  const uint64_t used_bytes = DramUsed();
  DeliverFurther();
  node_.Finish(node_.Running<PopulateStepArena>()[0].task,
               protocol::MakeError(ErrorId::kDramLimit, "the node is full"));
  node_.RunTasks();
  EXPECT_EQ(DramUsed(), used_bytes);
  EXPECT_THAT(StepAll(1), Each(ErrorId::kDramLimit));
  EXPECT_THAT(MessageOf(tags_[1]), HasSubstr("the node is full"));
  for (uint32_t rank = 0; rank < 2; ++rank) {
    node_.SetAttempt(sessions_[rank], 1);
    node_.BeginPass(sessions_[rank]);
    GradientOfAll(rank, 1);
  }
  EXPECT_EQ(node_.Running<PopulateStepArena>().size(), 1U) << "it is tried again";
  node_.RunTasks();
  EXPECT_THAT(StepAll(1), Each(ErrorId::kNone));
}

class NodeStateAccumulateTight : public NodeStateAccumulateNarrow {
 protected:
  NodeStateAccumulateTight() : NodeStateAccumulateNarrow(Tight()) {}

  // The DRAM limit covers the job and all but one page of its float32 sums.
  static NodeState::Options Tight() {
    ShardedJob roomy(NarrowParameters(), 2);
    roomy.AttachAll();
    NodeState::Options options = RoomyOptions();
    options.dram_limit_bytes = roomy.node_.state().Node().dram_used_bytes + kFloatSumsBytes - 4096;
    return options;
  }
};

TEST_F(NodeStateAccumulateTight, AreRefusedWithTheNumbers) {
  DeliverOwn(0, 1);
  DeliverOwn(1, 1);
  node_.BeginPass(sessions_[0]);
  GradientOfAll(0, 1);
  EXPECT_TRUE(node_.Logged<PopulateStepArena>().empty());
  EXPECT_THAT(StepAll(1), Each(ErrorId::kDramLimit));
  for (const uint64_t tag : tags_) {
    EXPECT_THAT(MessageOf(tag), HasSubstr(absl::StrCat("sums in float32, ", kFloatSumsBytes)));
    EXPECT_THAT(MessageOf(tag), HasSubstr(absl::StrCat(kFloatSumsBytes - 4096, " are free")));
  }
  EXPECT_EQ(View().committed_step, 0U);
  for (uint32_t rank = 0; rank < 2; ++rank) {
    node_.SetAttempt(sessions_[rank], 1);
    DeliverOwn(rank, 1);
  }
  EXPECT_THAT(StepAll(1), Each(ErrorId::kNone));
}

TEST(NodeStateAccumulateAttach, IsAskedForByTheFirstSessionWhereItTakesMemory) {
  for (const auto dtype : {protocol::DType::kBFloat16, protocol::DType::kFloat32}) {
    ShardedJob job(MakeShardedLayout({{{.rows = 20}}}, {.dtype = dtype}), 2);
    const uint64_t first = job.node_.AttachOnly(job.layout_, {.rank = 0});
    ASSERT_OK(job.StatusOf(first));
    const uint64_t second = job.node_.AttachOnly(job.layout_, {.rank = 1, .accumulate = true});
    EXPECT_EQ(protocol::IdOf(job.StatusOf(second)),
              dtype == protocol::DType::kFloat32 ? ErrorId::kNone : ErrorId::kRange);
  }
}

}  // namespace
}  // namespace forebay::daemon::node_state_accumulate_test
