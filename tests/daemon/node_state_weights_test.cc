// SPDX-License-Identifier: Apache-2.0
// Goal    Weights that do not fit in DRAM are on swap. Every fetch gets the weights of the newest step, even if blocks are read
//         ahead, dropped, late or broken. A job trains with the smallest cache with which it is admitted.
// Method  The harness with sharded layouts and small limits. Its model reports a fault if a fetch is answered with bytes of
//         another partition or of an older version, if a copy is written under a lease or read from a slot that is being
//         written, or if a block's weights do not match its digests.

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/units.h"
#include "tests/support/node_harness.h"
#include "tests/support/sharded_job.h"
#include "tests/support/status_test.h"

namespace forebay::daemon::node_state_weights_test {
namespace {

using ::forebay::testing::HasError;
using ::forebay::testing::LeastDramOf;
using ::forebay::testing::MakeShardedLayout;
using ::forebay::testing::NodeHarness;
using ::forebay::testing::RequestOf;
using ::forebay::testing::ShardedJob;
using ::forebay::testing::ShardedParam;
using ::forebay::testing::SwapPaths;
using protocol::ErrorId;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr ErrorId kUnanswered = ErrorId::kTimeout;  // ErrorOf() of an unanswered command.
constexpr uint32_t kRanks = 2;
// Bytes of DRAM above the smallest limit, for the small groups and for a reader's arena and ring.
constexpr uint64_t kReaderBytes = uint64_t{24} * protocol::kPageBytes;

using Groups = std::vector<std::vector<ShardedParam>>;

// Returns six groups of sixteen pages a shard, uneven groups, columns, and tiny groups that share a block.
Groups AwkwardGroups() {
  Groups groups;
  for (int i = 0; i < 6; ++i) groups.push_back({{.rows = 16000, .columns = 4}});
  groups.push_back(
      {{.rows = 301}, {.rows = 20, .columns = 15, .cut = testing::ShardCut::kColumns}});
  for (int i = 0; i < 5; ++i) groups.push_back({{.rows = 30, .columns = 3}});
  groups.push_back({{.rows = 36001, .columns = 2}});
  return groups;
}

std::shared_ptr<const protocol::Layout> LayoutOf(
    const Groups& groups, protocol::Format format = protocol::Format::kExact) {
  return MakeShardedLayout(
      groups, {.ranks = kRanks, .dtype = protocol::DType::kBFloat16, .format = format});
}

NodeState::Options SwapOptions(uint64_t dram_bytes) {
  return {.dram_limit_bytes = dram_bytes,
          .node_bytes = 4096,
          .staging_slots = 3,
          .staging_slot_bytes = 65536,
          .swap = SwapPaths({16 << 20, 16 << 20}),
          .block_elems = 3072,
          .workers = 2};
}

uint64_t LeastDram(const std::shared_ptr<const protocol::Layout>& layout,
                   bool gradients_in_dram = true) {
  return LeastDramOf(layout, SwapOptions(0), kRanks, {}, gradients_in_dram);
}

class WeightsJob : public ShardedJob {
 public:
  WeightsJob(std::shared_ptr<const protocol::Layout> layout, uint64_t dram_bytes)
      : ShardedJob(std::move(layout), kRanks, SwapOptions(dram_bytes)) {}

  // Fetches a partition and releases it. The model checks the fetched bytes.
  void Use(uint32_t rank, uint32_t partition) {
    const uint64_t tag = node_.Fetch(sessions_[rank], partition);
    node_.RunTasks();
    ASSERT_EQ(node_.ErrorOf(tag), ErrorId::kNone) << partition;
    node_.ReleaseFetched(sessions_[rank], tag);
    node_.RunTasks();
  }
  // Runs forward, backward and step of all ranks.
  void TrainAndFetch(uint64_t step) {
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      const std::vector<uint32_t> own = OwnedBy(rank);
      for (const uint32_t partition : own) Use(rank, partition);
      for (auto partition = own.rbegin(); partition != own.rend(); ++partition) {
        Use(rank, *partition);
      }
    }
    TrainStep(step);
  }
};

class NodeStateWeights : public ::testing::Test, protected WeightsJob {
 protected:
  NodeStateWeights()
      : WeightsJob(LayoutOf(AwkwardGroups()), LeastDram(LayoutOf(AwkwardGroups()))) {}
  void SetUp() override { AttachAll(); }
  void TearDown() override { EXPECT_EQ(node_.fault(), ""); }
};

TEST_F(NodeStateWeights, AJobTrainsWithTheSmallestCacheThatItIsAdmittedWith) {
  // Rows, columns and element bytes of the last group.
  const uint64_t largest = 18001 * 2 * 2;
  EXPECT_EQ(View().weights_cache_bytes,
            2 * kRanks * protocol::RoundUp(largest, protocol::kPageBytes));
  EXPECT_EQ(View().weights_on_swap_bytes, layout_->total_elems() * 2) << "all of them";
  EXPECT_EQ(View().resident_blocks, 0U) << "weights come before states";
  for (uint64_t step = 1; step <= 4; ++step) TrainAndFetch(step);
  EXPECT_EQ(View().committed_step, 4U);
  EXPECT_EQ(View().weights.fetches, 4 * 2 * layout_->partitions().size());
}

TEST_F(NodeStateWeights, AFetchReadsThePagesOfItsPartitionAlone) {
  node_.RunTasks();
  const size_t before = node_.Logged<LoadWeights>().size();
  Use(0, OwnedBy(0)[0]);
  uint64_t read = 0;
  uint64_t copied = 0;
  const std::vector<LoadWeights> loads = node_.Logged<LoadWeights>();
  for (size_t i = before; i < loads.size(); ++i) {
    read += loads[i].bytes;
    for (const BytesCopy& copy : loads[i].copies) copied += copy.size_bytes;
  }
  EXPECT_EQ(copied, layout_->partition_bytes(OwnedBy(0)[0]));
  EXPECT_LE(read, copied + 2 * protocol::kPageBytes * (loads.size() - before));
}

TEST_F(NodeStateWeights, WhatIsFetchedAgainInTheSameOrderIsReadAhead) {
  TrainAndFetch(1);
  const WeightsCounters first = View().weights;
  TrainAndFetch(2);
  const WeightsCounters second = View().weights;
  const uint64_t fetches = second.fetches - first.fetches;
  const uint64_t ahead = second.fetches_ahead - first.fetches_ahead;
  EXPECT_GE(ahead + 2 * kRanks, fetches) << "but for the first of each rank, on two sides";
  // Number of loads in both steps, by partition and block.
  std::map<std::pair<uint32_t, uint64_t>, int> loads;
  for (const LoadWeights& load : node_.Logged<LoadWeights>()) ++loads[{load.partition, load.block}];
  for (const auto& [what, count] : loads) EXPECT_LE(count, 4) << what.first << ": none in vain";
}

// The rank computes for a long time and holds its leases.
TEST_F(NodeStateWeights, WhatCannotBeReadAheadIsReadAgainWhenItIsFetched) {
  const std::vector<uint32_t> own = OwnedBy(0);
  for (const uint32_t partition : own) Use(0, partition);
  TrainStep(1);
  const uint64_t tag = node_.Fetch(sessions_[0], own[0]);
  int failed = 0;
  bool fetched = false;
  for (int tasks = 0; tasks < 2000 && !node_.model().running().empty(); ++tasks) {
    fetched = fetched || node_.ErrorOf(tag) == ErrorId::kNone;
    const auto [task, action] = *node_.model().running().begin();
    const auto* load = std::get_if<LoadWeights>(&action);
    const bool fails = load != nullptr && load->partition != own[0];
    if (fails) ++failed;
    node_.Finish(task,
                 fails ? protocol::MakeError(ErrorId::kSwapIo, "simulated") : absl::OkStatus());
  }
  EXPECT_TRUE(fetched);
  EXPECT_TRUE(node_.model().running().empty()) << "it comes to rest";
  EXPECT_GT(failed, 0);
  node_.ReleaseFetched(sessions_[0], tag);
  for (size_t i = 1; i < own.size(); ++i) Use(0, own[i]);
}

TEST(NodeStateWeightsFormats, TrainWithMastersAndWithoutThem) {
  for (const auto format :
       {protocol::Format::kFp32, protocol::Format::kBf16, protocol::Format::kInt8}) {
    SCOPED_TRACE(protocol::Name(format));
    const auto layout = LayoutOf(AwkwardGroups(), format);
    WeightsJob job(layout, LeastDram(layout));
    job.AttachAll();
    EXPECT_EQ(job.View().weights_on_swap_bytes, layout->total_elems() * 2);
    for (uint64_t step = 1; step <= 3; ++step) job.TrainAndFetch(step);
    EXPECT_EQ(job.View().committed_step, 3U);
    EXPECT_EQ(job.node_.fault(), "");
  }
}

// Partitions differ in size, so that the eviction of one may not free enough for another.
TEST_F(NodeStateWeights, WhatRanksReadAheadInTurnComesToRest) {
  constexpr uint64_t kSteps = 3;
  for (uint64_t step = 1; step <= kSteps; ++step) {
    for (size_t i = 0; i < OwnedBy(0).size(); ++i) {
      for (uint32_t rank = 0; rank < kRanks; ++rank) {
        const uint64_t tag = node_.Fetch(sessions_[rank], OwnedBy(rank)[i]);
        for (int tasks = 0; tasks < 2000 && !node_.model().running().empty(); ++tasks) {
          node_.Finish(node_.model().running().begin()->first);
        }
        ASSERT_TRUE(node_.model().running().empty()) << "step " << step << ", partition " << i;
        node_.ReleaseFetched(sessions_[rank], tag);
      }
    }
    TrainStep(step);
  }
  // A rank that has not begun its step gives no order of fetches, so that another rank fills the cache.
  EXPECT_LE(View().weights.read_bytes, 2 * kSteps * layout_->weights_bytes());
}

TEST_F(NodeStateWeights, AnotherOrderEveryStepIsCorrectAndReadsNothingInVain) {
  std::mt19937 random(7);
  for (uint64_t step = 1; step <= 4; ++step) {
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      std::vector<uint32_t> own = OwnedBy(rank);
      std::shuffle(own.begin(), own.end(), random);
      for (const uint32_t partition : own) Use(rank, partition);
    }
    TrainStep(step);
  }
  EXPECT_LE(View().weights.read_bytes, 4 * layout_->total_elems() * 2 * 2);
}

TEST_F(NodeStateWeights, WhatIsFetchedAfterAWriteOfMastersIsWhatWasWritten) {
  TrainAndFetch(1);
  const uint32_t partition = OwnedBy(1)[2];
  Use(1, partition);
  const size_t loads = node_.Logged<LoadWeights>().size();
  const uint64_t tag = node_.WriteState(sessions_[1], partition);
  node_.RunTasks();
  ASSERT_EQ(node_.ErrorOf(tag), ErrorId::kNone);
  Use(1, partition);  // The model checks the version of the weights.
  EXPECT_GT(node_.Logged<LoadWeights>().size(), loads) << "the copy was of before";
}

TEST_F(NodeStateWeights, AWriteOfMastersWaitsForWeightsThatAreOnTheirWay) {
  const uint64_t fetch = node_.Fetch(sessions_[0], OwnedBy(0)[0]);
  ASSERT_FALSE(node_.Running<LoadWeights>().empty());
  const uint64_t write = node_.WriteState(sessions_[1], OwnedBy(1)[0]);
  EXPECT_THAT(node_.Running<SetState>(), IsEmpty());
  EXPECT_THAT(node_.Running<ReadBlock>(), IsEmpty());
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(fetch), ErrorId::kNone);
  EXPECT_EQ(node_.ErrorOf(write), ErrorId::kNone);
}

TEST_F(NodeStateWeights, AFetchOfTheNextStepIsAnsweredWhenItsBlocksAreWritten) {
  for (uint32_t rank = 0; rank < kRanks; ++rank) DeliverOwn(rank, 1);
  const uint64_t call = node_.Step(sessions_[0], 1);
  const uint32_t partition = OwnedBy(0)[0];
  const uint64_t fetch = node_.Fetch(sessions_[0], partition);
  node_.Step(sessions_[1], 1);
  while (node_.ErrorOf(fetch) == kUnanswered && !node_.model().running().empty()) {
    node_.Finish(node_.model().running().begin()->first);
  }
  EXPECT_EQ(node_.ErrorOf(fetch), ErrorId::kNone);
  EXPECT_EQ(node_.ErrorOf(call), kUnanswered) << "the step goes on";
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(call), ErrorId::kNone);
  node_.ReleaseFetched(sessions_[0], fetch);
}

TEST_F(NodeStateWeights, AReadThatFailsIsTheFetchersAndTheNextTriesAgain) {
  const uint32_t partition = OwnedBy(0)[1];
  const uint64_t fetch = node_.Fetch(sessions_[0], partition);
  ASSERT_FALSE(node_.Running<LoadWeights>().empty());
  node_.Finish(node_.Running<LoadWeights>()[0].task,
               protocol::MakeError(ErrorId::kSwapIo, "simulated"));
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(fetch), ErrorId::kSwapIo);
  EXPECT_THAT(std::string(node_.answer(fetch)->status.message()),
              ::testing::AllOf(::testing::HasSubstr("block "), ::testing::HasSubstr("parameter "),
                               ::testing::HasSubstr("simulated")));
  Use(0, partition);
  TrainStep(1);
}

TEST_F(NodeStateWeights, AReadThatTheDiskDoesNotEndKeepsItsSlotFromOthers) {
  for (const bool keeps : {true, false}) {
    const uint32_t partition = OwnedBy(0)[1];
    const uint64_t fetch = node_.Fetch(sessions_[0], partition);
    ASSERT_FALSE(node_.Running<LoadWeights>().empty());
    const LoadWeights load = node_.Running<LoadWeights>()[0];
    if (keeps) node_.Send(StagingSlotKept{.slot = load.staging_slot});
    node_.Finish(load.task, protocol::MakeError(ErrorId::kSwapTimeout, "after 60 s"));
    const size_t before = node_.Logged<LoadWeights>().size();
    node_.RunTasks();
    EXPECT_EQ(node_.ErrorOf(fetch), ErrorId::kSwapTimeout);
    TrainAndFetch(keeps ? 1 : 2);
    const std::vector<LoadWeights> later = node_.Logged<LoadWeights>();
    EXPECT_EQ(std::any_of(later.begin() + static_cast<ptrdiff_t>(before), later.end(),
                          [&load](const LoadWeights& other) {
                            return other.staging_slot == load.staging_slot;
                          }),
              !keeps);
    if (keeps) node_.Send(StagingSlotReturned{.slot = load.staging_slot});
  }
}

TEST_F(NodeStateWeights, ASessionThatEndsLeavesNothingBehind) {
  for (const uint32_t partition : OwnedBy(0)) node_.Fetch(sessions_[0], partition);
  // Some weights are leased, some are being read, and some wait for space in the cache.
  node_.FinishAll<LoadWeights>();
  for (const uint64_t session : sessions_) node_.End(session, EndCause::kLost);
  node_.RunTasks();
  AttachAll();
  TrainAndFetch(1);
}

TEST_F(NodeStateWeights, WhoHoldsTooManyLeasesHearsSo) {
  const std::vector<uint32_t> own = OwnedBy(0);
  std::vector<uint64_t> held;
  uint64_t tag = 0;
  for (const uint32_t partition : own) {
    tag = node_.Fetch(sessions_[0], partition);
    node_.RunTasks();
    ASSERT_NE(node_.ErrorOf(tag), kUnanswered) << "it would wait for itself";
    if (node_.ErrorOf(tag) != ErrorId::kNone) break;
    held.push_back(tag);
  }
  EXPECT_EQ(node_.ErrorOf(tag), ErrorId::kLimit);
  EXPECT_GE(held.size(), 2U) << "two of the largest fit";
  EXPECT_THAT(MessageOf(tag), HasSubstr("holds leases on weights of"));
  for (const uint64_t one : held) node_.ReleaseFetched(sessions_[0], one);
  for (const uint32_t partition : own) Use(0, partition);
}

TEST_F(NodeStateWeights, AWriteThatWaitsForALeaseKeepsNobodyFromFetching) {
  const uint64_t held = node_.Fetch(sessions_[0], OwnedBy(1)[0]);
  node_.RunTasks();
  const uint64_t write = node_.WriteState(sessions_[1], OwnedBy(1)[0]);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(write), kUnanswered);
  const uint64_t fetch = node_.Fetch(sessions_[0], OwnedBy(0)[1]);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(fetch), ErrorId::kNone);
  node_.ReleaseFetched(sessions_[0], held);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(write), ErrorId::kNone);
  node_.ReleaseFetched(sessions_[0], fetch);
}

TEST_F(NodeStateWeights, StatesOfWhatIsOnSwapCanBeRead) {
  TrainAndFetch(1);
  const uint64_t tag = node_.ReadState(sessions_[0], 0, 0, 512);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(tag), ErrorId::kNone);
  Use(0, OwnedBy(0)[0]);
}

TEST_F(NodeStateWeights, ABlockWhoseWeightsAreOnSwapDoesNotMoveToDram) {
  node_.Send(BlockMoveRequested{.job = 1, .block = 0});
  node_.RunTasks();
  EXPECT_THAT(node_.Logged<PromoteBlock>(), IsEmpty());
}

class NodeStateWeightsReader : public ::testing::Test, protected WeightsJob {
 protected:
  NodeStateWeightsReader()
      : WeightsJob(LayoutOf(AwkwardGroups()), LeastDram(LayoutOf(AwkwardGroups())) + kReaderBytes) {
  }
  void SetUp() override { AttachAll(); }
  void TearDown() override { EXPECT_EQ(node_.fault(), ""); }
};

TEST_F(NodeStateWeightsReader, ADecisionWaitsForWeightsThatAreOnTheirWay) {
  const uint64_t reader = node_.AttachReader(layout_);
  for (uint32_t rank = 0; rank < kRanks; ++rank) DeliverOwn(rank, 1);
  const uint64_t fetch = node_.Fetch(reader, OwnedBy(0)[0]);
  ASSERT_FALSE(node_.Running<LoadWeights>().empty());
  std::vector<uint64_t> calls;
  for (const uint64_t session : sessions_) calls.push_back(node_.Step(session, 1));
  EXPECT_THAT(node_.Running<UpdateBlock>(), IsEmpty());
  const uint64_t late = node_.Fetch(reader, OwnedBy(1)[0]);  // This fetch begins no read.
  while (node_.ErrorOf(fetch) == kUnanswered) {
    EXPECT_THAT(node_.Running<UpdateBlock>(), IsEmpty());
    ASSERT_FALSE(node_.Running<LoadWeights>().empty());
    node_.FinishAll<LoadWeights>();
  }
  EXPECT_EQ(node_.ErrorOf(fetch), ErrorId::kNone);
  EXPECT_EQ(node_.ErrorOf(late), kUnanswered);
  node_.ReleaseFetched(reader, fetch);
  node_.RunTasks();
  for (const uint64_t call : calls) EXPECT_EQ(node_.ErrorOf(call), ErrorId::kNone);
  EXPECT_EQ(node_.ErrorOf(late), ErrorId::kNone) << "of the step that was committed";
  node_.ReleaseFetched(reader, late);
}

// While a block moves off a marked path, its weights are fetched from the old slot and from the new slot. The model reports a
// fault if a slot is written while it is read, or if the fetched bytes are not the block's.
TEST_F(NodeStateWeights, WeightsCanBeFetchedWhileTheirBlocksLeaveAMarkedPath) {
  TrainStep(1);
  const absl::Status error = protocol::MakeError(ErrorId::kSwapIo, "Input/output error");
  const auto is_marked = [this] { return node_.state().Node().swap_paths[0].marked; };
  for (int fetches = 0; !is_marked(); ++fetches) {
    ASSERT_LT(fetches, 50);
    const uint64_t fetch = node_.Fetch(sessions_[0], OwnedBy(0)[0]);
    while (!node_.model().running().empty() && !is_marked()) {
      const auto [task, action] = *node_.model().running().begin();
      const auto* load = std::get_if<LoadWeights>(&action);
      const bool fails = load != nullptr && load->slot.path == 0;
      node_.Finish(task, fails ? error : absl::OkStatus());
    }
    if (node_.ErrorOf(fetch) == ErrorId::kNone) node_.ReleaseFetched(sessions_[0], fetch);
  }
  const std::vector<uint32_t> own = OwnedBy(0);
  while (!node_.Running<LoadWeights>().empty()) node_.FinishAll<LoadWeights>();
  // The old slot of a written block is not free before the read of the slot has ended.
  ASSERT_THAT(node_.Running<ReadBlock>(), SizeIs(1));
  const uint64_t first = node_.Fetch(sessions_[0], own[8]);  // one piece
  ASSERT_FALSE(node_.Running<LoadWeights>().empty());
  node_.FinishAll<ReadBlock>();
  ASSERT_THAT(node_.Running<WriteBlock>(), SizeIs(1));
  node_.FinishAll<WriteBlock>();
  EXPECT_EQ(View().moves.relocated, 1U);
  EXPECT_THAT(node_.Running<ReadBlock>(), IsEmpty()) << "the next one waits too";
  while (!node_.Running<LoadWeights>().empty()) node_.FinishAll<LoadWeights>();
  EXPECT_THAT(node_.Running<ReadBlock>(), SizeIs(1));
  node_.ReleaseFetched(sessions_[0], first);

  std::mt19937 random(7);
  uint64_t beside_writes = 0;
  for (int round = 0; round < 60; ++round) {
    const uint64_t fetch = node_.Fetch(sessions_[0], own[random() % own.size()]);
    while (node_.ErrorOf(fetch) == kUnanswered) {
      ASSERT_FALSE(node_.model().running().empty());
      auto task = node_.model().running().begin();
      std::advance(task, static_cast<int64_t>(random() % node_.model().running().size()));
      node_.Finish(task->first);
      const bool both =
          !node_.Running<WriteBlock>().empty() && !node_.Running<LoadWeights>().empty();
      beside_writes += both ? 1 : 0;
    }
    ASSERT_EQ(node_.ErrorOf(fetch), ErrorId::kNone);
    node_.ReleaseFetched(sessions_[0], fetch);
  }
  EXPECT_GT(beside_writes, 10U) << "some were fetched while blocks moved";
  node_.RunTasks();
  EXPECT_GT(View().moves.relocated, 20U);
  TrainAndFetch(2);
}

// ------------------------------------------------------------------------------------------ the plan

TEST(NodeStateWeightsPlan, GroupsThatFitStayInDramAndMoreRoomIsUsed) {
  const auto layout = LayoutOf(AwkwardGroups());
  const uint64_t least = LeastDram(layout);
  uint64_t before = UINT64_MAX;
  for (uint64_t more = 0; more <= 200 * protocol::kPageBytes; more += 20 * protocol::kPageBytes) {
    WeightsJob job(layout, least + more);
    job.AttachAll();
    EXPECT_LE(job.View().weights_on_swap_bytes, before);
    before = job.View().weights_on_swap_bytes;
    EXPECT_LE(job.node_.state().Node().dram_used_bytes, least + more);
    for (uint64_t step = 1; step <= 2; ++step) job.TrainAndFetch(step);
    EXPECT_EQ(job.node_.fault(), "") << more;
  }
  EXPECT_EQ(before, 0U) << "with room for all weights none is on swap";
}

TEST(NodeStateWeightsPlan, WhatDoesNotFitEvenSoIsRefusedWithTheSum) {
  const auto layout = LayoutOf(AwkwardGroups());
  const uint64_t least = LeastDram(layout, /*gradients_in_dram=*/false);
  EXPECT_LT(least, LeastDram(layout));
  NodeHarness node(SwapOptions(least - protocol::kPageBytes), kRanks);
  const uint64_t session = node.AttachOnly(layout, {});
  EXPECT_THAT(node.attached(session)->status, HasError(ErrorId::kDramLimit));
  EXPECT_THAT(std::string(node.attached(session)->status.message()),
              HasSubstr("two partitions of each rank; the others are on swap"));
}

uint64_t DramOf(const JobPlan& plan) {
  return plan.weights + plan.weights_cache + plan.states + plan.sums + plan.extra_state +
         plan.sessions + plan.tables + plan.node + plan.others;
}

void ExpectSumOfRanks(const JobPlan& plan, const protocol::Layout& layout) {
  RankPlan all;
  for (const RankPlan& rank : plan.ranks) {
    EXPECT_GT(rank.largest_partition, 0U);
    all.weights += rank.weights;
    all.weights_cache += rank.weights_cache;
    all.states += rank.states;
    all.states_on_swap += rank.states_on_swap;
    all.weights_on_swap += rank.weights_on_swap;
    all.sums += rank.sums;
    all.largest_partition = std::max(all.largest_partition, rank.largest_partition);
  }
  EXPECT_THAT(plan.ranks, SizeIs(kRanks));
  EXPECT_EQ(all.weights, plan.weights);
  EXPECT_EQ(all.weights_cache, plan.weights_cache);
  EXPECT_EQ(all.states, plan.states);
  EXPECT_EQ(all.weights_on_swap, plan.weights_on_swap);
  EXPECT_GE(all.states + all.states_on_swap, 10 * layout.trainable_elems());
  EXPECT_LT(all.states + all.states_on_swap, 11 * layout.trainable_elems() + kRanks * 65536);
  EXPECT_LE(all.sums, plan.sums);
  EXPECT_EQ(all.largest_partition, 18001 * 2 * 2U) << "rows, columns, bytes";
  EXPECT_EQ(kRanks * (plan.grad_arena + plan.step_region + plan.activations + plan.trace +
                      plan.ring + plan.extra_state_copy),
            plan.sessions);
}

TEST(NodeStateWeightsPlan, APlanIsWhatAttachMakesAndAStepMoves) {
  const auto layout = LayoutOf(AwkwardGroups());
  const uint64_t least = LeastDram(layout);
  uint64_t all_in_dram = 0;
  for (const uint64_t dram : {least, least + (256 << 10), least + (1 << 20), least + (4 << 20)}) {
    SCOPED_TRACE(dram);
    WeightsJob job(layout, dram);
    ASSERT_OK_AND_ASSIGN(const JobPlan plan,
                         job.node_.state().Plan(RequestOf(layout), std::nullopt));
    EXPECT_EQ(plan.limit, dram);
    all_in_dram = plan.all_in_dram;
    job.AttachAll();
    const NodeView node = job.node_.state().Node();
    EXPECT_EQ(DramOf(plan), node.dram_used_bytes);
    EXPECT_EQ(plan.swap, node.swap_used_bytes);
    EXPECT_EQ(plan.weights_on_swap, job.View().weights_on_swap_bytes);
    EXPECT_EQ(plan.blocks, job.View().blocks);
    EXPECT_EQ(plan.resident_blocks, job.View().resident_blocks);
    ExpectSumOfRanks(plan, *layout);
    ASSERT_OK_AND_ASSIGN(const JobPlan made,
                         job.node_.state().PlanOfJob({.uid = 1000, .name = "job"}, std::nullopt));
    EXPECT_EQ(DramOf(made), node.dram_used_bytes);
    EXPECT_EQ(made.states, plan.states);
    EXPECT_EQ(made.swap, plan.swap);
    EXPECT_EQ(made.all_in_dram, plan.all_in_dram);
    ExpectSumOfRanks(made, *layout);
    job.TrainAndFetch(1);
    const JobView before = job.View();
    job.TrainAndFetch(2);
    const JobView after = job.View();
    EXPECT_EQ(after.state_written_bytes - before.state_written_bytes, plan.step_written);
    const uint64_t weights_read = after.weights.read_bytes - before.weights.read_bytes;
    const uint64_t states_read = after.state_read_bytes - before.state_read_bytes;
    EXPECT_GE(states_read, plan.step_read - 2 * plan.weights_on_swap);
    // Each block's part is read in whole pages, so that up to a page more is read at both ends. Cached weights are not read
    // again.
    EXPECT_LE(weights_read, 2 * plan.weights_on_swap * 4 / 3);
    EXPECT_GE(weights_read, plan.weights_on_swap * 4 / 3);
  }
  // Plans a job for an empty node with the given limits, regardless of the jobs on this node.
  WeightsJob job(layout, least);
  job.AttachAll();
  ASSERT_OK_AND_ASSIGN(
      const JobPlan roomy,
      job.node_.state().Plan(RequestOf(layout),
                             NodeState::Limits{.dram_bytes = all_in_dram, .swap_bytes = 0}));
  EXPECT_EQ(roomy.resident_blocks, roomy.blocks);
  EXPECT_EQ(roomy.weights_on_swap + roomy.swap + roomy.step_read + roomy.step_written, 0U);
  EXPECT_EQ(DramOf(roomy), all_in_dram);
  ASSERT_OK_AND_ASSIGN(
      const JobPlan moved,
      job.node_.state().PlanOfJob({.uid = 1000, .name = "job"},
                                  NodeState::Limits{.dram_bytes = all_in_dram, .swap_bytes = 0}));
  EXPECT_EQ(DramOf(moved), all_in_dram);
  EXPECT_EQ(moved.states, roomy.states);
  EXPECT_THAT(job.node_.state().PlanOfJob({.uid = 1001, .name = "job"}, std::nullopt).status(),
              HasError(ErrorId::kJobName));
  EXPECT_THAT(job.node_.state()
                  .Plan(RequestOf(layout), NodeState::Limits{.dram_bytes = all_in_dram - 1})
                  .status(),
              HasError(ErrorId::kDramLimit));
  EXPECT_THAT(job.node_.state().Plan(RequestOf(layout), std::nullopt).status(),
              HasError(ErrorId::kDramLimit))
      << "beside the job that is there";
}

// The model has frozen parameters that are far larger than the DRAM limit, and small trained parameters.
class NodeStateFrozenWeights : public ::testing::Test, protected WeightsJob {
 protected:
  static std::shared_ptr<const protocol::Layout> Layout() {
    Groups groups;
    for (int i = 0; i < 4; ++i) {
      groups.push_back(
          {{.rows = 1000, .columns = 3}, {.rows = 32000, .columns = 4, .trainable = false}});
    }
    groups.push_back({{.rows = 50001, .trainable = false}});
    groups.push_back({{.rows = 16000, .columns = 2}});
    return LayoutOf(groups);
  }
  NodeStateFrozenWeights() : WeightsJob(Layout(), LeastDram(Layout())) {}
  void SetUp() override { AttachAll(); }
  void TearDown() override { EXPECT_EQ(node_.fault(), ""); }

  bool IsFrozen(uint32_t partition) const { return layout_->gradient_bytes(partition) == 0; }
  void TrainStep(uint64_t step) {
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      for (const uint32_t partition : OwnedBy(rank)) {
        Use(rank, partition);
        if (!IsFrozen(partition)) node_.Gradient(sessions_[rank], partition, step);
        node_.RunTasks();
      }
    }
    EXPECT_THAT(StepAll(step), Each(ErrorId::kNone));
  }
};

TEST_F(NodeStateFrozenWeights, AreOnSwapAndNeitherUpdatedNorReadAhead) {
  const JobView before = View();
  EXPECT_EQ(before.weights_on_swap_bytes, layout_->total_elems() * 2) << "all of them";
  for (uint64_t step = 1; step <= 3; ++step) TrainStep(step);
  // In format exact an element has 10 bytes of states and 2 bytes of weights. Each plane begins on a page.
  const uint64_t updated = View().last_step_written_bytes;
  EXPECT_GE(updated, layout_->trainable_elems() * 12);
  EXPECT_LT(updated, layout_->trainable_elems() * 12 * 3 / 2 + 16 * 12 * protocol::kPageBytes / 4);
  EXPECT_EQ(View().last_step_read_bytes, updated);
  EXPECT_EQ(View().step_traffic.written_bytes, updated);
}

TEST_F(NodeStateFrozenWeights, TakeNeitherRoomForGradientsNorTwoSlots) {
  constexpr uint64_t kEnough = uint64_t{1} << 30;
  ASSERT_OK_AND_ASSIGN(
      const JobPlan plan,
      node_.state().Plan(
          RequestOf(layout_),
          NodeState::Limits{.dram_bytes = View().dram_bytes + (64 << 10), .swap_bytes = kEnough}));
  EXPECT_LT(plan.sums, layout_->trainable_elems() * 2 + protocol::kPageBytes);
  const uint64_t frozen = (layout_->total_elems() - layout_->trainable_elems()) * 2;
  const uint64_t trained = layout_->trainable_elems() * 12;
  EXPECT_EQ(plan.swap, View().swap_bytes);
  EXPECT_LT(View().swap_bytes, frozen * 5 / 4 + trained * 4);
}

// The daemon refuses the layout before it builds the list of runs. Each run of the boxes has one element, so the list would be
// huge.
TEST(NodeStateFrozenWeightsPlan, ThatFitNowhereAreRefusedByTheirBytes) {
  const ShardedParam columns{
      .rows = 4 << 20, .columns = 2, .cut = testing::ShardCut::kColumns, .trainable = false};
  const auto layout = LayoutOf(Groups(8, {columns}), protocol::Format::kBf16);
  NodeHarness node(SwapOptions(uint64_t{128} << 20), kRanks);
  const uint64_t session = node.AttachOnly(layout, {});
  EXPECT_THAT(node.attached(session)->status, HasError(ErrorId::kSwapNospc));
  EXPECT_THAT(std::string(node.attached(session)->status.message()),
              HasSubstr("of frozen weights"));
}

TEST_F(NodeStateFrozenWeights, MayBeWrittenBetweenSteps) {
  TrainStep(1);
  for (const uint32_t partition : OwnedBy(1)) {
    node_.WriteInitial(sessions_[1], partition);
    node_.RunTasks();
    Use(1, partition);
  }
  TrainStep(2);
}

// --------------------------------------------------------------------------------------------- chaos

// Ranks fetch, hold and release leases in any order, tasks end in any order, and reads fail. The model compares every answer
// with the newest version.
TEST(NodeStateWeightsChaos, EveryFetchGetsTheNewestVersion) {
  const auto layout = LayoutOf(AwkwardGroups());
  const uint64_t least = LeastDram(layout);
  for (uint32_t seed = 0; seed < 8; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto below = [&random](size_t bound) { return random() % bound; };
    WeightsJob job(layout, least + kReaderBytes + seed % 3 * 32 * protocol::kPageBytes);
    job.AttachAll();
    const uint64_t reader = job.node_.AttachReader(layout);
    ASSERT_OK(job.StatusOf(reader));
    std::vector<std::pair<uint64_t, uint64_t>> fetched;  // session and tag
    uint64_t answered = 0;
    const auto finish_one = [&] {
      auto task = job.node_.model().running().begin();
      std::advance(task, static_cast<int64_t>(below(job.node_.model().running().size())));
      const bool fails = std::holds_alternative<LoadWeights>(task->second) && below(30) == 0;
      job.node_.Finish(task->first, fails ? protocol::MakeError(ErrorId::kSwapIo, "simulated")
                                          : absl::OkStatus());
    };
    const auto release_some = [&](size_t kept) {
      while (fetched.size() > kept) {
        const auto is_answered = [&](const auto& fetch) {
          return job.node_.ErrorOf(fetch.second) != kUnanswered;
        };
        const auto found = std::ranges::find_if(fetched, is_answered);
        if (found == fetched.end()) {
          ASSERT_FALSE(job.node_.model().running().empty()) << "fetches wait for nothing";
          finish_one();
          continue;
        }
        const auto [session, tag] = *found;
        fetched.erase(found);
        if (job.node_.ErrorOf(tag) != ErrorId::kNone) continue;
        ++answered;
        job.node_.ReleaseFetched(session, tag);
      }
    };
    for (uint64_t step = 1; step <= 6; ++step) {
      for (uint32_t i = 0; i < 60; ++i) {
        const bool reads = below(5) == 0;
        const auto rank = static_cast<uint32_t>(below(kRanks));
        const uint64_t session = reads ? reader : job.sessions_[rank];
        const auto partition = static_cast<uint32_t>(below(layout->partitions().size()));
        fetched.emplace_back(session, job.node_.Fetch(session, partition));
        if (below(8) == 0) {
          // Releases all leases first, so that the rank does not write weights that it reads.
          release_some(0);
          const std::vector<uint32_t> own = job.OwnedBy(rank);
          const uint32_t written = own[below(own.size())];
          job.node_.WriteState(job.sessions_[rank], written, 0, 0, static_cast<uint16_t>(below(3)));
        }
        while (!job.node_.model().running().empty() && below(3) != 0) finish_one();
        release_some(below(3));
      }
      release_some(0);
      for (uint32_t rank = 0; rank < kRanks; ++rank) job.DeliverOwn(rank, step);
      // The next forward pass begins while blocks are written, or afterwards.
      const bool drains = below(2) == 0;
      job.node_.set_answered_when(drains ? protocol::StepAnswer::kCommitted
                                         : protocol::StepAnswer::kPublished);
      std::vector<uint64_t> calls;
      for (const uint64_t session : job.sessions_) {
        calls.push_back(job.node_.Step(session, step));
        fetched.emplace_back(session, job.node_.Fetch(session, static_cast<uint32_t>(below(4))));
      }
      const auto is_answered = [&](uint64_t call) {
        return job.node_.ErrorOf(call) != kUnanswered;
      };
      while (!std::ranges::all_of(calls, is_answered)) finish_one();
      while (!drains && !job.node_.model().running().empty()) finish_one();
      release_some(0);
      for (const uint64_t call : calls) EXPECT_EQ(job.node_.ErrorOf(call), ErrorId::kNone);
    }
    EXPECT_EQ(job.node_.fault(), "");
    EXPECT_GT(answered, 300U);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace forebay::daemon::node_state_weights_test
