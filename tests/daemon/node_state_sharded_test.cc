// SPDX-License-Identifier: Apache-2.0
// Goal    With sharded attachment every rank writes the initial parameters of its own partitions, and of no others. The job is
//         ready when all ranks have written. A layout that the ranks cannot own, another world size, and gradients of shared
//         attachment are refused, with the cause named.
// Method  The harness with layouts that torch.chunk would produce, including uneven, empty and strided shards. Each test
//         chooses which tasks end and when.

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/units.h"
#include "tests/support/node_harness.h"
#include "tests/support/sharded_job.h"
#include "tests/support/status_test.h"

namespace forebay::daemon::node_state_sharded_test {
namespace {

using ::forebay::testing::HasError;
using ::forebay::testing::MakeShardedLayout;
using ::forebay::testing::ShardedJob;
using ::forebay::testing::ThreeGroups;
using protocol::DType;
using protocol::ErrorId;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr ErrorId kUnanswered = ErrorId::kTimeout;  // ErrorOf() of an unanswered command.

using LayoutPtr = std::shared_ptr<const protocol::Layout>;

LayoutPtr Changed(const LayoutPtr& layout, auto change) {
  protocol::LayoutSpec spec = layout->spec();
  change(spec);
  return std::make_shared<const protocol::Layout>(protocol::Layout::Create(spec).value());
}

class NodeStateSharded : public ::testing::Test, protected ShardedJob {
 protected:
  NodeStateSharded() : ShardedJob(ThreeGroups(), 2) {}
  void TearDown() override { EXPECT_EQ(node_.fault(), ""); }
};

TEST_F(NodeStateSharded, TheLayoutIsCutAsTorchDoes) {
  ASSERT_EQ(layout_->partitions().size(), 5U);
  EXPECT_EQ(layout_->partitions()[0].elems, 151U + 20 * 8);
  EXPECT_EQ(layout_->partitions()[1].elems, 150U + 20 * 7);
  EXPECT_EQ(layout_->boxes_of(1)[1].box.stride_elems, 15U);
  EXPECT_EQ(layout_->partitions()[2].elems, 100U);
  EXPECT_THAT(OwnedBy(0), ElementsAre(0, 2, 3));
  EXPECT_THAT(OwnedBy(1), ElementsAre(1, 4));
}

// ---------------------------------------------------------------------------- initial parameters

TEST_F(NodeStateSharded, IsReadyWhenEveryRankHasWrittenItsPartitions) {
  AttachWriters();
  WriteOwn(0);
  const uint64_t first = node_.InitialDone(sessions_[0]);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(first), kUnanswered) << "rank 1 has not written";
  EXPECT_EQ(node_.ErrorOf(node_.Fetch(sessions_[0], 0)), ErrorId::kNotReady);
  EXPECT_FALSE(View().ready);
  WriteOwn(1);
  EXPECT_FALSE(View().ready);
  const uint64_t second = node_.InitialDone(sessions_[1]);
  EXPECT_EQ(node_.ErrorOf(first), ErrorId::kNone);
  EXPECT_EQ(node_.ErrorOf(second), ErrorId::kNone);
  EXPECT_TRUE(View().ready);
  EXPECT_THAT(node_.Logged<CopyInitial>(), SizeIs(5)) << "each partition once";
}

TEST_F(NodeStateSharded, WhatARankWritesIsWhereEveryRankFetchesIt) {
  AttachAll();
  std::set<uint64_t> offsets;
  for (const CopyInitial& copy : node_.Logged<CopyInitial>()) {
    offsets.insert(copy.weights_offset_bytes);
  }
  uint64_t end = 0;
  std::set<uint64_t> fetched;
  for (const uint32_t partition : {0U, 2U, 3U, 1U, 4U}) {  // Partitions in the order of owners.
    for (const uint64_t session : sessions_) {
      const uint64_t tag = node_.Fetch(session, partition);
      ASSERT_EQ(node_.ErrorOf(tag), ErrorId::kNone);
      const protocol::Completion& completion = node_.answer(tag)->completion;
      EXPECT_EQ(completion.offset_bytes, end) << "one page each, side by side";
      EXPECT_EQ(completion.length_bytes, layout_->partition_bytes(partition));
      fetched.insert(completion.offset_bytes);
    }
    end += protocol::RoundUp(layout_->partition_bytes(partition), protocol::kPageBytes);
  }
  EXPECT_EQ(fetched, offsets);
  EXPECT_EQ(end, node_.attached(sessions_[0])->weights_bytes);
}

TEST_F(NodeStateSharded, ARankThatAttachesAgainDoesNotWriteAgain) {
  AttachAll();
  node_.End(sessions_[1], EndCause::kDetached);
  const uint64_t again = node_.Attach(layout_, {.rank = 1});
  ASSERT_OK(StatusOf(again));
  EXPECT_FALSE(node_.attached(again)->writes_initial);
  EXPECT_EQ(node_.ErrorOf(node_.WriteInitial(again, 1)), ErrorId::kProtocol);
}

TEST_F(NodeStateSharded, WhatARankHasNotWrittenIsItsOwnErrorAlone) {
  AttachWriters();
  WriteOwn(0);
  const uint64_t first = node_.InitialDone(sessions_[0]);
  node_.WriteInitial(sessions_[1], 1);
  node_.RunTasks();
  const uint64_t early = node_.InitialDone(sessions_[1]);
  EXPECT_EQ(node_.ErrorOf(early), ErrorId::kNotReady);
  EXPECT_THAT(MessageOf(early), HasSubstr("group 2 (g2 of rank 1)"));
  EXPECT_EQ(node_.ErrorOf(first), kUnanswered);
  node_.WriteInitial(sessions_[1], 4);
  const uint64_t second = node_.InitialDone(sessions_[1]);
  EXPECT_EQ(node_.ErrorOf(second), kUnanswered) << "its last copy runs";
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(first), ErrorId::kNone);
  EXPECT_EQ(node_.ErrorOf(second), ErrorId::kNone);
}

// A rank that waits in InitialDone may write again. The newest written weights count.
TEST_F(NodeStateSharded, WhatIsWrittenAfterInitialDoneIsWaitedForAndChecked) {
  AttachWriters();
  WriteOwn(0);
  const uint64_t first = node_.InitialDone(sessions_[0]);
  const uint64_t again = node_.WriteInitial(sessions_[0], 0);
  const std::vector<CopyInitial> copies = node_.Running<CopyInitial>();
  ASSERT_EQ(copies.size(), 1U);
  for (const uint32_t partition : OwnedBy(1)) node_.WriteInitial(sessions_[1], partition);
  for (const CopyInitial& copy : node_.Running<CopyInitial>()) {
    if (copy.task != copies[0].task) node_.Finish(copy.task);
  }
  const uint64_t second = node_.InitialDone(sessions_[1]);
  EXPECT_EQ(node_.ErrorOf(second), kUnanswered) << "a copy of rank 0 runs";
  EXPECT_FALSE(View().ready);
  TaskDone done = node_.model().Finish(copies[0].task);
  done.count = 1;  // The values are not finite.
  node_.Send(done);
  EXPECT_EQ(node_.ErrorOf(again), ErrorId::kNonfinite);
  EXPECT_THAT(MessageOf(again), HasSubstr("group 0 (g0 of rank 0)"));
  EXPECT_EQ(node_.ErrorOf(first), ErrorId::kNotReady);
  EXPECT_EQ(node_.ErrorOf(second), kUnanswered);
  node_.WriteInitial(sessions_[0], 0);
  node_.RunTasks();
  node_.InitialDone(sessions_[0]);
  EXPECT_EQ(node_.ErrorOf(second), ErrorId::kNone);
  EXPECT_TRUE(View().ready);
}

TEST_F(NodeStateSharded, ARankThatEndsBeforeTheJobIsReadyFencesTheOthers) {
  for (const EndCause cause : {EndCause::kLost, EndCause::kDetached}) {
    SCOPED_TRACE(cause == EndCause::kLost);
    AttachWriters();
    WriteOwn(0);
    const uint64_t waiting = node_.InitialDone(sessions_[0]);
    node_.WriteInitial(sessions_[1], 1);
    ASSERT_EQ(node_.Running<CopyInitial>().size(), 1U);
    node_.End(sessions_[1], cause);
    EXPECT_EQ(node_.ErrorOf(waiting), ErrorId::kRankLost);
    EXPECT_THAT(MessageOf(waiting), HasSubstr("rank 1"));
    for (const uint64_t tag :
         {node_.WriteInitial(sessions_[0], 0), node_.InitialDone(sessions_[0])}) {
      EXPECT_EQ(node_.ErrorOf(tag), ErrorId::kRankLost) << "whatever comes later too";
    }
    // The old session of rank 0 lives while its new one attaches.
    const uint64_t newer = node_.RequestAttach(layout_, {.rank = 0});
    node_.FinishAll<CreateSessionMemory>();
    EXPECT_EQ(node_.attached(newer), nullptr) << "a copy of the old session runs";
    node_.RunTasks();
    EXPECT_OK(StatusOf(newer));
  }
  // None of the earlier writes counts.
  AttachWriters();
  EXPECT_EQ(node_.ErrorOf(node_.InitialDone(sessions_[0])), ErrorId::kNotReady);
  for (uint32_t rank = 0; rank < 2; ++rank) {
    WriteOwn(rank);
    node_.InitialDone(sessions_[rank]);
  }
  EXPECT_TRUE(View().ready);
  TrainStep(1);
}

TEST_F(NodeStateSharded, ANewerSessionOfARankThatWritesFencesTheOldOneByThatReason) {
  AttachWriters();
  WriteOwn(0);
  WriteOwn(1);
  const uint64_t of_old = node_.InitialDone(sessions_[0]);
  const uint64_t copy_of_old = node_.WriteInitial(sessions_[0], 0);
  const uint64_t copy_of_other = node_.WriteInitial(sessions_[1], 1);
  node_.RequestAttach(layout_, {.rank = 0});
  EXPECT_EQ(node_.ErrorOf(of_old), ErrorId::kFenced);
  EXPECT_EQ(node_.ErrorOf(copy_of_old), ErrorId::kFenced);
  EXPECT_EQ(node_.ErrorOf(copy_of_other), ErrorId::kRankLost);
  node_.RunTasks();
}

TEST_F(NodeStateSharded, ARankThatOwnsNothingAttachesFetchesAndSteps) {
  // The layout has two rows for three ranks, so that rank 2 owns none.
  ShardedJob job(MakeShardedLayout({{{.rows = 2, .columns = 70}}}, {.ranks = 3}), 3);
  job.AttachWriters();
  EXPECT_THAT(job.OwnedBy(2), IsEmpty());
  const uint64_t nothing = job.node_.InitialDone(job.sessions_[2]);
  for (uint32_t rank = 0; rank < 2; ++rank) {
    job.WriteOwn(rank);
    job.node_.InitialDone(job.sessions_[rank]);
    EXPECT_EQ(job.node_.ErrorOf(nothing), rank == 0 ? kUnanswered : ErrorId::kNone);
  }
  for (uint32_t partition = 0; partition < 2; ++partition) {
    const uint64_t tag = job.node_.Fetch(job.sessions_[2], partition);
    job.node_.ReleaseFetched(job.sessions_[2], tag);
  }
  job.TrainStep(1);
  EXPECT_EQ(job.node_.fault(), "");
}

// bfloat16 weights in format fp32: the masters are a plane separate from the weights.
TEST(NodeStateShardedMasters, AreSetForAllRanksBeforeAnyOfThemIsAnswered) {
  ShardedJob job(MakeShardedLayout({{{.rows = 301}}}, {.dtype = DType::kBFloat16}), 2);
  job.AttachWriters();
  std::vector<uint64_t> done;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    job.WriteOwn(rank);
    done.push_back(job.node_.InitialDone(job.sessions_[rank]));
  }
  ASSERT_FALSE(job.node_.Running<UpdateBlock>().empty());
  for (const uint64_t tag : done) EXPECT_EQ(job.node_.ErrorOf(tag), kUnanswered);
  EXPECT_FALSE(job.View().ready);
  job.node_.End(job.sessions_[1], EndCause::kLost);
  EXPECT_EQ(job.node_.ErrorOf(done[0]), ErrorId::kRankLost);
  job.node_.RunTasks();
  EXPECT_TRUE(job.View().ready) << "the parameters are all there: it goes forward";
  job.AttachAll();
  EXPECT_FALSE(job.node_.attached(job.sessions_[0])->writes_initial);
  job.TrainStep(1);
  EXPECT_EQ(job.node_.fault(), "");
}

// ------------------------------------------------------------------------------------- refusals

TEST_F(NodeStateSharded, AWriteToAnothersPartitionIsRefused) {
  AttachWriters();
  const uint64_t write = node_.WriteInitial(sessions_[1], 0);
  EXPECT_EQ(node_.ErrorOf(write), ErrorId::kRank);
  EXPECT_THAT(MessageOf(write), AllOf(HasSubstr("rank 1 writes"), HasSubstr("g0 of rank 0")));
  EXPECT_TRUE(node_.Logged<CopyInitial>().empty());
  for (uint32_t rank = 0; rank < 2; ++rank) {
    WriteOwn(rank);
    node_.InitialDone(sessions_[rank]);
  }
  for (const uint32_t partition : OwnedBy(0)) {
    EXPECT_EQ(node_.ErrorOf(node_.Gradient(sessions_[1], partition, 1)), ErrorId::kRank);
  }
  EXPECT_TRUE(node_.Logged<AddGradients>().empty());
  protocol::Command unknown{};
  unknown.op = static_cast<uint16_t>(protocol::Op::kGradReady);
  unknown.partition = 5;
  unknown.step = 1;
  unknown.length_bytes = 256;
  EXPECT_EQ(node_.ErrorOf(node_.Command(sessions_[0], unknown)), ErrorId::kRange);
}

TEST_F(NodeStateSharded, OwnersAreRanksWithoutReplicas) {
  const LayoutPtr three = MakeShardedLayout({{{.rows = 300}}}, {.ranks = 3});
  const absl::Status owner = StatusOf(node_.RequestAttach(three, {}));
  EXPECT_THAT(owner, HasError(ErrorId::kRank));
  EXPECT_THAT(std::string(owner.message()), AllOf(HasSubstr("rank 2"), HasSubstr("size is 2")));
  const LayoutPtr replicated = Changed(layout_, [](protocol::LayoutSpec& spec) {
    protocol::PartitionSpec replica = spec.partitions.back();
    replica.replica = 1;
    spec.partitions.push_back(replica);
  });
  EXPECT_THAT(StatusOf(node_.RequestAttach(replicated, {})), HasError(ErrorId::kUnsupported));
  EXPECT_TRUE(node_.state().Jobs().empty());
}

TEST_F(NodeStateSharded, KeepsItsWorldSizeAndItsPartitions) {
  AttachAll();
  TrainStep(1);
  const LayoutPtr alone = MakeShardedLayout({{{.rows = 301}}}, {.ranks = 1});
  // First while the ranks of the old world are attached, then after they have ended.
  for (int i = 0; i < 2; ++i) {
    SCOPED_TRACE(i);
    const absl::Status fewer = StatusOf(node_.RequestAttach(alone, {.world_size = 1}));
    EXPECT_THAT(fewer, HasError(ErrorId::kRank));
    EXPECT_THAT(std::string(fewer.message()),
                AllOf(HasSubstr("over 2 ranks"), HasSubstr("wants 1")));
    const absl::Status more = StatusOf(node_.RequestAttach(layout_, {.world_size = 3}));
    EXPECT_THAT(more, HasError(ErrorId::kRank)) << "though every owner is a rank of it";
    EXPECT_THAT(std::string(more.message()), HasSubstr("wants 3"));
    const absl::Status shared =
        StatusOf(node_.RequestAttach(Changed(layout_, [](auto& s) { s.partitions.clear(); }), {}));
    EXPECT_THAT(shared, HasError(ErrorId::kLayout));
    EXPECT_THAT(std::string(shared.message()), AllOf(HasSubstr("sharded"), HasSubstr("shared")));
    const absl::Status swapped = StatusOf(node_.RequestAttach(
        Changed(layout_, [](auto& s) { s.partitions[2].owner = 1; }), {.rank = 1}));
    EXPECT_THAT(swapped, HasError(ErrorId::kLayout));
    EXPECT_THAT(std::string(swapped.message()), HasSubstr("partitions differ"));
    for (const uint64_t session : sessions_) {
      EXPECT_EQ(node_.is_closed(session), i == 1) << "nobody is evicted";
      node_.End(session, EndCause::kDetached);
    }
    node_.RunTasks();
  }
  AttachAll();
  TrainStep(2);
}

}  // namespace
}  // namespace forebay::daemon::node_state_sharded_test
