// SPDX-License-Identifier: Apache-2.0
// Goal    With sharded attachment a step covers the whole job. A rank's gradients are already reduced and wait for no other
//         rank. A step updates every owner's part of a parameter, or none. Norm and clipping use the whole gradient. Any rank
//         and any reader reads every partition and every state.
// Method  The harness with layouts that torch.chunk would produce, including uneven, empty and strided shards. Its model
//         reports a fault if an update uses the gradient of other weights, or of a rank that does not own them.

#include <cmath>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/units.h"
#include "tests/support/node_harness.h"
#include "tests/support/sharded_job.h"
#include "tests/support/status_test.h"

namespace forebay::daemon::node_state_sharded_step_test {
namespace {

using ::forebay::testing::HasError;
using ::forebay::testing::MakeShardedLayout;
using ::forebay::testing::RoomyOptions;
using ::forebay::testing::ShardedJob;
using ::forebay::testing::SwapPaths;
using ::forebay::testing::ThreeGroups;
using protocol::DType;
using protocol::ErrorId;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr ErrorId kUnanswered = ErrorId::kTimeout;  // ErrorOf() of an unanswered command.

class NodeStateShardedStep : public ::testing::Test, protected ShardedJob {
 protected:
  NodeStateShardedStep() : ShardedJob(ThreeGroups(), 2) {}
  void SetUp() override { AttachAll(); }
  void TearDown() override { EXPECT_EQ(node_.fault(), ""); }
};

// ----------------------------------------------------------------------------------- gradients

TEST_F(NodeStateShardedStep, AStepUpdatesEveryPartitionWithItsOwnersGradient) {
  TrainStep(1);
  for (const AddGradients& add : node_.Logged<AddGradients>()) {
    EXPECT_TRUE(add.assign);
    EXPECT_EQ(add.sources.size(), 1U);
  }
  EXPECT_THAT(node_.Logged<AddGradients>(), SizeIs(5));
  EXPECT_THAT(node_.Logged<SumGradient>(), IsEmpty());
  EXPECT_EQ(node_.Logged<UpdateBlock>().size(), View().blocks) << "once";
  const auto written = node_.model().WrittenSteps(1);
  EXPECT_EQ(written.size(), View().blocks);
  for (const auto& [block, step] : written) EXPECT_EQ(step, 1U) << block;
  const auto& used = node_.model().committed_gradients(1);
  EXPECT_EQ(used.size(), 4U);
  for (const uint32_t param : {0U, 1U, 3U}) {
    ASSERT_EQ(used.at(param).size(), 2U) << param;
    for (uint32_t rank = 0; rank < 2; ++rank) EXPECT_EQ(used.at(param)[rank].rank, rank);
  }
  EXPECT_THAT(used.at(2), SizeIs(1));
}

TEST(NodeStateShardedArena, AGradientWaitsForNoOtherRankWithTheSmallestArena) {
  ShardedJob job(ThreeGroups(), 2);
  const uint64_t least = 2 * job.layout_->largest_gradient_bytes();
  job.AttachAll(least);
  // First while the other rank is attached but has delivered no gradient, then after the other rank has detached.
  for (const bool detached : {false, true}) {
    SCOPED_TRACE(detached);
    if (detached) {
      for (const uint64_t session : job.sessions_) job.node_.End(session, EndCause::kLost);
      job.AttachAll(least);
      job.node_.End(job.sessions_[1], EndCause::kDetached);
    }
    for (const uint32_t partition : job.OwnedBy(0)) {
      const uint64_t tag = job.node_.Gradient(job.sessions_[0], partition, 1);
      ASSERT_EQ(job.node_.Running<AddGradients>().size(), 1U) << "at once";
      job.node_.FinishAll<AddGradients>();
      EXPECT_EQ(job.node_.ErrorOf(tag), ErrorId::kNone);
    }
  }
  EXPECT_THAT(job.node_.Logged<CopyToStepArena>(), IsEmpty());
  EXPECT_EQ(job.node_.fault(), "");
}

TEST_F(NodeStateShardedStep, TheNormIsThatOfTheReducedGradient) {
  DeliverSums({4.0, 12.0, 3.0, 5.0, 1.0});
  EXPECT_THAT(StepAll(1, /*max_grad_norm=*/2.0), Each(ErrorId::kNone));
  for (const uint64_t tag : tags_) {
    EXPECT_EQ(node_.answer(tag)->completion.norm, 5.0) << "not divided by the world size";
    EXPECT_EQ(node_.answer(tag)->completion.flags, protocol::kStepClipped);
  }
  for (const UpdateBlock& update : node_.Logged<UpdateBlock>()) {
    for (const UpdateSegment& segment : update.segments) {
      EXPECT_EQ(segment.scalars.grad_scale, static_cast<float>(2.0 / (5.0 + 1e-6)));
    }
  }
}

TEST_F(NodeStateShardedStep, IsNotScaledWithoutClipping) {
  DeliverSums({4.0, 12.0, 3.0, 5.0, 1.0});
  EXPECT_THAT(StepAll(1, /*max_grad_norm=*/5.1), Each(ErrorId::kNone));
  EXPECT_EQ(node_.answer(tags_[0])->completion.norm, 5.0);
  EXPECT_EQ(node_.answer(tags_[0])->completion.flags, 0);
  EXPECT_EQ(node_.Logged<UpdateBlock>()[0].segments[0].scalars.grad_scale, 1.0F);
}

// 2⁵³ + 7, truncated to 53 bits, is 2⁵³ + 6; added in double one by one it would stay 2⁵³.
TEST(NodeStateShardedNorm, DoesNotDependOnTheNumberOfShards) {
  ShardedJob job(MakeShardedLayout({{{.rows = 8 * 64}}}, {.ranks = 8}), 8);
  job.AttachAll();
  std::vector<double> sums(8, 1.0);
  sums[0] = std::ldexp(1.0, 53);
  job.DeliverSums(sums);
  EXPECT_THAT(job.StepAll(1, /*max_grad_norm=*/1e30), Each(ErrorId::kNone));
  const double norm = job.node_.answer(job.tags_[0])->completion.norm;
  EXPECT_EQ(norm, std::sqrt(std::ldexp(1.0, 53) + 6));
  EXPECT_NE(norm, std::sqrt(std::ldexp(1.0, 53)));
}

TEST(NodeStateShardedDType, AccumulatorsHaveTheTypeOfTheGradients) {
  const struct {
    DType weights;
    std::optional<DType> gradients;
    DType sums;
  } cases[] = {{DType::kFloat32, std::nullopt, DType::kFloat32},
               {DType::kBFloat16, std::nullopt, DType::kBFloat16},
               {DType::kBFloat16, DType::kBFloat16, DType::kBFloat16},
               {DType::kBFloat16, DType::kFloat32, DType::kFloat32}};
  for (const auto& test : cases) {
    SCOPED_TRACE(protocol::Name(test.sums));
    ShardedJob job(
        MakeShardedLayout({{{.rows = 2001}}, {{.rows = 77}}},
                          {.dtype = test.weights,
                           .grad_dtype = test.gradients,
                           .format = test.weights == DType::kBFloat16 ? protocol::Format::kExact
                                                                      : protocol::Format::kFp32}),
        2);
    job.AttachAll();
    const uint64_t width = protocol::SizeBytes(test.sums);
    uint64_t sums_bytes = 0;
    for (uint32_t i = 0; i < 4; ++i) {
      const uint64_t bytes = job.layout_->partitions()[i].elems * width;
      EXPECT_EQ(job.layout_->gradient_bytes(i), bytes);
      sums_bytes += protocol::RoundUp(bytes, protocol::kCacheLineBytes);
    }
    EXPECT_EQ(job.node_.Logged<CreateJobMemory>()[0].step_bytes,
              protocol::RoundUp(sums_bytes, protocol::kPageBytes) + protocol::kPageBytes)
        << "sums and extra_state; no overflow";
    job.TrainStep(1);
    for (const AddGradients& add : job.node_.Logged<AddGradients>()) {
      EXPECT_EQ(add.dtype, test.sums);
      EXPECT_EQ(add.sum_dtype, test.sums);
    }
    for (const UpdateBlock& update : job.node_.Logged<UpdateBlock>()) {
      EXPECT_EQ(update.sum_dtype, test.sums);
    }
    EXPECT_EQ(job.node_.fault(), "");
  }
}

// A partition of n elements of four bytes refuses a gradient of 2n bytes.
TEST(NodeStateShardedDType, Float32GradientsOf16BitWeightsHaveFourBytesAnElement) {
  ShardedJob job(MakeShardedLayout({{{.rows = 2001}}},
                                   {.dtype = DType::kBFloat16, .grad_dtype = DType::kFloat32}),
                 2);
  job.AttachAll();
  protocol::Command command{};
  command.op = static_cast<uint16_t>(protocol::Op::kGradReady);
  command.step = 1;
  command.length_bytes = job.layout_->partition_bytes(0);
  EXPECT_EQ(job.node_.ErrorOf(job.node_.Command(job.sessions_[0], command)), ErrorId::kRange);
  command.length_bytes = 4 * job.layout_->partitions()[0].elems;
  EXPECT_NE(job.node_.ErrorOf(job.node_.Command(job.sessions_[0], command)), ErrorId::kRange);
  ASSERT_EQ(job.node_.Running<AddGradients>().size(), 1U);
  EXPECT_EQ(job.node_.Running<AddGradients>()[0].elems, job.layout_->partitions()[0].elems);
}

TEST_F(NodeStateShardedStep, AParameterHasAGradientOnAllItsOwnersOrOnNone) {
  DeliverOwn(0, 1);
  node_.Gradient(sessions_[1], 4, 1);  // Rank 1 delivers p3, but no part of p0 and p1.
  node_.RunTasks();
  EXPECT_THAT(StepAll(1), Each(ErrorId::kGradPartial));
  for (const uint64_t tag : tags_) {
    EXPECT_THAT(MessageOf(tag), AllOf(HasSubstr("rank 1"), HasSubstr("150"), HasSubstr("p0")));
  }
  EXPECT_THAT(node_.Logged<UpdateBlock>(), IsEmpty());
  EXPECT_EQ(View().committed_step, 0U);
  node_.Gradient(sessions_[1], 1, 1);
  node_.RunTasks();
  EXPECT_THAT(StepAll(1), Each(ErrorId::kNone));
  EXPECT_THAT(node_.Logged<AddGradients>(), SizeIs(5)) << "what was there was kept";
  EXPECT_EQ(node_.model().committed_gradients(1).size(), 4U);
}

TEST_F(NodeStateShardedStep, ARankSaysOfItsOwnPartAloneWhatItHasDelivered) {
  for (uint32_t rank = 0; rank < 2; ++rank) DeliverOwn(rank, 1);
  // Rank 0 owns all of p2, so that no part of p2 is missing.
  node_.SetPresent(sessions_[1], 2, true);
  EXPECT_THAT(StepAll(1), Each(ErrorId::kNone));
  node_.Gradient(sessions_[1], 4, 2);
  node_.RunTasks();
  node_.SetPresent(sessions_[1], 0, true);
  const uint64_t refused = node_.Step(sessions_[1], 2);
  EXPECT_EQ(node_.ErrorOf(refused), ErrorId::kGradPartial);
  EXPECT_THAT(MessageOf(refused), AllOf(HasSubstr("delivered 0 of its 150"), HasSubstr("p0")));
}

TEST_F(NodeStateShardedStep, AGroupWithoutAGradientIsLeftAlone) {
  node_.Gradient(sessions_[0], 3, 1);
  node_.Gradient(sessions_[1], 4, 1);
  EXPECT_THAT(StepAll(1), Each(ErrorId::kNone));
  std::set<uint32_t> updated;
  for (const UpdateBlock& update : node_.Logged<UpdateBlock>()) {
    for (const UpdateSegment& segment : update.segments) updated.insert(segment.param);
  }
  EXPECT_THAT(updated, ElementsAre(3U));
}

TEST_F(NodeStateShardedStep, AGradientThatIsNotFiniteRefusesTheStepOfEveryRank) {
  DeliverOwn(0, 1);
  const uint64_t bad = node_.Gradient(sessions_[1], 1, 1, /*finite=*/false);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(bad), ErrorId::kNonfinite);
  EXPECT_THAT(MessageOf(bad), AllOf(HasSubstr("rank 1"), HasSubstr("group 0 (g0 of rank 1)")));
  EXPECT_THAT(StepAll(1), Each(ErrorId::kNonfinite));
  TrainStep(1);
}

TEST_F(NodeStateShardedStep, ALostRankDropsTheStepOfAll) {
  DeliverOwn(0, 1);
  const uint64_t called = node_.Step(sessions_[0], 1);
  node_.End(sessions_[1], EndCause::kLost);
  EXPECT_EQ(node_.ErrorOf(called), ErrorId::kRankLost);
  AttachAll();
  DeliverOwn(1, 1);
  EXPECT_THAT(StepAll(1), Each(ErrorId::kGradPartial)) << "rank 0 delivers anew";
  DeliverOwn(0, 1);
  EXPECT_THAT(StepAll(1), Each(ErrorId::kNone));
}

// ---------------------------------------------------------------------------------------- reads

TEST_F(NodeStateShardedStep, AStepOfARankWithLeasesNamesWhoseWeightsTheyAreOf) {
  node_.Fetch(sessions_[1], 0);
  const uint64_t refused = node_.Step(sessions_[1], 1);
  EXPECT_EQ(node_.ErrorOf(refused), ErrorId::kLease);
  EXPECT_THAT(MessageOf(refused), HasSubstr("g0 of rank 0"));
}

TEST_F(NodeStateShardedStep, ALeaseOfAReaderDelaysTheUpdateOfThatPartitionAlone) {
  const uint64_t reader = node_.AttachReader(layout_);
  ASSERT_OK(StatusOf(reader));
  const uint64_t fetch = node_.Fetch(reader, 1);
  ASSERT_EQ(node_.ErrorOf(fetch), ErrorId::kNone);
  node_.model().HoldWeights(reader, node_.answer(fetch)->completion);
  for (uint32_t rank = 0; rank < 2; ++rank) DeliverOwn(rank, 1);
  EXPECT_THAT(StepAll(1), Each(kUnanswered));
  ASSERT_THAT(node_.Logged<StartLeaseTimer>(), SizeIs(1));
  std::set<uint32_t> updated;
  for (const UpdateBlock& update : node_.Logged<UpdateBlock>()) updated.merge(PartitionsOf(update));
  EXPECT_THAT(updated, ElementsAre(0, 2, 3, 4)) << "the other part of g0 too";
  node_.model().ReleaseWeights(reader);
  node_.Send(LeaseTimeExpired{.job = 1, .step = 1});
  node_.RunTasks();
  EXPECT_THAT(node_.close_reason(reader), HasError(ErrorId::kLease));
  EXPECT_THAT(std::string(node_.close_reason(reader).message()), HasSubstr("g0 of rank 1"));
  for (const uint64_t tag : tags_) EXPECT_EQ(node_.ErrorOf(tag), ErrorId::kNone);
}

TEST_F(NodeStateShardedStep, AFetchWaitsForTheUpdateOfItsOwnPartitionAlone) {
  for (const uint32_t partition : {1U, 0U}) {
    SCOPED_TRACE(partition);
    ShardedJob job(ThreeGroups(), 2);
    job.AttachAll();
    for (uint32_t rank = 0; rank < 2; ++rank) job.DeliverOwn(rank, 1);
    for (const uint64_t session : job.sessions_) job.tags_.push_back(job.node_.Step(session, 1));
    const uint64_t fetch = job.node_.Fetch(job.sessions_[0], partition);
    uint64_t updates_left = 0;  // Blocks of the partition's boxes. No box fills its last block.
    for (const protocol::BoxPlace& place : job.layout_->boxes_of(partition)) {
      updates_left += (place.box.elems() + 63) / 64;
    }
    while (job.node_.answer(fetch) == nullptr) {
      ASSERT_GT(updates_left, 0U);
      const UpdateBlock update = job.node_.Running<UpdateBlock>()[0];
      if (job.PartitionsOf(update).contains(partition)) --updates_left;
      job.node_.Finish(update.task);
    }
    EXPECT_EQ(updates_left, 0U);
    EXPECT_EQ(job.node_.ErrorOf(fetch), ErrorId::kNone);
    EXPECT_EQ(job.node_.ErrorOf(job.tags_[0]), kUnanswered) << "before the step has ended";
    job.node_.RunTasks();
    EXPECT_EQ(job.node_.fault(), "");
  }
}

TEST_F(NodeStateShardedStep, TheTraceOfARankIsOfItsPartitionsAndThatOfTheJobOfGroups) {
  // The trace does not depend on the rank that fetches.
  for (const uint32_t partition : {4U, 0U, 1U, 3U, 2U}) {
    const uint64_t session = sessions_[partition % 2];
    node_.ReleaseFetched(session, node_.Fetch(session, partition));
  }
  TrainStep(1);
  EXPECT_THAT(View().trace, ElementsAre(2, 0, 1));
  for (const uint64_t session : sessions_) node_.End(session, EndCause::kDetached);
  node_.RunTasks();
  AttachAll();
  EXPECT_THAT(node_.attached(sessions_[0])->trace, ElementsAre(0, 3, 2));
  EXPECT_THAT(node_.attached(sessions_[1])->trace, ElementsAre(4, 1));
  const uint64_t reader = node_.AttachReader(layout_);
  EXPECT_THAT(node_.attached(reader)->trace, ElementsAre(4, 0, 1, 3, 2));
}

TEST_F(NodeStateShardedStep, StatesAreReadAcrossOwners) {
  TrainStep(1);
  // p0 changes its owner at element 151; p1's rows of 15 have 8 columns of rank 0 and 7 of rank 1.
  const struct {
    uint32_t param;
    uint64_t first;
    uint64_t elems;
    size_t pieces;
  } cases[] = {{0, 140, 20, 2}, {1, 3, 20, 3}, {1, 0, 300, 42}, {2, 0, 100, 2}};
  for (const auto& test : cases) {
    SCOPED_TRACE(::testing::Message() << "parameter " << test.param << " from " << test.first);
    const size_t before = node_.Logged<DecodeState>().size();
    // Rank 1 has no part of p2.
    const uint64_t tag = node_.ReadState(sessions_[1], test.param, test.first, test.elems);
    node_.RunTasks();
    ASSERT_EQ(node_.ErrorOf(tag), ErrorId::kNone);
    const std::vector<DecodeState> all = node_.Logged<DecodeState>();
    EXPECT_EQ(all.size() - before, test.pieces);
    uint64_t read = 0;
    for (size_t i = before; i < all.size(); ++i) {
      EXPECT_EQ(all[i].grad_offset_bytes, read * 4) << "pieces lie side by side";
      EXPECT_EQ(all[i].weights.offset_bytes, WeightsOffset(test.param, test.first + read));
      EXPECT_EQ(all[i].identity.written_step, 1U);
      read += all[i].elems;
    }
    EXPECT_EQ(read, test.elems);
  }
}

TEST_F(NodeStateShardedStep, FrozenParametersHaveWeightsAndNoStates) {
  // Parameter p1 is frozen and shares a group with the trained p0. Frozen p2 is the only parameter of its group.
  ShardedJob job(MakeShardedLayout({{{.rows = 301}, {.rows = 90, .trainable = false}},
                                    {{.rows = 50, .trainable = false}}}),
                 2);
  job.AttachAll();
  EXPECT_THAT(job.node_.Logged<CopyInitial>(), SizeIs(4)) << "frozen ones are written too";
  const uint64_t frozen = job.node_.Gradient(job.sessions_[0], 2, 1);
  EXPECT_EQ(job.node_.ErrorOf(frozen), ErrorId::kUnsupported);
  EXPECT_THAT(job.MessageOf(frozen), HasSubstr("g1 of rank 0"));
  for (uint32_t rank = 0; rank < 2; ++rank) {
    const uint64_t tag = job.node_.Gradient(job.sessions_[rank], rank, 1);
    job.node_.RunTasks();
    EXPECT_EQ(job.node_.ErrorOf(tag), ErrorId::kNone);
  }
  EXPECT_THAT(job.StepAll(1), Each(ErrorId::kNone));
  EXPECT_EQ(job.View().blocks, 6U) << "of 151 and 150 elements";
  for (const UpdateBlock& update : job.node_.Logged<UpdateBlock>()) {
    for (const UpdateSegment& segment : update.segments) EXPECT_EQ(segment.param, 0U);
  }
  EXPECT_EQ(job.node_.ErrorOf(job.node_.ReadState(job.sessions_[0], 1, 0, 10)), ErrorId::kRange);
  EXPECT_EQ(job.node_.ErrorOf(job.node_.Fetch(job.sessions_[0], 3)), ErrorId::kNone);
  EXPECT_EQ(job.node_.fault(), "");
}

// ---------------------------------------------------------------------------------------- on swap

// A job whose blocks belong to both owners. DRAM fits three blocks, and the node has three staging slots.
TEST(NodeStateShardedSwap, BlocksOfAllOwnersStreamThroughTheSlots) {
  constexpr uint64_t kBlockBytes = 8192;  // two planes of 64 float32, each on a page
  ShardedJob roomy(ThreeGroups(), 2);
  roomy.AttachAll();
  const uint64_t blocks = roomy.View().blocks;
  const uint64_t fixed_bytes = roomy.View().dram_bytes - blocks * kBlockBytes;
  NodeState::Options options = RoomyOptions();
  options.node_bytes = 3 * kBlockBytes;
  options.dram_limit_bytes = options.node_bytes + fixed_bytes + 3 * kBlockBytes;
  options.staging_slots = 3;
  options.staging_slot_bytes = kBlockBytes;
  options.swap = SwapPaths({2 * (blocks - 3) * kBlockBytes});
  ShardedJob job(ThreeGroups(), 2, options);
  job.AttachAll();
  ASSERT_EQ(job.View().blocks, blocks);
  ASSERT_EQ(job.View().resident_blocks, 3U);
  for (uint64_t step = 1; step <= 3; ++step) {
    job.TrainStep(step);
    const auto written = job.node_.model().WrittenSteps(1);
    EXPECT_EQ(written.size(), blocks);
    for (const auto& [block, written_step] : written) EXPECT_EQ(written_step, step) << block;
  }
  EXPECT_EQ(job.View().last_step_reads, blocks - 3);
  const uint64_t tag = job.node_.ReadState(job.sessions_[1], 0, 0, 301);
  job.node_.RunTasks();
  EXPECT_EQ(job.node_.ErrorOf(tag), ErrorId::kNone);
  EXPECT_EQ(job.node_.state().Node().staging_slots_used, 0U);
  // A step that is refused for a missing part retains the blocks that were read ahead.
  job.DeliverOwn(0, 4);
  EXPECT_THAT(job.StepAll(4), Each(ErrorId::kGradPartial));
  job.DeliverOwn(1, 4);
  EXPECT_THAT(job.StepAll(4), Each(ErrorId::kNone));
  EXPECT_EQ(job.View().committed_step, 4U);
  EXPECT_EQ(job.node_.fault(), "");
}

}  // namespace
}  // namespace forebay::daemon::node_state_sharded_step_test
