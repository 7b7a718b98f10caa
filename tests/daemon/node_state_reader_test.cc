// SPDX-License-Identifier: Apache-2.0
// Goal    Leases order accesses to weights. A step by a session that holds leases is refused with E_LEASE. An update
//         waits for the leases of readers, but only for leases of its own groups. A fetch sent after step returns the new
//         weights. A reader delays an update once, for a bounded time. Ranks do not notice the end of a reader, whatever its
//         cause. A step of another job never waits for the reader.
// Method  The harness. Tasks run when the test says so. A lease's time ends when the test sends the event.

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "daemon/core/base/events.h"
#include "daemon/core/node/node_state.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "protocol/layout.h"
#include "tests/support/node_harness.h"
#include "tests/support/status_test.h"

namespace forebay::daemon::node_state_reader_test {
namespace {

using ::forebay::testing::HasError;
using ::forebay::testing::MakeLayout;
using ::forebay::testing::NodeHarness;
using ::forebay::testing::RoomyOptions;
using ::forebay::testing::SwapPaths;
using protocol::ErrorId;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr ErrorId kUnanswered = ErrorId::kTimeout;  // ErrorOf() of an unanswered command.

// Two ranks, three groups of one block each.
class NodeStateReader : public ::testing::Test {
 protected:
  void SetUp() override {
    for (uint32_t rank = 0; rank < 2; ++rank) {
      ranks_.push_back(node_.Attach(layout_, {.rank = rank}));
    }
    reader_ = node_.AttachReader(layout_);
    ASSERT_NE(node_.attached(reader_), nullptr);
    ASSERT_TRUE(node_.attached(reader_)->status.ok()) << node_.attached(reader_)->status;
  }
  void TearDown() override { EXPECT_EQ(node_.fault(), ""); }

  void DeliverAll(uint64_t step) {
    for (const uint64_t rank : ranks_) {
      for (uint32_t group = 0; group < 3; ++group) {
        node_.Gradient(rank, group, step);
        node_.RunTasks();
      }
    }
  }
  // Calls step for both ranks and returns the tags of the calls.
  std::vector<uint64_t> CallStep(uint64_t step) {
    return {node_.Step(ranks_[0], step), node_.Step(ranks_[1], step)};
  }
  uint64_t Lease(uint64_t session, uint32_t group) {
    const AnswerCommand* answer = node_.answer(node_.Fetch(session, group));
    EXPECT_TRUE(answer != nullptr && answer->status.ok());
    return answer == nullptr ? 0 : answer->completion.lease_id;
  }
  // Returns the weights offsets of all segments that updates have written.
  std::set<uint64_t> UpdatedOffsets() const {
    std::set<uint64_t> offsets;
    for (const auto& update : node_.Logged<UpdateBlock>()) {
      for (const auto& segment : update.segments) offsets.insert(segment.weights.offset_bytes);
    }
    return offsets;
  }
  uint64_t OffsetOf(uint32_t group) const { return layout_->groups()[group].weights_offset_bytes; }
  JobView View() { return *node_.FindJob("job"); }
  void ExpireLeases(uint64_t step) { node_.Send(LeaseTimeExpired{.job = 1, .step = step}); }
  void ExpectCommitted(const std::vector<uint64_t>& tags, uint64_t step) {
    for (const uint64_t tag : tags) {
      EXPECT_EQ(node_.ErrorOf(tag), ErrorId::kNone);
      ASSERT_NE(node_.answer(tag), nullptr);
      EXPECT_EQ(node_.answer(tag)->completion.committed_step, step);
    }
  }

  std::shared_ptr<const protocol::Layout> layout_ = MakeLayout({64, 64, 64});
  NodeHarness node_{RoomyOptions()};
  std::vector<uint64_t> ranks_;
  uint64_t reader_ = 0;
};

TEST_F(NodeStateReader, AStepOfASessionWithLeasesIsRefusedByNameAndCanBeRepeated) {
  const uint64_t first = Lease(ranks_[0], 0);
  const uint64_t second = Lease(ranks_[0], 2);
  const uint64_t again = Lease(ranks_[0], 2);
  DeliverAll(1);
  const uint64_t refused = node_.Step(ranks_[0], 1);
  ASSERT_NE(node_.answer(refused), nullptr);
  EXPECT_THAT(node_.answer(refused)->status, HasError(ErrorId::kLease));
  EXPECT_THAT(std::string(node_.answer(refused)->status.message()),
              AllOf(HasSubstr("g0"), HasSubstr("g2"), Not(HasSubstr("g1"))));
  EXPECT_THAT(node_.Logged<CopyStepRequest>(), IsEmpty()) << "nothing of it was looked at";
  for (const uint64_t lease : {first, second, again}) node_.Release(ranks_[0], lease);
  const auto tags = CallStep(1);
  node_.RunTasks();
  ExpectCommitted(tags, 1);
}

TEST_F(NodeStateReader, ARepeatOfACommittedStepIsAnsweredWithLeasesToo) {
  DeliverAll(1);
  CallStep(1);
  node_.RunTasks();
  Lease(ranks_[0], 0);
  EXPECT_EQ(node_.ErrorOf(node_.Step(ranks_[0], 1)), ErrorId::kNone);
}

TEST_F(NodeStateReader, AFetchSentAfterStepGetsTheWeightsOfThatStep) {
  DeliverAll(1);
  std::vector<uint64_t> tags{node_.Step(ranks_[0], 1)};
  const uint64_t fetch = node_.Fetch(ranks_[0], 1);
  EXPECT_EQ(node_.ErrorOf(fetch), kUnanswered) << "its rank has called step";
  tags.push_back(node_.Step(ranks_[1], 1));
  EXPECT_EQ(node_.ErrorOf(fetch), kUnanswered);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(fetch), ErrorId::kNone);
  EXPECT_TRUE(UpdatedOffsets().contains(OffsetOf(1)));
  ExpectCommitted(tags, 1);
}

TEST_F(NodeStateReader, TheUpdateOfALeasedGroupWaitsAndTheOthersDoNot) {
  const uint64_t lease = Lease(reader_, 1);
  DeliverAll(1);
  const auto tags = CallStep(1);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(tags[0]), kUnanswered);
  EXPECT_EQ(UpdatedOffsets(), (std::set<uint64_t>{OffsetOf(0), OffsetOf(2)}));
  ASSERT_THAT(node_.Logged<StartLeaseTimer>(), SizeIs(1));
  EXPECT_EQ(node_.Logged<StartLeaseTimer>()[0].step, 1U);

  node_.Release(reader_, lease);
  node_.RunTasks();
  ExpectCommitted(tags, 1);
  EXPECT_EQ(UpdatedOffsets().size(), 3U);
  ExpireLeases(1);  // The request comes too late: no update waits any more.
  EXPECT_FALSE(node_.is_closed(reader_));
}

TEST_F(NodeStateReader, WithoutALeaseOnAnUpdatedGroupNoTimerIsStarted) {
  for (const uint64_t rank : ranks_) {
    node_.Gradient(rank, 0, 1);
    node_.RunTasks();
  }
  Lease(reader_, 2);
  const auto tags = CallStep(1);
  node_.RunTasks();
  ExpectCommitted(tags, 1);
  EXPECT_THAT(node_.Logged<StartLeaseTimer>(), IsEmpty());
}

TEST_F(NodeStateReader, AReaderThatHoldsALeaseTooLongIsEndedAndTheUpdateGoesOn) {
  const uint64_t patient = node_.AttachReader(layout_);
  Lease(reader_, 1);
  DeliverAll(1);
  const auto tags = CallStep(1);
  node_.RunTasks();
  const uint64_t generation = View().generation;
  ExpireLeases(1);
  node_.RunTasks();
  ExpectCommitted(tags, 1);
  ASSERT_TRUE(node_.is_closed(reader_));
  EXPECT_THAT(node_.close_reason(reader_), HasError(ErrorId::kLease));
  EXPECT_THAT(std::string(node_.close_reason(reader_).message()), HasSubstr("g1"));
  EXPECT_FALSE(node_.is_closed(patient)) << "it held no lease";
  EXPECT_EQ(View().generation, generation);
  EXPECT_EQ(View().leases, 0U);
  for (const SessionView& session : View().sessions) EXPECT_FALSE(session.fenced);
  DeliverAll(2);
  const auto next = CallStep(2);
  node_.RunTasks();
  ExpectCommitted(next, 2);
}

TEST_F(NodeStateReader, ALeaseTimeOfAnEarlierStepEndsNobody) {
  DeliverAll(1);
  CallStep(1);
  node_.RunTasks();
  Lease(reader_, 1);
  DeliverAll(2);
  const auto tags = CallStep(2);
  node_.RunTasks();
  ExpireLeases(1);
  // The timer belongs to a job that has been freed.
  node_.Send(LeaseTimeExpired{.job = 99, .step = 2});
  EXPECT_FALSE(node_.is_closed(reader_));
  EXPECT_EQ(node_.ErrorOf(tags[0]), kUnanswered);
  ExpireLeases(2);
  node_.RunTasks();
  ExpectCommitted(tags, 2);
}

TEST_F(NodeStateReader, TheRanksDoNotNoticeTheEndOfAReader) {
  for (const EndCause cause : {EndCause::kLost, EndCause::kDetached}) {
    const uint64_t reader = node_.AttachReader(layout_);
    const uint64_t generation = View().generation;
    const uint64_t step = View().committed_step + 1;
    Lease(reader, 0);
    DeliverAll(step);
    const auto tags = CallStep(step);
    node_.RunTasks();
    EXPECT_EQ(node_.ErrorOf(tags[0]), kUnanswered);
    node_.End(reader, cause);
    node_.RunTasks();
    EXPECT_TRUE(node_.is_closed(reader));
    ExpectCommitted(tags, step);
    EXPECT_EQ(View().generation, generation);
  }
}

TEST_F(NodeStateReader, TheEndOfAReaderBeforeAStepRefusesNothing) {
  DeliverAll(1);
  const uint64_t first = node_.Step(ranks_[0], 1);
  node_.End(reader_, EndCause::kDetached);
  EXPECT_EQ(node_.ErrorOf(first), kUnanswered);
  const uint64_t second = node_.Step(ranks_[1], 1);
  node_.RunTasks();
  ExpectCommitted({first, second}, 1);
}

TEST_F(NodeStateReader, AReaderKeepsItsLeasesWhereARankIsLost) {
  const uint64_t lease = Lease(reader_, 1);
  Lease(ranks_[0], 2);
  node_.End(ranks_[1], EndCause::kLost);
  EXPECT_EQ(View().leases, 1U) << "those of the fenced rank are dropped";
  EXPECT_EQ(node_.ErrorOf(node_.Release(reader_, lease)), ErrorId::kNone);
  EXPECT_EQ(node_.ErrorOf(node_.Fetch(reader_, 0)), ErrorId::kNone);
  EXPECT_EQ(node_.ErrorOf(node_.Fetch(ranks_[0], 0)), ErrorId::kRankLost);
}

TEST_F(NodeStateReader, BetweenDecisionAndPublicationAFetchOfAReaderWaits) {
  DeliverAll(1);
  const auto tags = CallStep(1);
  ASSERT_FALSE(node_.Running<UpdateBlock>().empty());
  const uint64_t fetch = node_.Fetch(reader_, 0);
  while (node_.Running<UpdateBlock>().size() > 1) {
    node_.Finish(node_.Running<UpdateBlock>()[0].task);
    EXPECT_EQ(node_.ErrorOf(fetch), kUnanswered);
  }
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(fetch), ErrorId::kNone);
  EXPECT_EQ(node_.answer(fetch)->completion.committed_step, 1U);
  ExpectCommitted(tags, 1);
}

TEST_F(NodeStateReader, ADeletedJobEndsItsReaders) {
  Lease(reader_, 0);
  node_.Send(DeleteJobRequested{.request = 1, .uid = 1000, .job = "job"});
  EXPECT_THAT(node_.Logged<AnswerDelete>()[0].status, HasError(ErrorId::kBusy)) << "it has ranks";
  for (const uint64_t rank : ranks_) node_.End(rank, EndCause::kDetached);
  EXPECT_FALSE(node_.is_closed(reader_));
  node_.Send(DeleteJobRequested{.request = 2, .uid = 1000, .job = "job"});
  node_.RunTasks();
  EXPECT_THAT(node_.close_reason(reader_), HasError(ErrorId::kFenced));
  EXPECT_THAT(node_.Logged<FreeJob>(), SizeIs(1));
}

TEST_F(NodeStateReader, AReaderDeliversNothingAndHasNoVote) {
  EXPECT_EQ(node_.ErrorOf(node_.Gradient(reader_, 0, 1)), ErrorId::kRank);
  EXPECT_EQ(node_.ErrorOf(node_.Step(reader_, 1)), ErrorId::kRank);
  for (const auto op : {protocol::Op::kWriteInitial, protocol::Op::kInitialDone}) {
    protocol::Command command{};
    command.op = static_cast<uint16_t>(op);
    command.length_bytes = op == protocol::Op::kWriteInitial ? layout_->partition_bytes(0) : 0;
    EXPECT_EQ(node_.ErrorOf(node_.Command(reader_, command)), ErrorId::kRank);
  }
  EXPECT_EQ(node_.ErrorOf(node_.Fetch(reader_, 0)), ErrorId::kNone) << "its session goes on";
}

TEST_F(NodeStateReader, AReaderReadsStatesIntoItsOwnArena) {
  const uint64_t read = node_.ReadState(reader_, 1, 0, 64);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(read), ErrorId::kNone);
}

TEST_F(NodeStateReader, ItsArenaCountsInTheLimitUntilItsSessionIsClosed) {
  const uint64_t before = node_.state().Node().dram_used_bytes;
  const uint64_t big = node_.RequestAttach(
      layout_, {.reader = true, .grad_arena_bytes = RoomyOptions().dram_limit_bytes});
  ASSERT_NE(node_.attached(big), nullptr);
  EXPECT_THAT(node_.attached(big)->status, HasError(ErrorId::kDramLimit));
  EXPECT_EQ(node_.state().Node().dram_used_bytes, before);
  const uint64_t other = node_.AttachReader(layout_);
  EXPECT_GT(node_.state().Node().dram_used_bytes, before);
  node_.End(other, EndCause::kLost);
  node_.RunTasks();
  EXPECT_EQ(node_.state().Node().dram_used_bytes, before);
}

TEST_F(NodeStateReader, AnArenaWithoutRoomForOneValueIsRefused) {
  const uint64_t tiny = node_.RequestAttach(layout_, {.reader = true, .grad_arena_bytes = 64});
  EXPECT_THAT(node_.attached(tiny)->status, HasError(ErrorId::kRange));
}

TEST(NodeStateReaderAttach, AReaderDoesNotCreateAJob) {
  NodeHarness node(RoomyOptions());
  const uint64_t reader = node.AttachReader(MakeLayout({64}));
  EXPECT_THAT(node.attached(reader)->status, HasError(ErrorId::kJobName));
  EXPECT_TRUE(node.is_closed(reader));
  EXPECT_TRUE(node.state().Jobs().empty());
}

TEST(NodeStateReaderAttach, AReaderWaitsForTheInitialParametersAndDoesNotWriteThem) {
  NodeHarness node(RoomyOptions(), 1);
  const auto layout = MakeLayout({64});
  const uint64_t rank = node.RequestAttach(layout, {});
  node.RunTasks();
  const uint64_t reader = node.RequestAttach(layout, {.reader = true});
  node.RunTasks();
  EXPECT_EQ(node.attached(reader), nullptr);
  node.End(rank, EndCause::kLost);
  node.RunTasks();
  EXPECT_EQ(node.attached(reader), nullptr) << "nobody has written them";
  node.Attach(layout, {});
  node.RunTasks();
  ASSERT_NE(node.attached(reader), nullptr);
  EXPECT_TRUE(node.attached(reader)->status.ok());
  EXPECT_FALSE(node.attached(reader)->writes_initial);
  EXPECT_EQ(node.fault(), "");
}

TEST(NodeStateReaderAttach, TheFirstPassOfLambDoesNotWaitForLeases) {
  protocol::LayoutSpec spec;
  spec.optimizer = protocol::Optimizer::kLamb;
  spec.params = {{.name = "p", .shape = {64}, .group = 0, .param_group = 0}};
  spec.group_names = {"g"};
  auto created = protocol::Layout::Create(std::move(spec));
  ASSERT_TRUE(created.ok());
  const auto layout = std::make_shared<const protocol::Layout>(*std::move(created));
  NodeHarness node(RoomyOptions(), 1);
  const uint64_t rank = node.Attach(layout, {});
  const uint64_t reader = node.AttachReader(layout);
  const uint64_t fetch = node.Fetch(reader, 0);
  node.Gradient(rank, 0, 1);
  node.RunTasks();
  const uint64_t step = node.Step(rank, 1);
  node.RunTasks();
  ASSERT_THAT(node.Logged<UpdateBlock>(), SizeIs(1));
  EXPECT_EQ(node.Logged<UpdateBlock>()[0].pass, UpdatePass::kNorms);
  node.Release(reader, node.answer(fetch)->completion.lease_id);
  node.RunTasks();
  EXPECT_EQ(node.ErrorOf(step), ErrorId::kNone);
  EXPECT_EQ(node.fault(), "");
}

// Two jobs of 20 blocks each, most of them on swap. Both share 3 staging slots, and one job has a reader.
class NodeStateLeasedSwap : public ::testing::TestWithParam<protocol::Optimizer> {
 protected:
  static constexpr uint64_t kBlockBytes = 8192;  // two planes of 64 float32, each on a page

  void SetUp() override {
    ranks_["held"] = node_.Attach(layout_, {.job = "held"});
    ranks_["other"] = node_.Attach(layout_, {.job = "other"});
    // Evicts six blocks, so that the reader's memory fits in DRAM.
    for (uint32_t block = 0; block < 6; ++block) {
      node_.Send(BlockMoveRequested{.job = node_.state().Jobs()[0].id, .block = block});
    }
    node_.RunTasks();
    reader_ = node_.Attach(layout_, {.job = "held", .reader = true});
    ASSERT_TRUE(node_.attached(reader_)->status.ok()) << node_.attached(reader_)->status;
    for (const JobView& job : node_.state().Jobs()) {
      ASSERT_GT(job.blocks - job.resident_blocks, 3U) << job.name;
    }
  }
  void TearDown() override { EXPECT_EQ(node_.fault(), ""); }

  static std::shared_ptr<const protocol::Layout> LayoutOfParam() {
    protocol::LayoutSpec spec = MakeLayout({320, 320, 320, 320})->spec();
    spec.optimizer = GetParam();
    return std::make_shared<const protocol::Layout>(*protocol::Layout::Create(std::move(spec)));
  }
  static NodeState::Options TightOptions(const std::shared_ptr<const protocol::Layout>& layout) {
    NodeHarness roomy(RoomyOptions(), 1);
    roomy.Attach(layout, {});
    NodeState::Options options = RoomyOptions();
    options.node_bytes = 3 * kBlockBytes;
    options.staging_slots = 3;
    options.staging_slot_bytes = kBlockBytes;
    options.swap = SwapPaths({4 * 20 * kBlockBytes});
    options.dram_limit_bytes =
        options.node_bytes + 2 * roomy.state().Jobs()[0].dram_bytes - 32 * kBlockBytes;
    return options;
  }
  uint64_t CallStep(const std::string& job, uint64_t step) {
    for (uint32_t group = 0; group < 4; ++group) {
      node_.Gradient(ranks_[job], group, step);
      node_.RunTasks();
    }
    const uint64_t tag = node_.Step(ranks_[job], step);
    node_.RunTasks();
    return tag;
  }

  std::shared_ptr<const protocol::Layout> layout_ = LayoutOfParam();
  NodeHarness node_{TightOptions(layout_), 1};
  std::map<std::string, uint64_t> ranks_;
  uint64_t reader_ = 0;
};

TEST_P(NodeStateLeasedSwap, BlocksThatAReaderHoldsUpKeepNoSlotFromAnotherJob) {
  std::vector<uint64_t> fetches;
  for (uint32_t group = 0; group < 4; ++group) fetches.push_back(node_.Fetch(reader_, group));
  const uint64_t held_up = CallStep("held", 1);
  for (uint64_t step = 1; step <= 3; ++step) {
    EXPECT_EQ(node_.ErrorOf(CallStep("other", step)), ErrorId::kNone);
  }
  for (const uint64_t fetch : fetches) {
    EXPECT_EQ(node_.ErrorOf(held_up), kUnanswered);
    node_.ReleaseFetched(reader_, fetch);
    node_.RunTasks();
  }
  EXPECT_EQ(node_.ErrorOf(held_up), ErrorId::kNone);
  const JobView job = node_.state().Jobs()[0];
  const auto passes = static_cast<uint64_t>(protocol::Info(GetParam()).passes);
  EXPECT_EQ(job.update_reads, passes * (job.blocks - job.resident_blocks));
  // Blocks that a reader holds up are read ahead for the first pass only. LAMB's first pass needs no lease, so none of its
  // reads is reclaimed.
  EXPECT_EQ(job.reclaimed_reads > 0, protocol::Info(GetParam()).passes == 1);
  EXPECT_EQ(job.state_read_bytes / (job.update_reads + job.reclaimed_reads),
            passes * job.state_written_bytes / job.update_reads)
      << "what is reclaimed is read again";
  EXPECT_EQ(node_.ErrorOf(CallStep("held", 2)), ErrorId::kNone);
}

TEST_P(NodeStateLeasedSwap, BlocksThatAReaderHoldsUpAreReadAfterTheOthers) {
  std::vector<uint64_t> fetches;
  for (uint32_t group = 0; group < 3; ++group) fetches.push_back(node_.Fetch(reader_, group));
  const uint64_t held_up = CallStep("held", 1);
  EXPECT_EQ(node_.ErrorOf(held_up), kUnanswered);
  std::set<uint64_t> updated;
  for (const UpdateBlock& update : node_.Logged<UpdateBlock>()) {
    if (update.pass != UpdatePass::kNorms) updated.insert(update.identity_after.block);
  }
  EXPECT_EQ(updated, (std::set<uint64_t>{15, 16, 17, 18, 19})) << "of the last group";
  for (const uint64_t fetch : fetches) node_.ReleaseFetched(reader_, fetch);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(held_up), ErrorId::kNone);
}

INSTANTIATE_TEST_SUITE_P(Optimizers, NodeStateLeasedSwap,
                         ::testing::Values(protocol::Optimizer::kAdamW,
                                           protocol::Optimizer::kLamb));

}  // namespace
}  // namespace forebay::daemon::node_state_reader_test
