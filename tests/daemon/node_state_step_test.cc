// SPDX-License-Identifier: Apache-2.0
// Goal    A step is a barrier over all ranks and is applied exactly once. Repeated steps, skipped steps, scalars that differ
//         between ranks, and bad hyperparameters are refused. Norm and clipping are those of torch. Groups without a gradient
//         are not changed. A fetch waits for the update of its own group only.
// Method  The harness drives the state machine; each test chooses which tasks end and when, and
//         reads actions and answers.

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "daemon/core/base/limits.h"
#include "daemon/core/update/step_pipeline.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/node_harness.h"

namespace forebay::daemon::node_state_step_test {
namespace {

using ::forebay::testing::MakeLayout;
using ::forebay::testing::NodeHarness;
using ::forebay::testing::RoomyOptions;
using protocol::ErrorId;
using protocol::HyperParams;
using protocol::StepRequest;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class NodeStateStep : public ::testing::Test {
 protected:
  void SetUp() override {
    for (uint32_t rank = 0; rank < 2; ++rank) {
      sessions_.push_back(node_.Attach(layout_, {.rank = rank}));
    }
  }
  void TearDown() override { EXPECT_EQ(node_.fault(), ""); }

  void DeliverAll(uint64_t step) {
    for (uint32_t group = 0; group < 3; ++group) {
      for (const uint64_t session : sessions_) node_.Gradient(session, group, step);
      node_.RunTasks();
    }
  }
  ErrorId StepBoth(uint64_t step, double max_grad_norm = 0) {
    const uint64_t a = node_.Step(sessions_[0], step, 0.1, max_grad_norm);
    last_ = node_.Step(sessions_[1], step, 0.1, max_grad_norm);
    node_.RunTasks();
    EXPECT_EQ(node_.ErrorOf(a), node_.ErrorOf(last_));
    return node_.ErrorOf(last_);
  }
  std::string MessageOf(uint64_t tag) const {
    return std::string(node_.answer(tag)->status.message());
  }
  // Delivers every group on all ranks, and makes the workers report `sums[group]` as its sum of squares.
  void FinishSums(const std::vector<double>& sums) {
    for (size_t group = 0; group < sums.size(); ++group) {
      for (const uint64_t session : sessions_) {
        node_.Gradient(session, static_cast<uint32_t>(group), 1);
      }
      ASSERT_EQ(node_.Running<AddGradients>().size(), 1U);
      TaskDone done = node_.model().Finish(node_.Running<AddGradients>()[0].task);
      done.squares = {};
      done.squares.AddChunk(sums[group]);
      node_.Send(done);
    }
  }

  std::shared_ptr<const protocol::Layout> layout_ = MakeLayout({200, 100, 130});
  NodeHarness node_{RoomyOptions()};
  std::vector<uint64_t> sessions_;
  uint64_t last_ = 0;
};

TEST_F(NodeStateStep, IsABarrierThatIsAppliedOnce) {
  DeliverAll(1);
  const uint64_t a = node_.Step(sessions_[0], 1);
  node_.RunTasks();
  EXPECT_EQ(node_.answer(a), nullptr);
  EXPECT_TRUE(node_.Logged<UpdateBlock>().empty()) << "nothing is touched before all have called";
  const uint64_t b = node_.Step(sessions_[1], 1);
  EXPECT_EQ(node_.Logged<StepCalled>().size(), 1U);
  node_.RunTasks();
  for (const uint64_t tag : {a, b}) {
    ASSERT_EQ(node_.ErrorOf(tag), ErrorId::kNone);
    EXPECT_EQ(node_.answer(tag)->completion.committed_step, 1U);
  }
  EXPECT_EQ(node_.Logged<StepCommitted>().size(), 1U);
  EXPECT_EQ(node_.Logged<StepPublished>().size(), 1U);
  EXPECT_EQ(node_.Logged<UpdateBlock>().size(), node_.FindJob("job")->blocks) << "once";
  EXPECT_EQ(node_.model().WrittenSteps(1).size(), node_.FindJob("job")->blocks);
}

TEST_F(NodeStateStep, ARepeatIsANoOpWithTheSameAnswer) {
  DeliverAll(1);
  ASSERT_EQ(StepBoth(1, /*max_grad_norm=*/0.001), ErrorId::kNone);
  const double norm = node_.answer(last_)->completion.norm;
  EXPECT_GT(norm, 0);
  const size_t updates = node_.Logged<UpdateBlock>().size();
  const uint64_t again = node_.Step(sessions_[0], 1);
  ASSERT_EQ(node_.ErrorOf(again), ErrorId::kNone) << "at once";
  EXPECT_EQ(node_.answer(again)->completion.flags,
            protocol::kStepRepeated | protocol::kStepClipped);
  EXPECT_EQ(node_.answer(again)->completion.norm, norm);
  node_.RunTasks();
  EXPECT_EQ(node_.Logged<UpdateBlock>().size(), updates);
}

TEST_F(NodeStateStep, ZeroAndGapsAreRefused) {
  EXPECT_EQ(node_.ErrorOf(node_.Step(sessions_[0], 0)), ErrorId::kStep);
  EXPECT_EQ(node_.ErrorOf(node_.Step(sessions_[0], 2)), ErrorId::kStep);
  DeliverAll(1);
  ASSERT_EQ(StepBoth(1), ErrorId::kNone);
  const uint64_t gap = node_.Step(sessions_[0], 3);
  EXPECT_EQ(node_.ErrorOf(gap), ErrorId::kStep);
  EXPECT_THAT(MessageOf(gap), AllOf(HasSubstr("step 3"), HasSubstr("committed step is 1")));
  EXPECT_EQ(node_.ErrorOf(node_.Step(sessions_[0], 0)), ErrorId::kStep);
}

TEST_F(NodeStateStep, OtherScalarsAreRefusedOnBothRanksAndTheGradientsAreKept) {
  DeliverAll(1);
  const uint64_t a = node_.Step(sessions_[0], 1, 0.1);
  const uint64_t b = node_.Step(sessions_[1], 1, 0.25);
  for (const uint64_t tag : {a, b}) {
    EXPECT_EQ(node_.ErrorOf(tag), ErrorId::kStep);
    EXPECT_THAT(MessageOf(tag),
                AllOf(HasSubstr("ranks 0 and 1"), HasSubstr("lr"), HasSubstr("0.1 and 0.25")));
  }
  ASSERT_EQ(StepBoth(1), ErrorId::kNone);
  EXPECT_EQ(node_.model().committed_gradients(1).size(), 3U);
}

TEST_F(NodeStateStep, ExtraStateMayDifferBetweenRanks) {
  const uint64_t a = node_.Step(sessions_[0], 1, 0.1, 0, /*extra_state_bytes=*/10);
  const uint64_t b = node_.Step(sessions_[1], 1, 0.1, 0, /*extra_state_bytes=*/64);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(a), ErrorId::kNone);
  EXPECT_EQ(node_.ErrorOf(b), ErrorId::kNone);
  // The next attach gets the committed extra_state. Steps alternate between two slots for extra_state.
  node_.End(sessions_[1], EndCause::kDetached);
  sessions_[1] = node_.Attach(layout_, {.rank = 1});
  const AnswerAttach first = *node_.attached(sessions_[1]);
  EXPECT_EQ(first.committed_step, 1U);
  EXPECT_EQ(first.extra_state_bytes, 64U);
  const CopyToStepArena copied = node_.Logged<CopyToStepArena>().back();
  EXPECT_EQ(copied.bytes, 64U);
  EXPECT_EQ(copied.step_offset_bytes, first.extra_state_offset);
  node_.Step(sessions_[0], 2, 0.1, 0, 10);
  node_.Step(sessions_[1], 2, 0.1, 0, 0);
  node_.RunTasks();
  node_.End(sessions_[1], EndCause::kDetached);
  sessions_[1] = node_.Attach(layout_, {.rank = 1});
  EXPECT_EQ(node_.attached(sessions_[1])->extra_state_bytes, 0U);
  EXPECT_NE(node_.attached(sessions_[1])->extra_state_offset, first.extra_state_offset);
}

TEST_F(NodeStateStep, LambGoesOverEveryBlockTwiceAndScalesTheSecondTime) {
  protocol::LayoutSpec spec = layout_->spec();
  spec.optimizer = protocol::Optimizer::kLamb;
  auto made = protocol::Layout::Create(spec);
  ASSERT_TRUE(made.ok());
  layout_ = std::make_shared<const protocol::Layout>(*std::move(made));
  for (uint32_t rank = 0; rank < 2; ++rank) {
    sessions_[rank] = node_.Attach(layout_, {.job = "lamb", .rank = rank});
  }
  DeliverAll(1);
  EXPECT_EQ(StepBoth(1), ErrorId::kNone);
  const std::vector<UpdateBlock> updates = node_.Logged<UpdateBlock>();
  ASSERT_GT(updates.size(), 0U);
  ASSERT_EQ(updates.size() % 2, 0U);
  for (size_t i = 0; i < updates.size(); ++i) {
    const bool first = i < updates.size() / 2;
    EXPECT_EQ(updates[i].pass, first ? UpdatePass::kNorms : UpdatePass::kWhole);
    for (const UpdateSegment& segment : updates[i].segments) {
      EXPECT_EQ(segment.trust, first ? 1.0F : 0.5F) << "parameter " << segment.param;
    }
  }
}

TEST_F(NodeStateStep, HyperParametersAreChecked) {
  const StepRequest good{
      .step = 1, .param_groups = 1, .extra_state_bytes = 0, .max_grad_norm = 0, .grad_scale = 1};
  const HyperParams hyper{
      .lr = 0.1, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01};
  const auto refused = [&](const StepRequest& request, const HyperParams& params) {
    node_.OverrideStepRequest(request, {params});
    return node_.ErrorOf(node_.Step(sessions_[0], 1));
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double inf = std::numeric_limits<double>::infinity();
  for (double HyperParams::*member : {&HyperParams::lr, &HyperParams::beta1, &HyperParams::beta2,
                                      &HyperParams::eps, &HyperParams::weight_decay}) {
    // 1e300 and -1e300 are not finite in float32.
    for (const double bad : {nan, inf, -inf, 1e300, -1e300}) {
      HyperParams params = hyper;
      params.*member = bad;
      EXPECT_EQ(refused(good, params), ErrorId::kOption) << bad;
    }
  }
  for (const double beta : {-0.1, 1.0}) {
    HyperParams params = hyper;
    params.beta1 = beta;
    EXPECT_EQ(refused(good, params), ErrorId::kOption) << beta;
  }
  for (const double eps : {0.0, 1e-300}) {  // 1e-300 is 0 in float32.
    HyperParams no_eps = hyper;
    no_eps.eps = eps;
    EXPECT_EQ(refused(good, no_eps), ErrorId::kOption) << eps;
  }
  HyperParams growth = hyper;
  growth.weight_decay = -1;
  EXPECT_EQ(refused(good, growth), ErrorId::kOption);
  StepRequest request = good;
  request.max_grad_norm = -1;
  EXPECT_EQ(refused(request, hyper), ErrorId::kOption);
  for (const auto& [min, max] : {std::pair{0.0, 1.0}, {-1.0, 0.0}, {1.0, 2.0}, {nan, 1.0}}) {
    request = good;
    request.grad_min = min;
    request.grad_max = max;
    EXPECT_EQ(refused(request, hyper), ErrorId::kOption) << min << " to " << max;
  }
  request = good;
  request.grad_min = -1;
  request.grad_max = 1;
  request.max_grad_norm = 1;
  EXPECT_EQ(refused(request, hyper), ErrorId::kOption) << "bounds beside a norm";
  request = good;
  request.param_groups = 0;
  EXPECT_EQ(refused(request, hyper), ErrorId::kOption);
  for (const uint32_t groups : {protocol::kParamGroupRowsMin + 1, UINT32_MAX}) {
    request.param_groups = groups;
    EXPECT_EQ(refused(request, hyper), ErrorId::kOption) << groups;
  }
  request = good;
  request.extra_state_bytes = 65;
  EXPECT_EQ(refused(request, hyper), ErrorId::kExtraState);
  request = good;
  request.extra_state_bytes = 1;
  EXPECT_EQ(refused(request, hyper), ErrorId::kRange) << "not the length of the command";
  request = good;
  request.step = 2;
  EXPECT_EQ(refused(request, hyper), ErrorId::kStep) << "not the step of the command";
  EXPECT_EQ(StepBoth(1), ErrorId::kNone);
}

TEST_F(NodeStateStep, AGroupThatNobodyDeliveredIsLeftAlone) {
  node_.Gradient(sessions_[1], 1, 1);  // Rank 0's gradient counts as zero.
  ASSERT_EQ(StepBoth(1), ErrorId::kNone);
  DeliverAll(2);
  ASSERT_EQ(StepBoth(2), ErrorId::kNone);
  for (const UpdateBlock& update : node_.Logged<UpdateBlock>()) {
    const bool first_step = update.identity_after.written_step == 1;
    for (const UpdateSegment& segment : update.segments) {
      const bool in_group_1 =
          segment.weights.offset_bytes >= layout_->groups()[1].weights_offset_bytes &&
          segment.weights.offset_bytes < layout_->groups()[2].weights_offset_bytes;
      EXPECT_TRUE(in_group_1 || !first_step);
      // Updates that the optimizer has counted: in step 2, two for group 1, which also had a gradient in step 1, and one for
      // the other groups.
      EXPECT_EQ(node_.UpdateCount(segment), in_group_1 && !first_step ? 2U : 1U);
    }
  }
}

TEST_F(NodeStateStep, OfAJobThatIsDeletedAfterItsRanksHaveDiedEndsWithIt) {
  // The ranks die either before the last gradient is added, or in the middle of the update.
  for (const bool updating : {false, true}) {
    SCOPED_TRACE(updating);
    for (uint64_t& session : sessions_) {
      if (updating) session = node_.Attach(layout_, {.rank = session == sessions_[0] ? 0U : 1U});
    }
    for (const uint64_t session : sessions_) node_.Gradient(session, 0, 1);
    for (const uint64_t session : sessions_) node_.Step(session, 1);
    ASSERT_EQ(node_.Running<AddGradients>().size(), 1U);
    if (updating) {
      node_.FinishAll<AddGradients>();
      ASSERT_FALSE(node_.Running<UpdateBlock>().empty());
    }
    for (const uint64_t session : sessions_) node_.End(session, EndCause::kLost);
    node_.Send(DeleteJobRequested{.request = 7, .uid = 1000, .job = "job"});
    node_.RunTasks();
    EXPECT_FALSE(node_.FindJob("job").has_value());
  }
}

TEST_F(NodeStateStep, WithoutAnyGradientIsCommitted) {
  EXPECT_EQ(StepBoth(1), ErrorId::kNone);
  EXPECT_TRUE(node_.Logged<UpdateBlock>().empty());
  EXPECT_EQ(node_.FindJob("job")->committed_step, 1U);
}

TEST_F(NodeStateStep, ScalesByTheWorldWithoutClipping) {
  DeliverAll(1);
  ASSERT_EQ(StepBoth(1), ErrorId::kNone);
  EXPECT_EQ(node_.Logged<UpdateBlock>()[0].segments[0].scalars.grad_scale, 0.5F);
  EXPECT_EQ(node_.answer(last_)->completion.norm, 0.0);
  EXPECT_EQ(node_.answer(last_)->completion.flags, 0);
}

TEST_F(NodeStateStep, ClipsAsTorchDoes) {
  // The norm of the sum over two ranks is 10, so that the norm of the mean is 5.
  FinishSums({36.0, 64.0, 0.0});
  ASSERT_EQ(StepBoth(1, /*max_grad_norm=*/2.0), ErrorId::kNone);
  EXPECT_EQ(node_.answer(last_)->completion.norm, 5.0);
  EXPECT_EQ(node_.answer(last_)->completion.flags, protocol::kStepClipped);
  EXPECT_EQ(node_.Logged<UpdateBlock>()[0].segments[0].scalars.grad_scale,
            static_cast<float>(0.5 * (2.0 / (5.0 + 1e-6))));
}

TEST_F(NodeStateStep, TakesAnyFactorOfTheCallers) {
  node_.set_grad_scale(0);
  FinishSums({36.0, 64.0, 0.0});
  ASSERT_EQ(StepBoth(1, /*max_grad_norm=*/2.0), ErrorId::kNone);
  EXPECT_EQ(node_.answer(last_)->completion.norm, 0.0);
  EXPECT_EQ(node_.Logged<UpdateBlock>()[0].segments[0].scalars.grad_scale, 0.0F);
  const size_t updates = node_.Logged<UpdateBlock>().size();
  node_.set_grad_scale(-3);
  DeliverAll(2);
  ASSERT_EQ(StepBoth(2), ErrorId::kNone);
  EXPECT_EQ(node_.Logged<UpdateBlock>()[updates].segments[0].scalars.grad_scale, -1.5F);
}

TEST_F(NodeStateStep, DoesNotClipANormBelowTheMaximum) {
  FinishSums({36.0, 64.0, 0.0});
  ASSERT_EQ(StepBoth(1, /*max_grad_norm=*/5.1), ErrorId::kNone);
  EXPECT_EQ(node_.answer(last_)->completion.norm, 5.0);
  EXPECT_EQ(node_.answer(last_)->completion.flags, 0);
  EXPECT_EQ(node_.Logged<UpdateBlock>()[0].segments[0].scalars.grad_scale, 0.5F);
}

TEST_F(NodeStateStep, MastersThatOverflowAreCountedAndTheStepIsCommitted) {
  DeliverAll(1);
  node_.model().set_masters_overflow(7);
  ASSERT_EQ(StepBoth(1), ErrorId::kOverflow);
  EXPECT_THAT(MessageOf(last_), HasSubstr("7 parameters"));
  EXPECT_EQ(node_.answer(last_)->completion.committed_step, 1U);
  EXPECT_EQ(node_.FindJob("job")->committed_step, 1U);
}

TEST_F(NodeStateStep, AFetchWaitsForTheUpdateOfItsOwnGroupAlone) {
  node_.ReleaseFetched(sessions_[0], node_.Fetch(sessions_[0], 0));  // answered at once
  DeliverAll(1);
  node_.Step(sessions_[0], 1);
  const uint64_t early = node_.Fetch(sessions_[0], 0);
  EXPECT_EQ(node_.answer(early), nullptr) << "its rank waits in step";
  // Answered, because rank 1 has not called step.
  node_.ReleaseFetched(sessions_[1], node_.Fetch(sessions_[1], 0));
  const uint64_t step = node_.Step(sessions_[1], 1);
  const uint64_t last_group = node_.Fetch(sessions_[1], 2);
  EXPECT_EQ(node_.answer(early), nullptr);
  while (node_.answer(early) == nullptr) {
    ASSERT_FALSE(node_.Running<UpdateBlock>().empty());
    node_.Finish(node_.Running<UpdateBlock>()[0].task);
  }
  EXPECT_EQ(node_.answer(step), nullptr) << "fetchable before the step has ended";
  EXPECT_EQ(node_.answer(last_group), nullptr);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(last_group), ErrorId::kNone);
  const protocol::Completion& completion = node_.answer(last_group)->completion;
  EXPECT_EQ(completion.offset_bytes, layout_->groups()[2].weights_offset_bytes);
  EXPECT_EQ(completion.length_bytes, layout_->partition_bytes(2));
}

TEST_F(NodeStateStep, AnUpdateRunsOnEachWorkerAndOneWaitsForIt) {
  DeliverAll(1);
  node_.Step(sessions_[0], 1);
  node_.Step(sessions_[1], 1);
  EXPECT_EQ(node_.Running<UpdateBlock>().size(), RoomyOptions().workers * kUpdatesPerWorker);
  node_.RunTasks();
}

TEST_F(NodeStateStep, TheTraceIsTheOrderOfFirstFetchesOfTheLastStep) {
  for (const uint32_t group : {1U, 0U, 1U, 2U, 0U}) {
    node_.ReleaseFetched(sessions_[0], node_.Fetch(sessions_[0], group));
  }
  DeliverAll(1);
  EXPECT_THAT(node_.FindJob("job")->trace, ElementsAre());
  ASSERT_EQ(StepBoth(1), ErrorId::kNone);
  node_.Fetch(sessions_[0], 2);
  node_.End(sessions_[1], EndCause::kDetached);
  sessions_[1] = node_.Attach(layout_, {.rank = 1});
  EXPECT_THAT(node_.attached(sessions_[1])->trace, ElementsAre(1, 0, 2));
}

TEST_F(NodeStateStep, ASecondCallOfARankThatWaitsIsRefused) {
  node_.Step(sessions_[0], 1);
  EXPECT_EQ(node_.ErrorOf(node_.Step(sessions_[0], 1)), ErrorId::kStep);
  EXPECT_EQ(node_.Logged<CopyStepRequest>().size(), 1U);
}

}  // namespace
}  // namespace forebay::daemon::node_state_step_test
