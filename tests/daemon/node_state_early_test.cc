// SPDX-License-Identifier: Apache-2.0
// Goal    A block with all its gradients is updated before the step is decided. Whatever the decision and the events before it,
//         the job's later state is the same as without the early update.
// Method  The harness. Its model reports a fault if a block is updated from bytes of a step other than the previous one, if a
//         block is published without an update from this step's gradients, if new weights are in the arena before the decision
//         or missing after it, if two tasks use the same bytes, or if a fetch gets weights of another step.

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/units.h"
#include "tests/support/node_harness.h"
#include "tests/support/sharded_job.h"
#include "tests/support/status_test.h"

namespace forebay::daemon::node_state_early_test {
namespace {

using ::forebay::testing::LeastDramOf;
using ::forebay::testing::MakeShardedLayout;
using ::forebay::testing::NodeHarness;
using ::forebay::testing::ShardedJob;
using ::forebay::testing::SwapPaths;
using protocol::ErrorId;
using protocol::StepAnswer;
using testing::HasError;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr ErrorId kUnanswered = ErrorId::kTimeout;  // ErrorOf() of an unanswered command.
constexpr uint32_t kRanks = 2;
constexpr uint32_t kGroups = 5;  // the last one has two parameters
constexpr uint64_t kRowsPerRank = 8192;
constexpr uint64_t kBlockElems = 2048;
constexpr uint64_t kPinnedBytes = 64 << 10;  // Bytes of a group's old and new weights.
constexpr uint64_t kArenaBytes = 512 << 10;  // more than all gradients of a rank

enum class Where : uint8_t {
  kWeightsInDram,
  kSomeStatesInDram,
  kWeightsOnSwap,
  kGradientsOnSwap,  // Only some blocks have their gradients in DRAM.
};

bool IsOnSwap(Where where) {
  return where == Where::kWeightsOnSwap || where == Where::kGradientsOnSwap;
}

// A partition has four blocks. In the last group two parameters share a block.
std::shared_ptr<const protocol::Layout> Groups() {
  std::vector<std::vector<testing::ShardedParam>> groups(
      kGroups - 1, {{.rows = uint64_t{kRanks} * kRowsPerRank}});
  groups.push_back({{.rows = uint64_t{kRanks} * 4000}, {.rows = uint64_t{kRanks} * 4192}});
  return MakeShardedLayout(
      groups,
      {.ranks = kRanks, .dtype = protocol::DType::kBFloat16, .format = protocol::Format::kExact});
}

NodeState::Options OptionsOf(uint64_t dram_bytes) {
  return {.dram_limit_bytes = dram_bytes,
          .node_bytes = 4096,
          .staging_slots = 4,
          .staging_slot_bytes = 65536,
          .swap = SwapPaths({8 << 20, 8 << 20}),
          .block_elems = kBlockElems,
          .workers = 2};
}

NodeState::Options OptionsFor(Where where, bool accumulate = false) {
  if (IsOnSwap(where)) {
    return OptionsOf(
        kPinnedBytes +
        LeastDramOf(
            Groups(), OptionsOf(0), kRanks,
            {.accumulate = accumulate, .early_updates = true, .grad_arena_bytes = kArenaBytes},
            /*gradients_in_dram=*/where != Where::kGradientsOnSwap));
  }
  ShardedJob roomy(Groups(), kRanks, OptionsOf(uint64_t{64} << 20));
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    roomy.node_.Attach(roomy.layout_,
                       {.rank = rank, .accumulate = accumulate, .grad_arena_bytes = kArenaBytes});
  }
  const uint64_t blocks = roomy.View().blocks;
  const uint64_t slot_bytes = kBlockElems * 2;
  const uint64_t block_bytes = roomy.View().resident_bytes / blocks;
  uint64_t dram = roomy.node_.state().Node().dram_used_bytes - roomy.View().resident_bytes;
  dram += blocks * slot_bytes;
  if (where == Where::kSomeStatesInDram) dram += 9 * (block_bytes - slot_bytes);
  return OptionsOf(dram);
}

class EarlyJob : public ShardedJob {
 public:
  explicit EarlyJob(const NodeState::Options& options, bool accumulate = false)
      : ShardedJob(Groups(), kRanks, options), accumulate_(accumulate) {
    Attach();
    node_.set_answered_when(StepAnswer::kCommitted);
  }
  void Attach() {
    sessions_.clear();
    for (uint32_t rank = 0; rank < kRanks; ++rank) AttachRank(rank);
    ASSERT_TRUE(View().ready);
  }
  void AttachRank(uint32_t rank) {
    sessions_.resize(std::max<size_t>(sessions_.size(), rank + 1));
    sessions_[rank] = node_.Attach(layout_, {.rank = rank,
                                             .accumulate = accumulate_,
                                             .early_updates = true,
                                             .grad_arena_bytes = kArenaBytes});
    ASSERT_OK(StatusOf(sessions_[rank]));
  }
  // Announces `step` for every rank.
  void Announce(uint64_t step, double lr = 0.1) {
    for (const uint64_t session : sessions_) {
      const uint64_t tag = node_.Announce(session, step, lr);
      EXPECT_EQ(node_.ErrorOf(tag), ErrorId::kNone) << MessageOf(tag);
    }
  }
  uint64_t Deliver(uint32_t partition, uint64_t step) {
    return node_.Gradient(sessions_[layout_->partitions()[partition].owner], partition, step);
  }
  // Delivers the last partition first, as a backward pass does.
  void DeliverAll(uint64_t step) {
    for (auto i = static_cast<uint32_t>(layout_->partitions().size()); i-- > 0;) Deliver(i, step);
  }
  std::vector<uint64_t> CallAll(uint64_t step, double lr = 0.1, double max_grad_norm = 0) {
    std::vector<uint64_t> calls;
    for (const uint64_t session : sessions_) {
      calls.push_back(node_.Step(session, step, lr, max_grad_norm));
    }
    return calls;
  }
  void Train(uint64_t step) {
    Announce(step);
    DeliverAll(step);
    node_.RunTasks();
    const std::vector<uint64_t> calls = CallAll(step);
    node_.RunTasks();
    for (const uint64_t call : calls) EXPECT_EQ(node_.ErrorOf(call), ErrorId::kNone);
    ExpectWritten(step);
  }
  void ExpectWritten(uint64_t step) {
    EXPECT_EQ(View().published_step, step);
    for (const auto& [block, written] : node_.model().WrittenSteps(1)) {
      EXPECT_EQ(written, step) << block;
    }
    EXPECT_EQ(node_.fault(), "");
  }
  uint64_t swapped_blocks() const { return View().blocks - View().resident_blocks; }
  std::vector<uint64_t> Dropped() {
    std::vector<uint64_t> blocks;
    for (const EarlyUpdatesDropped& dropped : node_.Logged<EarlyUpdatesDropped>()) {
      blocks.insert(blocks.end(), dropped.blocks.begin(), dropped.blocks.end());
    }
    return blocks;
  }
  size_t updates() { return node_.Logged<UpdateBlock>().size(); }
  void FinishOne() { node_.Finish(node_.model().running().begin()->first); }
  // Moves all states to swap.
  void Evict() {
    for (uint32_t block = 0; block < View().blocks; ++block) {
      node_.Send(BlockMoveRequested{.job = 1, .block = block});
    }
    node_.RunTasks();
  }

  bool accumulate_;
};

// Options of OptionsFor() with DRAM for a reader.
NodeState::Options RoomForAReader(Where where) {
  NodeState::Options options = OptionsFor(where);
  if (where == Where::kWeightsOnSwap) options.dram_limit_bytes -= kPinnedBytes;
  options.dram_limit_bytes +=
      uint64_t{where == Where::kWeightsOnSwap ? 11U : 24U} * protocol::kPageBytes;
  return options;
}

class NodeStateEarly : public ::testing::TestWithParam<Where>, protected EarlyJob {
 protected:
  NodeStateEarly() : EarlyJob(OptionsFor(GetParam())) { before_ = updates(); }
  void TearDown() override { EXPECT_EQ(node_.fault(), ""); }

  // Expects `updates` to cover every block on swap. If gradients are on swap, blocks with spilled gradients may be
  // updated after the decision.
  void ExpectAllEarly(uint64_t updates) {
    if (GetParam() == Where::kGradientsOnSwap) {
      EXPECT_GT(updates, 0U);
      EXPECT_LE(updates, swapped_blocks());
      EXPECT_FALSE(node_.Logged<SpillSums>().empty());
    } else {
      EXPECT_EQ(updates, swapped_blocks());
    }
  }

  size_t before_ = 0;  // Earlier updates of pass kMasters.
};

TEST_P(NodeStateEarly, BlocksOnSwapAreUpdatedBeforeTheDecisionAndNotAgain) {
  EXPECT_EQ(View().weights_on_swap_bytes > 0, IsOnSwap(GetParam()));
  EXPECT_EQ(View().sums_on_swap_bytes > 0, GetParam() == Where::kGradientsOnSwap);
  EXPECT_EQ(View().resident_blocks > 0, GetParam() == Where::kSomeStatesInDram);
  Announce(1);
  DeliverAll(1);
  node_.RunTasks();
  const uint64_t early = updates() - before_;
  ExpectAllEarly(early);
  EXPECT_EQ(View().committed_step, 0U);
  EXPECT_THAT(node_.Logged<InstallWeights>(), IsEmpty());
  CallAll(1);
  node_.RunTasks();
  EXPECT_EQ(updates() - before_, View().blocks) << "those in DRAM after it";
  ExpectWritten(1);
  EXPECT_THAT(Dropped(), IsEmpty());
  EXPECT_EQ(View().last_step_early_updates, early);
  EXPECT_GT(View().last_step_written_bytes, 0U);
  EXPECT_EQ(View().last_update_bytes == 0, early == swapped_blocks())
      << "else the disk was done before the decision";
  for (uint64_t step = 2; step <= 4; ++step) Train(step);
}

TEST_P(NodeStateEarly, WithoutAnAnnouncementNothingIsUpdatedEarly) {
  DeliverAll(1);
  node_.RunTasks();
  EXPECT_EQ(updates(), before_);
  CallAll(1);
  node_.RunTasks();
  ExpectWritten(1);
  EXPECT_EQ(View().last_step_early_updates, 0U);
  EXPECT_GE(View().last_update_bytes, View().last_step_written_bytes);
}

TEST_P(NodeStateEarly, OtherScalarsThanAnnouncedUpdateEveryBlockAnew) {
  Announce(1, 0.2);
  DeliverAll(1);
  node_.RunTasks();
  const uint64_t early = updates() - before_;
  ExpectAllEarly(early);
  CallAll(1, 0.1);
  EXPECT_THAT(Dropped(), SizeIs(early));
  node_.RunTasks();
  const std::vector<UpdateBlock> all = node_.Logged<UpdateBlock>();
  EXPECT_EQ(all.size() - before_, early + View().blocks);
  for (size_t i = before_ + early; i < all.size(); ++i) {
    for (const UpdateSegment& segment : all[i].segments) {
      EXPECT_EQ(NodeHarness::UpdateCount(segment), 1U) << "lr 0.1, t 1";
      EXPECT_FALSE(segment.weights.new_offset_bytes.has_value());
    }
  }
  ExpectWritten(1);
  Train(2);
}

TEST_P(NodeStateEarly, AClippedStepIsUpdatedAnewAndTheNextOneNotEarly) {
  Announce(1);
  DeliverAll(1);
  node_.RunTasks();
  const uint64_t early = updates() - before_;
  CallAll(1, 0.1, /*max_grad_norm=*/1e-3);
  node_.RunTasks();
  ExpectWritten(1);
  EXPECT_THAT(Dropped(), SizeIs(early));
  const size_t updated = updates();
  Announce(2);
  DeliverAll(2);
  node_.RunTasks();
  EXPECT_EQ(updates(), updated) << "it may be clipped too";
  CallAll(2);
  node_.RunTasks();
  ExpectWritten(2);
  Announce(3);
  DeliverAll(3);
  node_.RunTasks();
  ExpectAllEarly(updates() - updated - View().blocks);
  CallAll(3);
  node_.RunTasks();
  ExpectWritten(3);
}

TEST_P(NodeStateEarly, AParameterWithoutAGradientKeepsItsBlocks) {
  Announce(1);
  // One group has no gradient. In the last group only one of two parameters has a gradient.
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    const std::vector<uint32_t> own = OwnedBy(rank);
    for (uint32_t i = 1; i < own.size(); ++i) Deliver(own[i], 1);
    // The parameter's gradient is delivered as zeros, together with the other parameter's.
    node_.SetPresent(sessions_[rank], kGroups, false);
  }
  node_.RunTasks();
  CallAll(1);
  EXPECT_THAT(Dropped(), SizeIs(::testing::Ge(GetParam() == Where::kSomeStatesInDram ? 0U : 4U)));
  node_.RunTasks();
  EXPECT_EQ(View().published_step, 1U);
  for (const auto& [block, step] : node_.model().WrittenSteps(1)) EXPECT_LE(step, 1U);
  Train(2);
}

// A decision may come while any early update runs. The update is accepted, or ends first.
TEST_P(NodeStateEarly, ADecisionComesAtAnyTime) {
  uint64_t step = 0;
  for (uint64_t finished = 0; finished < 120; finished += 7) {
    ++step;
    Announce(step);
    DeliverAll(step);
    for (uint64_t i = 0; i < finished && !node_.model().running().empty(); ++i) FinishOne();
    const double lr = finished % 2 == 0 ? 0.1 : 0.3;
    CallAll(step, lr);
    node_.RunTasks();
    ExpectWritten(step);
  }
}

TEST_P(NodeStateEarly, FetchesGetTheOldWeightsBeforeTheDecisionAndTheNewOnesAfterIt) {
  for (uint64_t step = 1; step <= 3; ++step) {
    Announce(step);
    for (auto i = static_cast<uint32_t>(layout_->partitions().size()); i-- > 0;) {
      Deliver(i, step);
      for (int n = 0; n < 5 && !node_.model().running().empty(); ++n) FinishOne();
      const uint64_t session = sessions_[layout_->partitions()[i].owner];
      const uint64_t tag = node_.Fetch(session, i);
      while (node_.ErrorOf(tag) == kUnanswered) FinishOne();
      node_.ReleaseFetched(session, tag);
    }
    CallAll(step);
    for (uint32_t i = 0; i < layout_->partitions().size(); ++i) {
      const uint64_t session = sessions_[layout_->partitions()[i].owner];
      const uint64_t tag = node_.Fetch(session, i);
      while (node_.ErrorOf(tag) == kUnanswered) FinishOne();
      node_.ReleaseFetched(session, tag);
    }
    node_.RunTasks();
    ExpectWritten(step);
  }
}

// ------------------------------------------------------------------------------- more contributions

class NodeStateEarlyPasses : public ::testing::TestWithParam<Where>, protected EarlyJob {
 protected:
  NodeStateEarlyPasses() : EarlyJob(OptionsFor(GetParam(), true), /*accumulate=*/true) {}
  void TearDown() override { EXPECT_EQ(node_.fault(), ""); }
};

// Each rank announces the step in its first pass by mistake. The second pass arrives after blocks have been updated, or while
// they are updated.
TEST_P(NodeStateEarlyPasses, AFurtherPassUpdatesItsBlocksAnew) {
  for (const uint64_t finished : {4U, 17U, 1000U}) {
    const uint64_t step = View().committed_step + 1;
    Announce(step);
    DeliverAll(step);
    for (uint64_t i = 0; i < finished && !node_.model().running().empty(); ++i) FinishOne();
    for (const uint64_t session : sessions_) node_.BeginPass(session);
    DeliverAll(step);
    node_.RunTasks();
    CallAll(step);
    node_.RunTasks();
    ExpectWritten(step);
    for (const auto& [param, tokens] : node_.model().committed_gradients(1)) {
      EXPECT_THAT(tokens, SizeIs(2 * kRanks)) << param;
    }
    for (const uint64_t session : sessions_) node_.EndPasses(session);
  }
  EXPECT_FALSE(Dropped().empty());
}

TEST_P(NodeStateEarlyPasses, TheLastOfSeveralIsUpdatedAtArrival) {
  const size_t before = updates();
  DeliverAll(1);
  node_.RunTasks();
  Announce(1);
  node_.RunTasks();
  EXPECT_EQ(updates(), before) << "what is there is not all";
  for (const uint64_t session : sessions_) node_.BeginPass(session);
  DeliverAll(1);
  node_.RunTasks();
  const uint64_t early = updates() - before;
  EXPECT_TRUE(early == swapped_blocks() || GetParam() == Where::kGradientsOnSwap) << early;
  CallAll(1);
  node_.RunTasks();
  EXPECT_EQ(View().last_step_early_updates, early);
  EXPECT_THAT(Dropped(), IsEmpty());
  ExpectWritten(1);
}

INSTANTIATE_TEST_SUITE_P(Places, NodeStateEarlyPasses,
                         ::testing::Values(Where::kWeightsInDram, Where::kSomeStatesInDram,
                                           Where::kWeightsOnSwap, Where::kGradientsOnSwap));

// One rank is in its last pass; the other rank is not.
TEST_P(NodeStateEarly, EachRankSaysForItselfThatItsPassIsTheLast) {
  EXPECT_EQ(node_.ErrorOf(node_.Announce(sessions_[0], 1)), ErrorId::kNone);
  DeliverAll(1);
  node_.RunTasks();
  for (const UpdateBlock& update : node_.Logged<UpdateBlock>()) {
    if (update.pass == UpdatePass::kMasters) continue;
    for (const uint32_t partition : PartitionsOf(update)) {
      EXPECT_EQ(layout_->partitions()[partition].owner, 0U);
    }
  }
  EXPECT_GT(updates(), before_);
  CallAll(1);
  node_.RunTasks();
  ExpectWritten(1);
}

TEST_P(NodeStateEarly, WhatRanksAnnounceDifferentlyIsNotUpdated) {
  node_.Announce(sessions_[0], 1, 0.1);
  DeliverAll(1);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(node_.Announce(sessions_[1], 1, 0.2)), ErrorId::kNone);
  EXPECT_FALSE(Dropped().empty());
  const size_t updated = updates();
  node_.RunTasks();
  EXPECT_EQ(updates(), updated);
  CallAll(1);
  node_.RunTasks();
  ExpectWritten(1);
  Train(2);
}

// ------------------------------------------------------------------------------------ what goes wrong

TEST_P(NodeStateEarly, AnAttemptThatEndsDropsWhatWasMadeOfIt) {
  Announce(1);
  DeliverAll(1);
  while (updates() < before_ + 4) FinishOne();
  // A rank restarts the step as a new attempt, and all ranks deliver their gradients again.
  for (uint32_t rank = 0; rank < kRanks; ++rank) node_.SetAttempt(sessions_[rank], 1);
  Announce(1);
  EXPECT_FALSE(Dropped().empty());
  DeliverAll(1);
  for (int i = 0; i < 30; ++i) FinishOne();
  CallAll(1);
  node_.RunTasks();
  ExpectWritten(1);
}

TEST_P(NodeStateEarly, ANonfiniteGradientDropsWhatWasMadeOfTheOthers) {
  Announce(1);
  const std::vector<uint32_t> own = OwnedBy(0);
  for (uint32_t i = 1; i < own.size(); ++i) Deliver(own[i], 1);
  node_.RunTasks();
  node_.Gradient(sessions_[0], own[0], 1, /*finite=*/false);
  node_.RunTasks();
  EXPECT_EQ(View().committed_step, 0U);
  EXPECT_EQ(Dropped().empty(), updates() == before_);
  for (uint32_t rank = 0; rank < kRanks; ++rank) node_.SetAttempt(sessions_[rank], 1);
  Train(1);
}

TEST_P(NodeStateEarly, ALostRankDropsTheStep) {
  Announce(1);
  DeliverAll(1);
  while (updates() < before_ + 4) FinishOne();
  node_.End(sessions_[1], EndCause::kLost);
  EXPECT_FALSE(Dropped().empty());
  node_.End(sessions_[0], EndCause::kDetached);
  node_.RunTasks();
  Attach();
  for (const auto& [block, step] : node_.model().WrittenSteps(1)) EXPECT_EQ(step, 0U);
  Train(1);
}

TEST_P(NodeStateEarly, AnotherWorldBeginsWithTheOldStates) {
  Announce(1);
  DeliverAll(1);
  for (int i = 0; i < 25; ++i) FinishOne();
  for (const uint64_t session : sessions_) node_.End(session, EndCause::kLost);
  Attach();
  Train(1);
}

TEST_P(NodeStateEarly, AReadThatFailsRefusesTheStepWhichGoesOnLater) {
  Announce(1);
  DeliverAll(1);
  const auto read = node_.FinishUntil<ReadBlock>();
  node_.Finish(read.task, protocol::MakeError(ErrorId::kSwapIo, "simulated"));
  node_.RunTasks();
  std::vector<uint64_t> calls = CallAll(1);
  node_.RunTasks();
  for (const uint64_t call : calls) EXPECT_EQ(node_.ErrorOf(call), ErrorId::kSwapIo);
  EXPECT_EQ(View().committed_step, 0U);
  calls = CallAll(1);
  node_.RunTasks();
  for (const uint64_t call : calls) EXPECT_EQ(node_.ErrorOf(call), ErrorId::kNone);
  ExpectWritten(1);
}

TEST_P(NodeStateEarly, ABlockThatIsCorruptRefusesTheStep) {
  Train(1);
  Announce(2);
  DeliverAll(2);
  node_.Finish(node_.FinishUntil<UpdateBlock>().task,
               protocol::MakeError(ErrorId::kCorrupt, "simulated"));
  node_.RunTasks();
  std::vector<uint64_t> calls = CallAll(2);
  node_.RunTasks();
  for (const uint64_t call : calls) EXPECT_EQ(node_.ErrorOf(call), ErrorId::kCorrupt);
  calls = CallAll(2);
  node_.RunTasks();
  for (const uint64_t call : calls) EXPECT_EQ(node_.ErrorOf(call), ErrorId::kNone);
  ExpectWritten(2);
}

TEST_P(NodeStateEarly, AWriteThatFailsLeavesItsBlockToTheDecision) {
  Announce(1);
  DeliverAll(1);
  node_.Finish(node_.FinishUntil<WriteBlock>().task,
               protocol::MakeError(ErrorId::kSwapIo, "simulated"));
  node_.RunTasks();
  CallAll(1);
  node_.RunTasks();
  ExpectWritten(1);
  Train(2);
}

TEST_P(NodeStateEarly, AJobIsDeletedMeanwhile) {
  Announce(1);
  DeliverAll(1);
  for (int i = 0; i < 25; ++i) FinishOne();
  for (const uint64_t session : sessions_) node_.End(session, EndCause::kLost);
  node_.Send(DeleteJobRequested{.request = 1, .uid = 1000, .job = "job"});
  node_.RunTasks();
  EXPECT_THAT(node_.Logged<FreeJob>(), SizeIs(1));
}

TEST_P(NodeStateEarly, AnnouncementsOfOtherStepsAreRefused) {
  EXPECT_EQ(node_.ErrorOf(node_.Announce(sessions_[0], 2)), ErrorId::kStep);
  EXPECT_EQ(node_.ErrorOf(node_.Announce(sessions_[0], 0)), ErrorId::kStep);
  DeliverAll(1);
  const uint64_t call = node_.Step(sessions_[0], 1);
  EXPECT_EQ(node_.ErrorOf(node_.Announce(sessions_[0], 1)), ErrorId::kStep) << "it has called it";
  node_.Step(sessions_[1], 1);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(call), ErrorId::kNone);
}

// -------------------------------------------------------------------- what else wants the job's blocks

TEST_P(NodeStateEarly, ReadsOfStatesGoFirst) {
  Announce(1);
  DeliverAll(1);
  std::vector<uint64_t> reads;
  for (uint32_t i = 0; i < 400 && !node_.model().running().empty(); ++i) {
    if (i % 11 == 0) reads.push_back(node_.ReadState(sessions_[0], i % kGroups, 100, 5000));
    FinishOne();
    // The model would report a fault if states were read from a block that is being updated.
  }
  EXPECT_GT(reads.size(), 5U);
  node_.RunTasks();
  for (const uint64_t read : reads) EXPECT_EQ(node_.ErrorOf(read), ErrorId::kNone);
  CallAll(1);
  node_.RunTasks();
  ExpectWritten(1);
  EXPECT_GT(View().last_step_early_updates, 0U);
}

TEST_P(NodeStateEarly, AWriteOfMastersDropsWhatWasMadeOfTheOldOnes) {
  Announce(1);
  DeliverAll(1);
  for (uint32_t i = 0; i < 40; ++i) FinishOne();
  const uint64_t write = node_.WriteState(sessions_[0], OwnedBy(0)[1]);
  EXPECT_FALSE(Dropped().empty());
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(write), ErrorId::kNone);
  CallAll(1);
  node_.RunTasks();
  ExpectWritten(1);
  Train(2);
}

TEST_P(NodeStateEarly, BlocksMoveMeanwhile) {
  for (uint64_t step = 1; step <= 6; ++step) {
    Announce(step);
    DeliverAll(step);
    for (uint32_t i = 0; i < 300 && !node_.model().running().empty(); ++i) {
      if (i % 13 == 0) {
        node_.Send(BlockMoveRequested{
            .job = 1,
            .block = static_cast<uint32_t>(i * 7 + step) % static_cast<uint32_t>(View().blocks)});
      }
      FinishOne();
    }
    node_.RunTasks();
    CallAll(step);
    node_.RunTasks();
    ExpectWritten(step);
  }
  if (GetParam() != Where::kSomeStatesInDram) return;
  EXPECT_FALSE(node_.Logged<EvictBlock>().empty());
  EXPECT_FALSE(node_.Logged<PromoteBlock>().empty());
}

TEST_P(NodeStateEarly, WeightsThatAReaderHoldsAreUpdatedAfterIt) {
  // Gradients take DRAM that a reader would need.
  if (GetParam() == Where::kGradientsOnSwap) return;
  EarlyJob job(RoomForAReader(GetParam()));
  job.Evict();
  NodeHarness& node = job.node_;
  const uint64_t reader = node.AttachReader(job.layout_);
  ASSERT_OK(job.StatusOf(reader));
  EXPECT_EQ(node.ErrorOf(node.Announce(reader, 1)), ErrorId::kRank);
  const uint64_t held = node.Fetch(reader, 3);
  node.RunTasks();
  ASSERT_EQ(node.ErrorOf(held), ErrorId::kNone);
  job.Announce(1);
  job.DeliverAll(1);
  node.RunTasks();
  job.CallAll(1);
  node.RunTasks();
  EXPECT_EQ(job.View().committed_step, 1U);
  EXPECT_EQ(job.View().published_step, 0U) << "blocks wait for the lease";
  EXPECT_FALSE(job.Dropped().empty());
  node.ReleaseFetched(reader, held);
  node.RunTasks();
  job.ExpectWritten(1);
}

TEST_P(NodeStateEarly, RanksAnnounceDifferentlyWhileBlocksAreUpdated) {
  for (uint64_t finished = 0; finished < 50; finished += 3) {
    const uint64_t step = View().committed_step + 1;
    node_.Announce(sessions_[0], step, 0.1);
    DeliverAll(step);
    for (uint64_t i = 0; i < finished && !node_.model().running().empty(); ++i) FinishOne();
    node_.Announce(sessions_[1], step, 0.2);
    node_.RunTasks();
    CallAll(step);
    node_.RunTasks();
    ExpectWritten(step);
    Train(step + 1);  // with nothing updated early
  }
  EXPECT_FALSE(Dropped().empty());
}

// A read of states may use the old version of a block that is updated early. Then the early update is dropped.
TEST_P(NodeStateEarly, AReadOutlivesTheEarlyUpdateOfItsBlock) {
  if (GetParam() == Where::kGradientsOnSwap) return;  // no DRAM for a reader
  for (const int event : {0, 1, 2}) {
    for (const int progress :
         {0, 1, 2}) {  // the disk reads; the same, and the reader ends; a worker reads
      EarlyJob job(RoomForAReader(GetParam()));
      job.Evict();
      NodeHarness& node = job.node_;
      const uint64_t reader = node.AttachReader(job.layout_);
      node.Announce(job.sessions_[0], 1);
      job.DeliverAll(1);
      node.RunTasks();
      const uint64_t read = node.ReadState(reader, 1, 0, 100);
      if (progress == 1) node.End(reader, EndCause::kLost);
      if (progress == 2) job.FinishOne();
      if (event == 0) node.Announce(job.sessions_[1], 1, 0.2);
      if (event == 1) node.WriteState(job.sessions_[0], job.OwnedBy(0)[1]);
      if (event == 2) {
        for (const uint64_t session : job.sessions_) node.SetAttempt(session, 1);
        job.Announce(1);
        job.DeliverAll(1);
      }
      EXPECT_FALSE(job.Dropped().empty());
      node.RunTasks();
      EXPECT_EQ(node.ErrorOf(read), progress == 1 ? kUnanswered : ErrorId::kNone);
      job.CallAll(1);
      node.RunTasks();
      job.ExpectWritten(1);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Places, NodeStateEarly,
                         ::testing::Values(Where::kWeightsInDram, Where::kSomeStatesInDram,
                                           Where::kWeightsOnSwap, Where::kGradientsOnSwap));

// --------------------------------------------------------------------------------------- the order

TEST(NodeStateEarlyOrder, OfThoseThatAreThereTheOneThatIsNeededFirstInForward) {
  NodeState::Options options = OptionsFor(Where::kWeightsInDram);
  options.workers = 1;
  options.staging_slots = 1;
  EarlyJob job(options);
  const size_t before = job.updates();
  job.Announce(1);
  job.DeliverAll(1);
  job.node_.FinishAll<AddGradients>();
  job.node_.RunTasks();
  std::vector<uint32_t> partitions;
  const std::vector<UpdateBlock> updates = job.node_.Logged<UpdateBlock>();
  for (size_t i = before; i < updates.size(); ++i) {
    partitions.push_back(*job.PartitionsOf(updates[i]).begin());
  }
  ASSERT_THAT(partitions, SizeIs(job.View().blocks));
  // The first block to have all gradients is updated before the other blocks are ready, and so is not in the order.
  EXPECT_TRUE(std::ranges::is_sorted(partitions.begin() + 1, partitions.end()))
      << ::testing::PrintToString(partitions);
}

// The new weights of a block are not whole pages. The DRAM limit grows from too little to more than enough, and used DRAM never
// exceeds it.
TEST(NodeStateEarlyPlan, NeverTakesMoreThanTheLimit) {
  NodeState::Options options = OptionsFor(Where::kWeightsInDram);
  options.block_elems = 1088;
  const uint64_t most = options.dram_limit_bytes + (64 << 10);
  uint64_t attached = 0;
  for (uint64_t dram = most - (512 << 10); dram < most; dram += 1023) {
    options.dram_limit_bytes = dram;
    NodeHarness node(options, kRanks);
    const uint64_t session =
        node.AttachOnly(Groups(), {.early_updates = true, .grad_arena_bytes = kArenaBytes});
    EXPECT_LE(node.state().Node().dram_used_bytes, dram);
    EXPECT_TRUE(attached == 0 || node.attached(session)->status.ok()) << dram;
    if (node.attached(session)->status.ok()) ++attached;
  }
  EXPECT_GT(attached, 100U);
}

TEST(NodeStateEarlyPlan, StatesGiveRoomForNewWeights) {
  const auto view_of = [](bool early) {
    ShardedJob job(Groups(), kRanks, OptionsFor(Where::kSomeStatesInDram));
    const AttachRequested request{.uid = 1000,
                                  .job = "job",
                                  .session_request = {.world_size = kRanks,
                                                      .grad_arena_bytes = kArenaBytes,
                                                      .extra_state_bytes = 64,
                                                      .early_updates = early},
                                  .layout = job.layout_};
    const absl::StatusOr<JobPlan> plan = job.node_.state().Plan(request, std::nullopt);
    EXPECT_OK(plan.status());
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      job.sessions_.push_back(job.node_.Attach(
          job.layout_, {.rank = rank, .early_updates = early, .grad_arena_bytes = kArenaBytes}));
      EXPECT_OK(job.StatusOf(job.sessions_.back()));
    }
    const uint64_t used_bytes = job.node_.state().Node().dram_used_bytes;
    EXPECT_LE(used_bytes, OptionsFor(Where::kSomeStatesInDram).dram_limit_bytes);
    EXPECT_EQ(plan->weights + plan->weights_cache + plan->states + plan->sums + plan->extra_state +
                  plan->new_weights + plan->sessions + plan->tables + plan->node,
              used_bytes);
    const JobView view = job.View();
    EXPECT_EQ(plan->new_weights, view.new_weights_bytes);
    EXPECT_EQ(plan->new_weights > 0, early);
    EXPECT_EQ(plan->step_read, view.step_traffic.read_bytes);
    EXPECT_EQ(plan->step_written, view.step_traffic.written_bytes);
    return view;
  };
  const JobView without = view_of(false);
  const JobView with = view_of(true);
  EXPECT_GT(without.resident_blocks, with.resident_blocks);
  EXPECT_LE(with.dram_bytes, without.dram_bytes + protocol::kPageBytes * 64);
}

// A world of more ranks needs more DRAM than the limit, in a job that already has room for new weights.
TEST(NodeStateEarlyPlan, WhatIsMissingIsReportedWithEveryTerm) {
  constexpr uint64_t kMoreRanks = 3;
  const auto layout = testing::MakeLayoutOfParams({{8192}, {8192}}, protocol::DType::kBFloat16);
  uint64_t dram = 0;  // Smallest limit that fits one rank and some new weights.
  for (uint64_t new_weights = 0; new_weights == 0; dram += protocol::kPageBytes) {
    NodeHarness node(OptionsOf(dram), /*world_size=*/1);
    node.AttachOnly(layout, {.early_updates = true});
    const std::optional<JobView> job = node.FindJob("job");
    new_weights = job ? job->new_weights_bytes : 0;
    ASSERT_LT(dram, uint64_t{16} << 20);
  }
  NodeHarness node(OptionsOf(dram), /*world_size=*/1);
  const uint64_t session = node.Attach(layout, {.early_updates = true});
  ASSERT_OK(node.attached(session)->status);
  node.End(session, EndCause::kDetached);
  const uint64_t refused =
      node.RequestAttach(layout, {.world_size = kMoreRanks, .early_updates = true});
  const absl::Status& status = node.attached(refused)->status;
  ASSERT_THAT(status, HasError(ErrorId::kDramLimit));
  const std::string message(status.message());
  std::vector<uint64_t> terms;  // The sum, followed by its terms.
  for (size_t at = 0; (at = message.find('(', at + 1)) != std::string::npos;) {
    uint64_t bytes = 0;
    const std::string digits = message.substr(at + 1, message.find(' ', at) - at - 1);
    if (absl::SimpleAtoi(digits, &bytes)) terms.push_back(bytes);
  }
  ASSERT_GE(terms.size(), 10U) << message;
  EXPECT_THAT(message, HasSubstr("new weights"));
  EXPECT_EQ(terms[5], node.FindJob("job")->new_weights_bytes);
  const uint64_t of_each_rank = terms[6] + terms[7] + terms[8];
  EXPECT_EQ(terms[0], terms[1] + terms[2] + terms[3] + terms[4] + terms[5] +
                          kMoreRanks * of_each_rank + terms[9])
      << message;
}

}  // namespace
}  // namespace forebay::daemon::node_state_early_test
