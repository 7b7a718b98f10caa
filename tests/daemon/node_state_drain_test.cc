// SPDX-License-Identifier: Apache-2.0
// Goal    A step that is answered at its decision is still applied completely, while the next step runs. No client gets partly
//         updated weights. No gradient of the next step overwrites one that this step still reads. Every operation that waits
//         for the end of a step is done after it, and none is forgotten.
// Method  The harness. Its model reports a fault if two tasks use the same bytes, if an update uses a gradient of another step,
//         or if a step is published before it is written. Tasks are ended one by one.

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "daemon/core/base/limits.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/node_harness.h"
#include "tests/support/sharded_job.h"
#include "tests/support/status_test.h"

namespace forebay::daemon::node_state_drain_test {
namespace {

using ::forebay::testing::MakeShardedLayout;
using ::forebay::testing::ShardedJob;
using ::forebay::testing::SwapPaths;
using protocol::ErrorId;
using protocol::StepAnswer;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr ErrorId kUnanswered = ErrorId::kTimeout;  // ErrorOf() of an unanswered command.
constexpr uint32_t kRanks = 2;
constexpr uint32_t kGroups = 6;
constexpr uint64_t kArenaBytes = 64 << 10;  // more than all gradients of a rank

// A layout of six groups in which each partition has two blocks.
std::shared_ptr<const protocol::Layout> SixGroups() {
  return MakeShardedLayout(std::vector<std::vector<testing::ShardedParam>>(
      kGroups, {{.rows = uint64_t{kRanks} * 1024}}));
}

// Options with DRAM for `resident_blocks` blocks of states.
NodeState::Options OptionsWith(uint64_t resident_blocks) {
  NodeState::Options options = testing::RoomyOptions();
  options.block_elems = 512;
  options.staging_slots = 2;
  options.staging_slot_bytes = 8192;
  options.swap = SwapPaths({4 << 20});
  ShardedJob job(SixGroups(), kRanks, options);
  job.AttachAll(kArenaBytes);
  options.dram_limit_bytes =
      job.node_.state().Node().dram_used_bytes -
      (job.View().blocks - resident_blocks) * (job.View().resident_bytes / job.View().blocks);
  return options;
}

class DrainJob : public ShardedJob {
 public:
  explicit DrainJob(const NodeState::Options& options) : ShardedJob(SixGroups(), kRanks, options) {
    AttachAll(kArenaBytes);
    node_.set_answered_when(StepAnswer::kCommitted);
  }
  void DeliverAll(uint64_t step) {
    for (uint32_t rank = 0; rank < kRanks; ++rank) DeliverOwn(rank, step);
  }
  // Calls step on every rank, without ending any task.
  std::vector<uint64_t> CallAll(uint64_t step) {
    std::vector<uint64_t> calls;
    for (const uint64_t session : sessions_) calls.push_back(node_.Step(session, step));
    return calls;
  }
  bool is_published() {
    const auto published = node_.Logged<StepPublished>();
    return !published.empty() && published.back().step == View().committed_step;
  }
  uint64_t running() { return node_.model().running().size(); }
  void FinishOne() { node_.Finish(node_.model().running().begin()->first); }
};

class NodeStateDrain : public ::testing::TestWithParam<uint32_t>, protected DrainJob {
 protected:
  NodeStateDrain() : DrainJob(OptionsWith(GetParam())) {}
  void TearDown() override { EXPECT_EQ(node_.fault(), ""); }
};

TEST_P(NodeStateDrain, TheAnswerIsTheDecision) {
  DeliverAll(1);
  const std::vector<uint64_t> calls = CallAll(1);
  for (const uint64_t call : calls) {
    ASSERT_EQ(node_.ErrorOf(call), ErrorId::kNone);
    EXPECT_EQ(node_.answer(call)->completion.committed_step, 1U);
  }
  EXPECT_FALSE(is_published());
  EXPECT_GT(running(), 0U);
  node_.RunTasks();
  EXPECT_TRUE(is_published());
  EXPECT_EQ(node_.Logged<UpdateBlock>().size(), View().blocks);
  for (const auto& [block, step] : node_.model().WrittenSteps(1)) EXPECT_EQ(step, 1U) << block;
}

TEST_P(NodeStateDrain, StepsFollowEachOther) {
  for (uint64_t step = 1; step <= 4; ++step) {
    // Fetches each partition before its gradient is delivered, as a forward and a backward pass do.
    for (uint32_t partition = 0; partition < layout_->partitions().size(); ++partition) {
      const uint64_t session = sessions_[layout_->partitions()[partition].owner];
      const uint64_t tag = node_.Fetch(session, partition);
      while (node_.ErrorOf(tag) == kUnanswered) FinishOne();
      node_.ReleaseFetched(session, tag);
    }
    std::vector<uint64_t> gradients;
    for (uint32_t partition = kGroups * kRanks; partition-- > 0;) {
      gradients.push_back(
          node_.Gradient(sessions_[layout_->partitions()[partition].owner], partition, step));
    }
    const std::vector<uint64_t> calls = CallAll(step);
    while (node_.ErrorOf(calls[0]) == kUnanswered) FinishOne();
    for (const uint64_t tag : gradients) EXPECT_EQ(node_.ErrorOf(tag), ErrorId::kNone);
  }
  node_.RunTasks();
  EXPECT_TRUE(is_published());
  EXPECT_EQ(node_.Logged<StepPublished>().size(),
            4U + (node_.Logged<StepPublished>()[0].step == 0));
}

TEST_P(NodeStateDrain, AFetchWaitsForTheBlocksOfItsPartitionAlone) {
  DeliverAll(1);
  CallAll(1);
  std::map<uint32_t, uint64_t> fetches;
  for (uint32_t partition = 0; partition < kGroups * kRanks; ++partition) {
    fetches[partition] = node_.Fetch(sessions_[layout_->partitions()[partition].owner], partition);
  }
  std::set<int64_t> answered_counts;
  while (running() > 0) {
    FinishOne();
    std::map<uint32_t, uint64_t> left;  // Blocks not yet updated, by partition.
    for (uint32_t partition = 0; partition < kGroups * kRanks; ++partition) left[partition] = 2;
    for (const UpdateBlock& begun : node_.Logged<UpdateBlock>()) {
      if (node_.model().running().contains(begun.task)) continue;
      for (const uint32_t partition : PartitionsOf(begun)) --left[partition];
    }
    for (const auto& [partition, tag] : fetches) {
      EXPECT_EQ(node_.ErrorOf(tag) == ErrorId::kNone, left[partition] == 0) << partition;
    }
    if (is_published()) continue;
    answered_counts.insert(std::ranges::count_if(
        fetches, [&](const auto& fetch) { return node_.ErrorOf(fetch.second) == ErrorId::kNone; }));
  }
  EXPECT_GT(answered_counts.size(), kGroups) << "one after the other, before the end";
}

TEST_P(NodeStateDrain, AGradientWaitsForTheBlocksOfItsPartitionAlone) {
  DeliverAll(1);
  CallAll(1);
  const size_t before = node_.Logged<AddGradients>().size();
  const std::vector<uint32_t> own = OwnedBy(0);
  const uint64_t last = node_.Gradient(sessions_[0], own.back(), 2);
  EXPECT_THAT(node_.Logged<AddGradients>(), SizeIs(before)) << "its sums are still read";
  const uint64_t first = node_.Fetch(sessions_[0], own.front());
  while (node_.ErrorOf(first) == kUnanswered) FinishOne();
  ASSERT_FALSE(is_published());
  EXPECT_EQ(node_.ErrorOf(last), kUnanswered);
  const uint64_t tag = node_.Gradient(sessions_[0], own.front(), 2);
  EXPECT_THAT(node_.Logged<AddGradients>(), SizeIs(before + 1)) << "at once";
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(last), ErrorId::kNone);
  EXPECT_EQ(node_.ErrorOf(tag), ErrorId::kNone);
}

TEST_P(NodeStateDrain, BlocksAreUpdatedInTheOrderOfTheNextForward) {
  // The ranks fetch the groups in turn, the last group first.
  std::vector<uint32_t> order;
  for (uint32_t group = kGroups; group-- > 0;) {
    for (uint32_t rank = 0; rank < kRanks; ++rank) order.push_back(group * kRanks + rank);
  }
  size_t before = 0;
  for (uint64_t step = 1; step <= 2; ++step) {  // Step 1 reads some blocks ahead in another order.
    before = node_.Logged<UpdateBlock>().size();
    for (const uint32_t partition : order) {
      const uint64_t session = sessions_[layout_->partitions()[partition].owner];
      const uint64_t tag = node_.Fetch(session, partition);
      node_.RunTasks();
      node_.ReleaseFetched(session, tag);
    }
    DeliverAll(step);
    CallAll(step);
    node_.RunTasks();
  }
  // Partitions of updated blocks on swap (`swapped`) and in DRAM (`resident`), in the order of the updates.
  std::vector<uint32_t> swapped;
  std::vector<uint32_t> resident;
  const std::vector<UpdateBlock> updates = node_.Logged<UpdateBlock>();
  for (const UpdateBlock& update : std::span(updates).subspan(before)) {
    for (const uint32_t partition : PartitionsOf(update)) {
      (update.place.resident ? resident : swapped).push_back(partition);
    }
  }
  const auto is_earlier = [&](uint32_t a, uint32_t b) {
    return std::ranges::find(order, a) < std::ranges::find(order, b);
  };
  EXPECT_TRUE(std::ranges::is_sorted(swapped, is_earlier)) << ::testing::PrintToString(swapped);
  EXPECT_TRUE(std::ranges::is_sorted(resident, is_earlier)) << ::testing::PrintToString(resident);
}

TEST_P(NodeStateDrain, TheNextDecisionWaitsForThePublication) {
  DeliverAll(1);
  CallAll(1);
  std::vector<uint64_t> gradients;
  for (uint32_t partition = 0; partition < kGroups * kRanks; ++partition) {
    gradients.push_back(
        node_.Gradient(sessions_[layout_->partitions()[partition].owner], partition, 2));
  }
  const std::vector<uint64_t> calls = CallAll(2);
  while (View().committed_step == 1) {
    EXPECT_EQ(node_.ErrorOf(calls[0]), kUnanswered);
    FinishOne();
  }
  EXPECT_EQ(node_.Logged<StepPublished>().back().step, 1U);
  EXPECT_EQ(node_.ErrorOf(calls[0]), ErrorId::kNone);
  node_.RunTasks();
  EXPECT_EQ(node_.Logged<StepPublished>().back().step, 2U);
}

TEST_P(NodeStateDrain, EachRankIsAnsweredWhenItAskedToBe) {
  DeliverAll(1);
  const uint64_t early = node_.Step(sessions_[0], 1);
  node_.set_answered_when(StepAnswer::kPublished);
  const uint64_t late = node_.Step(sessions_[1], 1);
  EXPECT_EQ(node_.ErrorOf(early), ErrorId::kNone);
  const uint64_t repeat = node_.Step(sessions_[1], 1);
  node_.set_answered_when(StepAnswer::kCommitted);
  const uint64_t early_repeat = node_.Step(sessions_[0], 1);
  EXPECT_EQ(node_.ErrorOf(early_repeat), ErrorId::kNone);
  EXPECT_EQ(node_.answer(early_repeat)->completion.flags, protocol::kStepRepeated);
  while (!is_published()) {
    EXPECT_EQ(node_.ErrorOf(late), kUnanswered);
    EXPECT_EQ(node_.ErrorOf(repeat), kUnanswered);
    FinishOne();
  }
  EXPECT_EQ(node_.ErrorOf(late), ErrorId::kNone);
  EXPECT_EQ(node_.answer(late)->completion.flags, 0);
  EXPECT_EQ(node_.answer(repeat)->completion.flags, protocol::kStepRepeated);
}

TEST_P(NodeStateDrain, AnUnknownKindOfCallIsRefused) {
  DeliverAll(1);
  node_.set_answered_when(static_cast<StepAnswer>(2));
  EXPECT_EQ(node_.ErrorOf(node_.Step(sessions_[0], 1)), ErrorId::kProtocol);
}

// An overflow that is found after a call was answered is reported by the next call, once.
TEST_P(NodeStateDrain, AnOverflowIsReportedByTheNextCall) {
  node_.model().set_masters_overflow(3);
  DeliverAll(1);
  EXPECT_THAT(StepAll(1), Each(ErrorId::kNone));
  node_.model().set_masters_overflow(0);
  ASSERT_TRUE(is_published());
  DeliverAll(2);
  EXPECT_THAT(StepAll(2), Each(ErrorId::kOverflow));
  EXPECT_THAT(MessageOf(tags_[0]), HasSubstr("became non-finite in step 1, which is committed"));
  EXPECT_EQ(node_.answer(tags_[0])->completion.committed_step, 2U);
  DeliverAll(3);
  EXPECT_THAT(StepAll(3), Each(ErrorId::kNone));
}

// ------------------------------------------------------------------------------- what goes wrong

TEST_P(NodeStateDrain, ARankThatIsLostMeanwhileUndoesNothing) {
  DeliverAll(1);
  CallAll(1);
  node_.Gradient(sessions_[1], OwnedBy(1)[0], 2);
  node_.End(sessions_[0], EndCause::kLost);
  const uint64_t again = node_.RequestAttach(layout_, {.rank = 0});
  while (!is_published()) {
    EXPECT_EQ(node_.attached(again), nullptr) << "it waits for the publication";
    FinishOne();
  }
  node_.RunTasks();
  ASSERT_OK(StatusOf(again));
  EXPECT_EQ(node_.attached(again)->committed_step, 1U);
  for (const auto& [block, step] : node_.model().WrittenSteps(1)) EXPECT_EQ(step, 1U) << block;
  node_.End(sessions_[1], EndCause::kLost);
  node_.End(again, EndCause::kDetached);
  AttachAll();
  TrainStep(2);
}

TEST_P(NodeStateDrain, AnUpdateThatFailsFailsTheJobForTheNextCall) {
  DeliverAll(1);
  const std::vector<uint64_t> calls = CallAll(1);
  const auto failed = node_.FinishUntil<UpdateBlock>();
  const uint64_t next = node_.Step(sessions_[0], 2);
  node_.Finish(failed.task, protocol::MakeError(ErrorId::kCorrupt, "simulated"));
  EXPECT_EQ(node_.ErrorOf(calls[0]), ErrorId::kNone);
  EXPECT_EQ(node_.ErrorOf(next), ErrorId::kCorrupt);
  const uint64_t later = node_.Fetch(sessions_[0], OwnedBy(0)[0]);
  EXPECT_EQ(node_.ErrorOf(later), ErrorId::kJobFailed);
  EXPECT_THAT(MessageOf(later), HasSubstr("failed after step 0")) << "the last one that is whole";
  node_.RunTasks();
}

TEST_P(NodeStateDrain, AJobIsDeletedWhileItsBlocksAreUpdated) {
  DeliverAll(1);
  CallAll(1);
  for (const uint64_t session : sessions_) node_.End(session, EndCause::kDetached);
  node_.Send(DeleteJobRequested{.request = 1, .uid = 1000, .job = "job"});
  node_.RunTasks();
  EXPECT_THAT(node_.Logged<FreeJob>(), SizeIs(1));
}

// --------------------------------------------------------------------- what waits for the publication

// Reads of states and moves of blocks run between two steps, even if all ranks have already called the next step.
TEST_P(NodeStateDrain, ReadsOfStatesAndMovesOfBlocksHaveTheirTurns) {
  int64_t moves_before = 0;
  for (uint64_t step = 1; step <= 7; step += 2) {
    DeliverAll(step);
    CallAll(step);
    ASSERT_FALSE(is_published());
    std::vector<uint64_t> reads;
    for (uint32_t i = 0; i < kTurnsBetweenSteps + 3; ++i) {
      reads.push_back(node_.ReadState(sessions_[0], i % kGroups, 0, 16));
      EXPECT_EQ(node_.ErrorOf(reads.back()), kUnanswered);
    }
    node_.Send(BlockMoveRequested{.job = 1, .block = 0});
    // The ranks call the next step before any task of this step has ended.
    for (uint32_t partition = 0; partition < kGroups * kRanks; ++partition) {
      node_.Gradient(sessions_[layout_->partitions()[partition].owner], partition, step + 1);
    }
    const std::vector<uint64_t> calls = CallAll(step + 1);
    while (node_.ErrorOf(calls[0]) == kUnanswered) FinishOne();
    const auto is_done = [&](uint64_t tag) { return node_.ErrorOf(tag) == ErrorId::kNone; };
    const auto done = std::ranges::count_if(reads, is_done);
    const auto moves = static_cast<int64_t>(node_.Logged<EvictBlock>().size() +
                                            node_.Logged<PromoteBlock>().size());
    EXPECT_EQ(done + (moves - moves_before), kTurnsBetweenSteps) << "not all before the decision";
    moves_before = moves;
    node_.RunTasks();
    for (const uint64_t call : calls) EXPECT_EQ(node_.ErrorOf(call), ErrorId::kNone);
    EXPECT_TRUE(std::ranges::all_of(reads, is_done));
  }
  // With parameter 0 no block is in DRAM and DRAM has no space for a block, so that none is evicted or promoted.
  if (GetParam() == 0) return;
  EXPECT_FALSE(node_.Logged<EvictBlock>().empty());
  EXPECT_FALSE(node_.Logged<PromoteBlock>().empty());
}

TEST_P(NodeStateDrain, AWriteOfMastersWaits) {
  DeliverAll(1);
  CallAll(1);
  const uint64_t write = node_.WriteState(sessions_[0], OwnedBy(0)[0]);
  while (!is_published()) {
    EXPECT_THAT(node_.Running<SetState>(), IsEmpty());
    FinishOne();
  }
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(write), ErrorId::kNone);
}

TEST_P(NodeStateDrain, AnotherWorldWaits) {
  DeliverAll(1);
  CallAll(1);
  for (const uint64_t session : sessions_) node_.End(session, EndCause::kDetached);
  const uint64_t other = node_.RequestAttach(layout_, {.rank = 0, .world_size = kRanks});
  while (!is_published()) {
    EXPECT_EQ(node_.attached(other), nullptr);
    FinishOne();
  }
  node_.RunTasks();
  EXPECT_OK(StatusOf(other));
}

INSTANTIATE_TEST_SUITE_P(ResidentBlocks, NodeStateDrain, ::testing::Values(0U, 7U, 24U));

TEST(NodeStateDrainReader, WaitsForThePublication) {
  NodeState::Options options = testing::RoomyOptions();
  options.block_elems = 512;
  DrainJob job(options);
  const uint64_t reader = job.node_.AttachReader(job.layout_);
  ASSERT_OK(job.StatusOf(reader));
  const uint64_t held = job.node_.Fetch(reader, 3);
  job.DeliverAll(1);
  job.CallAll(1);
  const uint64_t fetch = job.node_.Fetch(reader, 0);
  while (job.running() > 0) {
    EXPECT_EQ(job.node_.ErrorOf(fetch), kUnanswered);
    job.FinishOne();
  }
  EXPECT_FALSE(job.is_published()) << "a block waits for the reader's lease";
  ASSERT_THAT(job.node_.Logged<StartLeaseTimer>(), SizeIs(1));
  job.node_.Send(LeaseTimeExpired{.job = 1, .step = 0});
  EXPECT_FALSE(job.node_.is_closed(reader));
  job.node_.model().ReleaseWeightsOfJob(1);
  job.node_.Send(LeaseTimeExpired{.job = 1, .step = job.node_.Logged<StartLeaseTimer>()[0].step});
  job.node_.RunTasks();
  EXPECT_TRUE(job.is_published());
  EXPECT_TRUE(job.node_.is_closed(reader));
  EXPECT_NE(job.node_.ErrorOf(held), kUnanswered);
  EXPECT_EQ(job.node_.fault(), "");
}

// A second backward pass needs float32 sums while the sums of the step before are still read.
TEST(NodeStateDrainSums, WiderOnesWaitForThePublication) {
  const auto layout = MakeShardedLayout(
      {{{.rows = 4096}}, {{.rows = 4096}}},
      {.ranks = kRanks, .dtype = protocol::DType::kBFloat16, .format = protocol::Format::kExact});
  NodeState::Options options = testing::RoomyOptions();
  options.block_elems = 512;
  ShardedJob job(layout, kRanks, options);
  job.AttachAll();
  job.node_.set_answered_when(StepAnswer::kCommitted);
  for (uint32_t rank = 0; rank < kRanks; ++rank) job.DeliverOwn(rank, 1);
  for (const uint64_t session : job.sessions_) job.node_.Step(session, 1);
  ASSERT_FALSE(job.node_.Running<UpdateBlock>().empty());
  for (const bool is_further : {false, true}) {
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      if (is_further) job.node_.BeginPass(job.sessions_[rank]);
      for (const uint32_t partition : job.OwnedBy(rank)) {
        job.node_.Gradient(job.sessions_[rank], partition, 2);
      }
    }
  }
  std::vector<uint64_t> calls;
  for (const uint64_t session : job.sessions_) calls.push_back(job.node_.Step(session, 2));
  job.node_.RunTasks();
  for (const uint64_t call : calls) EXPECT_EQ(job.node_.ErrorOf(call), ErrorId::kNone);
  EXPECT_EQ(job.View().committed_step, 2U);
  EXPECT_EQ(job.node_.fault(), "");
}

}  // namespace
}  // namespace forebay::daemon::node_state_drain_test
