// SPDX-License-Identifier: Apache-2.0
// Goal    States are written by their owners only: masters as initial parameters of a new job, or all states between two steps.
//         Writes go block by block, in DRAM or on swap, never under a lease and never while a step is applied. An incomplete
//         write does not count.
// Method  The harness drives the state machine with a sharded job. Its model reports a fault if a block has the wrong content,
//         or if two tasks use the same memory.

#include <cstdint>
#include <memory>
#include <set>
#include <vector>

#include "daemon/core/update/step_pipeline.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/sharded_job.h"

namespace forebay::daemon::node_state_write_test {
namespace {

using ::forebay::testing::MakeShardedLayout;
using ::forebay::testing::RoomyOptions;
using ::forebay::testing::ShardedJob;
using ::forebay::testing::SwapPaths;
using ::forebay::testing::ThreeGroups;
using protocol::ErrorId;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr ErrorId kUnanswered = ErrorId::kTimeout;

// A layout with bfloat16 weights, whose masters are a plane separate from the weights.
std::shared_ptr<const protocol::Layout> WithMasterPlane() {
  return MakeShardedLayout({{{.rows = 301}, {.rows = 20, .columns = 15}}, {{.rows = 130}}},
                           {.dtype = protocol::DType::kBFloat16});
}

class NodeStateWrite : public ::testing::Test, public ShardedJob {
 protected:
  NodeStateWrite() : ShardedJob(ThreeGroups(), 2) {}
  void TearDown() override { EXPECT_EQ(node_.fault(), ""); }
};

// ------------------------------------------------------------------------------ initial parameters

TEST(NodeStateInitialMasters, MakeTheJobReadyWithoutMastersMadeFromWeights) {
  for (const bool masters : {true, false}) {
    SCOPED_TRACE(masters ? "masters" : "weights");
    ShardedJob job(WithMasterPlane(), 2);
    job.AttachWriters();
    for (uint32_t rank = 0; rank < 2; ++rank) {
      for (const uint32_t partition : job.OwnedBy(rank)) {
        const uint64_t tag = masters ? job.node_.WriteState(job.sessions_[rank], partition)
                                     : job.node_.WriteInitial(job.sessions_[rank], partition);
        job.node_.RunTasks();
        ASSERT_EQ(job.node_.ErrorOf(tag), ErrorId::kNone);
      }
    }
    for (const uint64_t session : job.sessions_) job.node_.InitialDone(session);
    job.node_.RunTasks();
    EXPECT_TRUE(job.View().ready);
    const size_t updates = job.node_.Logged<UpdateBlock>().size();
    EXPECT_EQ(updates, masters ? 0 : job.View().blocks);
    uint64_t elems = 0;
    for (const SetState& set : job.node_.Logged<SetState>()) elems += set.elems;
    EXPECT_EQ(elems, masters ? job.layout_->total_elems() : 0);
    job.TrainStep(1);
    EXPECT_EQ(job.node_.fault(), "");
  }
}

TEST_F(NodeStateWrite, OfInitialMastersAndWeightsMixedIsRefused) {
  AttachWriters();
  const uint64_t weights = node_.WriteInitial(sessions_[0], 0);
  node_.RunTasks();
  ASSERT_EQ(node_.ErrorOf(weights), ErrorId::kNone);
  const uint64_t masters = node_.WriteState(sessions_[1], 1);
  EXPECT_EQ(node_.ErrorOf(masters), ErrorId::kProtocol);
  EXPECT_THAT(MessageOf(masters), HasSubstr("initial masters after initial weights"));
}

TEST_F(NodeStateWrite, OfInitialMastersThatAreNotFiniteDoesNotCount) {
  AttachWriters();
  const uint64_t tag = node_.WriteState(sessions_[0], 0);
  ASSERT_THAT(node_.Running<SetState>(), SizeIs(1));
  TaskDone done = node_.model().Finish(node_.Running<SetState>()[0].task);
  done.count = 1;
  node_.Send(done);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(tag), ErrorId::kNonfinite);
  EXPECT_THAT(MessageOf(tag), HasSubstr("g0 of rank 0"));
  const uint64_t initial_done = node_.InitialDone(sessions_[0]);
  EXPECT_EQ(node_.ErrorOf(initial_done), ErrorId::kNotReady);
}

TEST_F(NodeStateWrite, ThatIsUnderWayDoesNotCountAsInitialParameters) {
  AttachWriters();
  for (const uint32_t partition : OwnedBy(0)) {
    node_.WriteState(sessions_[0], partition);
    node_.RunTasks();
  }
  const uint64_t again = node_.WriteState(sessions_[0], 0);
  const uint64_t too_early = node_.InitialDone(sessions_[0]);
  EXPECT_EQ(node_.ErrorOf(too_early), ErrorId::kNotReady);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(again), ErrorId::kNone);
  const uint64_t waits = node_.InitialDone(sessions_[0]);
  EXPECT_EQ(node_.ErrorOf(waits), kUnanswered) << "for rank 1";
}

// ----------------------------------------------------------------------------------- between steps

TEST_F(NodeStateWrite, BetweenStepsChangesEveryElementOfTheRangeOnce) {
  AttachAll();
  TrainStep(1);
  const uint64_t tag = node_.WriteState(sessions_[1], 1);
  node_.RunTasks();
  ASSERT_EQ(node_.ErrorOf(tag), ErrorId::kNone);
  uint64_t elems = 0;
  for (const SetState& set : node_.Logged<SetState>()) {
    EXPECT_EQ(set.grad_offset_bytes, elems * sizeof(float)) << "pieces lie side by side";
    ASSERT_TRUE(set.in_block.has_value());
    EXPECT_EQ(set.in_block->identity.written_step, 1U);
    elems += set.elems;
  }
  EXPECT_EQ(elems, layout_->partitions()[1].elems);
  TrainStep(2);
}

TEST_F(NodeStateWrite, ToAnotherRanksPartitionOrOutsideOfItIsRefused) {
  AttachAll();
  EXPECT_EQ(node_.ErrorOf(node_.WriteState(sessions_[0], 1)), ErrorId::kRank);
  EXPECT_EQ(node_.ErrorOf(node_.WriteState(sessions_[0], 0, 0, 5000)), ErrorId::kRange);
  EXPECT_EQ(node_.ErrorOf(node_.WriteState(sessions_[0], 0, 4000, 4001)), ErrorId::kRange);
  EXPECT_EQ(node_.ErrorOf(node_.WriteState(node_.AttachReader(layout_), 0)), ErrorId::kRank);
  EXPECT_THAT(node_.Logged<SetState>(), IsEmpty());
}

TEST_F(NodeStateWrite, OfSomeElementsIsForTheTimeBetweenSteps) {
  AttachWriters();
  EXPECT_EQ(node_.ErrorOf(node_.WriteState(sessions_[0], 0, 7, 100)), ErrorId::kRange)
      << "it would not be known what of the initial parameters is written";
  for (uint32_t rank = 0; rank < 2; ++rank) WriteOwn(rank);
  for (const uint64_t session : sessions_) node_.InitialDone(session);
  node_.RunTasks();
  const uint64_t tag = node_.WriteState(sessions_[0], 0, 7, 100);
  node_.RunTasks();
  ASSERT_EQ(node_.ErrorOf(tag), ErrorId::kNone);
  uint64_t elems = 0;
  for (const SetState& set : node_.Logged<SetState>()) elems += set.elems;
  EXPECT_EQ(elems, 93U);
}

TEST_F(NodeStateWrite, WaitsForLeasesOfOthersAndRefusesItsOwn) {
  AttachAll();
  const uint64_t own = node_.Fetch(sessions_[0], 0);
  const uint64_t refused = node_.WriteState(sessions_[0], 0);
  EXPECT_EQ(node_.ErrorOf(refused), ErrorId::kLease);
  node_.ReleaseFetched(sessions_[0], own);

  const uint64_t reader = node_.AttachReader(layout_);
  const uint64_t leased = node_.Fetch(reader, 0);
  const uint64_t waits = node_.WriteState(sessions_[0], 0);
  EXPECT_THAT(node_.Running<SetState>(), IsEmpty());
  EXPECT_EQ(node_.ErrorOf(waits), kUnanswered);
  node_.ReleaseFetched(reader, leased);
  EXPECT_THAT(node_.Running<SetState>(), SizeIs(1));
  const uint64_t fetched = node_.Fetch(sessions_[1], 0);
  const uint64_t of_another = node_.Fetch(sessions_[1], 3);
  EXPECT_EQ(node_.ErrorOf(fetched), kUnanswered) << "half of it may be written";
  EXPECT_EQ(node_.ErrorOf(of_another), ErrorId::kNone);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(waits), ErrorId::kNone);
  EXPECT_EQ(node_.ErrorOf(fetched), ErrorId::kNone);
}

TEST_F(NodeStateWrite, EndsBeforeTheStepAndIsRefusedWithinIt) {
  AttachAll();
  for (uint32_t rank = 0; rank < 2; ++rank) DeliverOwn(rank, 1);
  const uint64_t write = node_.WriteState(sessions_[1], 4);
  ASSERT_THAT(node_.Running<SetState>(), SizeIs(1));
  const uint64_t first = node_.Step(sessions_[0], 1);
  const uint64_t refused = node_.WriteState(sessions_[0], 0);
  EXPECT_EQ(node_.ErrorOf(refused), ErrorId::kStep);
  const uint64_t second = node_.Step(sessions_[1], 1);
  EXPECT_THAT(node_.Running<UpdateBlock>(), IsEmpty()) << "the write goes on";
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(write), ErrorId::kNone);
  EXPECT_EQ(node_.ErrorOf(first), ErrorId::kNone);
  EXPECT_EQ(node_.ErrorOf(second), ErrorId::kNone);
}

TEST_F(NodeStateWrite, OfAFrozenParameterSetsWeightsAlone) {
  ShardedJob job(MakeShardedLayout({{{.rows = 301}, {.rows = 90, .trainable = false}}}), 2);
  job.AttachAll();
  const uint64_t tag = job.node_.WriteState(job.sessions_[0], 0);
  job.node_.RunTasks();
  ASSERT_EQ(job.node_.ErrorOf(tag), ErrorId::kNone);
  const std::vector<SetState> all = job.node_.Logged<SetState>();
  ASSERT_FALSE(all.empty());
  EXPECT_FALSE(all.back().in_block.has_value());
  EXPECT_EQ(all.back().elems, 45U);
  EXPECT_EQ(all.back().weights.offset_bytes, job.WeightsOffset(1, 0));
  EXPECT_EQ(job.node_.fault(), "");
}

// ------------------------------------------------------------------------------ moments and counts

TEST_F(NodeStateWrite, OfAMomentSetsItAlone) {
  AttachAll();
  TrainStep(1);
  const uint64_t tag = node_.WriteState(sessions_[1], 1, 0, 0, /*state=*/2);
  node_.RunTasks();
  ASSERT_EQ(node_.ErrorOf(tag), ErrorId::kNone);
  uint64_t elems = 0;
  for (const SetState& set : node_.Logged<SetState>()) {
    EXPECT_EQ(set.state, 2U);
    elems += set.elems;
  }
  EXPECT_EQ(elems, layout_->partitions()[1].elems);
  TrainStep(2);
}

TEST_F(NodeStateWrite, OfAMomentIsRefusedWhereThereIsNone) {
  ShardedJob job(MakeShardedLayout({{{.rows = 301}, {.rows = 90, .trainable = false}}}), 2);
  job.AttachWriters();
  const auto write = [&](uint64_t begin, uint64_t end, uint16_t state) {
    return job.node_.WriteState(job.sessions_[0], 0, begin, end, state);
  };
  const uint64_t trainable = job.layout_->partitions()[0].elems - 45;
  EXPECT_EQ(job.node_.ErrorOf(write(0, trainable, 1)), ErrorId::kNotReady);
  for (uint32_t rank = 0; rank < 2; ++rank) job.WriteOwn(rank);
  for (const uint64_t session : job.sessions_) job.node_.InitialDone(session);
  job.node_.RunTasks();
  const uint64_t frozen = write(0, 0, 1);
  EXPECT_EQ(job.node_.ErrorOf(frozen), ErrorId::kRange);
  EXPECT_THAT(job.MessageOf(frozen), HasSubstr("p1 is frozen"));
  const uint64_t unknown = write(0, trainable, 3);
  EXPECT_EQ(job.node_.ErrorOf(unknown), ErrorId::kRange);
  EXPECT_THAT(job.MessageOf(unknown), HasSubstr("there is no state 3"));
  const uint64_t tag = write(0, trainable, 1);
  job.node_.RunTasks();
  EXPECT_EQ(job.node_.ErrorOf(tag), ErrorId::kNone);
  EXPECT_EQ(job.node_.fault(), "");
}

// int8 moments have one scale for 128 elements. A write to a part of such a group would need the float32 values of its other
// elements.
TEST_F(NodeStateWrite, OfInt8MomentsTakesWholeGroups) {
  ShardedJob job(
      MakeShardedLayout(
          {{{.rows = 301}, {.rows = 300}}},
          {.ranks = 1, .dtype = protocol::DType::kBFloat16, .format = protocol::Format::kInt8}),
      1);
  job.AttachAll();
  struct Case {
    uint64_t begin, end;
    bool good;
  };
  // Groups of 128 elements are counted from the begin of each parameter. The second parameter begins at element 301.
  for (const Case& one :
       {Case{0, 601, true}, Case{128, 301, true}, Case{0, 128, true}, Case{256, 429, true},
        Case{301, 557, true}, Case{1, 128, false}, Case{0, 127, false}, Case{300, 301, false},
        Case{384, 601, false}, Case{0, 384, false}}) {
    const uint64_t tag = job.node_.WriteState(job.sessions_[0], 0, one.begin, one.end, 1);
    job.node_.RunTasks();
    EXPECT_EQ(job.node_.ErrorOf(tag), one.good ? ErrorId::kNone : ErrorId::kRange)
        << one.begin << " to " << one.end;
  }
  const uint64_t masters = job.node_.WriteState(job.sessions_[0], 0, 1, 128, 0);
  job.node_.RunTasks();
  EXPECT_EQ(job.node_.ErrorOf(masters), ErrorId::kNone);
  EXPECT_EQ(job.node_.fault(), "");
}

TEST_F(NodeStateWrite, OfAMomentThatCannotBeSaysWhichState) {
  AttachAll();
  const uint64_t tag = node_.WriteState(sessions_[0], 0, 0, 0, 2);
  TaskDone done = node_.model().Finish(node_.Running<SetState>()[0].task);
  done.count = 1;
  node_.Send(done);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(tag), ErrorId::kNonfinite);
  EXPECT_THAT(MessageOf(tag), HasSubstr("exp_avg_sq"));
}

TEST_F(NodeStateWrite, OfUpdatesIsWhatTheNextStepCountsFrom) {
  AttachAll();
  TrainStep(1);
  const uint64_t write = node_.WriteUpdates(sessions_[1], 0, 7);
  EXPECT_EQ(node_.ErrorOf(write), ErrorId::kNone);
  const auto updates = [&](uint32_t param) {
    const uint64_t read = node_.ReadState(sessions_[0], param, 0, 1);
    node_.RunTasks();
    return node_.answer(read)->completion.offset_bytes;
  };
  EXPECT_EQ(updates(0), 7U);
  EXPECT_EQ(updates(1), 1U);
  TrainStep(2);
  EXPECT_EQ(updates(0), 8U);
  EXPECT_EQ(updates(1), 2U);
}

TEST_F(NodeStateWrite, OfUpdatesTakesItsTurnAmongOtherRequests) {
  AttachAll();
  const uint64_t before = node_.ReadState(sessions_[0], 0, 0, 1);
  const uint64_t write = node_.WriteUpdates(sessions_[0], 0, 5);
  const uint64_t next = node_.WriteUpdates(sessions_[0], 1, 6);
  const uint64_t after = node_.ReadState(sessions_[0], 0, 0, 1);
  EXPECT_EQ(node_.ErrorOf(write), kUnanswered);
  node_.RunTasks();
  EXPECT_EQ(node_.answer(before)->completion.offset_bytes, 0U);
  EXPECT_EQ(node_.ErrorOf(write), ErrorId::kNone);
  EXPECT_EQ(node_.ErrorOf(next), ErrorId::kNone);
  EXPECT_EQ(node_.answer(after)->completion.offset_bytes, 5U);
}

TEST_F(NodeStateWrite, OfUpdatesIsRefusedWithinAStepAndOfWhatHasNone) {
  AttachAll();
  EXPECT_EQ(node_.ErrorOf(node_.WriteUpdates(sessions_[0], 99, 1)), ErrorId::kRange);
  EXPECT_EQ(node_.ErrorOf(node_.WriteUpdates(sessions_[0], 0, protocol::kUpdatesMax + 1)),
            ErrorId::kRange);
  EXPECT_EQ(node_.ErrorOf(node_.WriteUpdates(node_.AttachReader(layout_), 0, 1)), ErrorId::kRank);
  DeliverOwn(0, 1);
  const uint64_t step = node_.Step(sessions_[0], 1);
  EXPECT_EQ(node_.ErrorOf(node_.WriteUpdates(sessions_[0], 0, 1)), ErrorId::kStep);
  DeliverOwn(1, 1);
  const uint64_t other = node_.WriteUpdates(sessions_[1], 0, 41);
  EXPECT_EQ(node_.ErrorOf(other), ErrorId::kNone) << "it has not called the step";
  node_.Step(sessions_[1], 1);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(step), ErrorId::kNone);
  for (const UpdateBlock& update : node_.Logged<UpdateBlock>()) {
    for (const UpdateSegment& segment : update.segments) {
      const uint64_t t = testing::NodeHarness::UpdateCount(segment);
      EXPECT_TRUE(t == 1 || t == 0) << "of parameter 0 the 42nd, which is none of the first";
    }
  }
}

// ----------------------------------------------------------------------------------------- on swap

// A job whose blocks belong to both owners. DRAM fits three blocks, and the node has three staging slots.
class NodeStateWriteOnSwap : public ::testing::Test {
 protected:
  static constexpr uint64_t kBlockBytes = 8192;  // two planes of 64 float32, each on a page

  static NodeState::Options Options() {
    ShardedJob roomy(ThreeGroups(), 2);
    roomy.AttachAll();
    const uint64_t blocks = roomy.View().blocks;
    NodeState::Options options = RoomyOptions();
    options.node_bytes = 3 * kBlockBytes;
    options.dram_limit_bytes =
        options.node_bytes + roomy.View().dram_bytes - (blocks - 3) * kBlockBytes;
    options.staging_slots = 3;
    options.staging_slot_bytes = kBlockBytes;
    options.swap = SwapPaths({2 * (blocks - 3) * kBlockBytes});
    return options;
  }
  void TearDown() override { EXPECT_EQ(job_.node_.fault(), ""); }

  ErrorId WriteAll(uint16_t state = 0) {
    for (uint32_t rank = 0; rank < 2; ++rank) {
      for (const uint32_t partition : job_.OwnedBy(rank)) {
        const uint64_t tag = job_.node_.WriteState(job_.sessions_[rank], partition, 0, 0, state);
        job_.node_.RunTasks();
        if (job_.node_.ErrorOf(tag) != ErrorId::kNone) return job_.node_.ErrorOf(tag);
      }
    }
    return ErrorId::kNone;
  }

  ShardedJob job_{ThreeGroups(), 2, Options()};
};

TEST_F(NodeStateWriteOnSwap, AsInitialParameters) {
  job_.AttachWriters();
  ASSERT_EQ(WriteAll(), ErrorId::kNone);
  for (const uint64_t session : job_.sessions_) job_.node_.InitialDone(session);
  job_.node_.RunTasks();
  ASSERT_TRUE(job_.View().ready);
  for (uint64_t step = 1; step <= 2; ++step) job_.TrainStep(step);
}

TEST_F(NodeStateWriteOnSwap, BetweenSteps) {
  job_.AttachAll();
  job_.TrainStep(1);
  ASSERT_EQ(WriteAll(), ErrorId::kNone);
  ASSERT_EQ(WriteAll(), ErrorId::kNone) << "into the slots that are free again";
  EXPECT_EQ(job_.View().committed_step, 1U);
  for (uint64_t step = 2; step <= 3; ++step) job_.TrainStep(step);
}

TEST_F(NodeStateWriteOnSwap, OfMoments) {
  job_.AttachAll();
  job_.TrainStep(1);
  constexpr uint16_t kStates[] = {1, 2, 1};
  for (const uint16_t state : kStates) ASSERT_EQ(WriteAll(state), ErrorId::kNone);
  for (uint64_t step = 2; step <= 3; ++step) job_.TrainStep(step);
}

TEST_F(NodeStateWriteOnSwap, OfABlockThatWasReadAheadUsesItAndWritesItBack) {
  job_.AttachAll();
  job_.TrainStep(1);
  job_.DeliverOwn(0, 2);  // blocks are read ahead now
  job_.node_.RunTasks();
  ASSERT_EQ(WriteAll(), ErrorId::kNone);
  job_.DeliverOwn(1, 2);
  EXPECT_THAT(job_.StepAll(2), Each(ErrorId::kNone));
}

TEST_F(NodeStateWriteOnSwap, ThatFailsIsRepeatedInAnotherSlot) {
  job_.AttachAll();
  job_.TrainStep(1);
  // p2 is whole in partition 2, whose blocks are on swap.
  const uint64_t tag = job_.node_.WriteState(job_.sessions_[0], 2);
  std::set<nvme::Slot> tried;
  uint32_t failures = 0;
  while (!job_.node_.model().running().empty()) {
    const std::vector<WriteBlock> writes = job_.node_.Running<WriteBlock>();
    if (writes.empty() || failures == 2) {
      job_.node_.Finish(job_.node_.model().running().begin()->first);
      continue;
    }
    tried.insert(*writes[0].place.slot);
    ++failures;
    job_.node_.Finish(writes[0].task, protocol::MakeError(ErrorId::kSwapIo, "the disk has failed"));
  }
  EXPECT_EQ(failures, 2U);
  EXPECT_THAT(tried, SizeIs(2));
  EXPECT_EQ(job_.node_.ErrorOf(tag), ErrorId::kNone);
  job_.TrainStep(2);
}

TEST_F(NodeStateWriteOnSwap, WhoseRankDiesLeavesNoBlockHalfWritten) {
  job_.AttachAll();
  job_.TrainStep(1);
  job_.node_.WriteState(job_.sessions_[0], 2);
  (void)job_.node_.FinishUntil<SetState>();
  job_.node_.End(job_.sessions_[0], EndCause::kLost);
  job_.node_.RunTasks();
  const std::vector<WriteBlock> writes = job_.node_.Logged<WriteBlock>();
  ASSERT_FALSE(writes.empty());
  EXPECT_EQ(writes.back().identity.written_step, 1U);
  job_.node_.End(job_.sessions_[1], EndCause::kDetached);
  job_.node_.RunTasks();
  job_.AttachAll();
  job_.TrainStep(2);
}

}  // namespace
}  // namespace forebay::daemon::node_state_write_test
