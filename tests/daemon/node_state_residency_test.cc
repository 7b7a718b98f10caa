// SPDX-License-Identifier: Apache-2.0
// Goal    A block of states moves between DRAM and swap between two steps and at no other time. Steps and reads of states wait
//         for the one running move. After a failed write the block goes to another path or remains in DRAM; after a failed read
//         it remains on swap. A second job gets the DRAM that it needs from the states of the first job: its attach waits until
//         that DRAM is free, or is refused at once with all numbers.
// Method  The harness. Its model records the blocks in DRAM and on disk. The model reports a fault if a block is in two places
//         or in none, or is used while it moves.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/node_harness.h"
#include "tests/support/status_test.h"

namespace forebay::daemon::node_state_residency_test {
namespace {

using ::forebay::testing::HasError;
using ::forebay::testing::MakeLayout;
using ::forebay::testing::NodeHarness;
using ::forebay::testing::RoomyOptions;
using ::forebay::testing::SwapPaths;
using protocol::ErrorId;
using ::testing::HasSubstr;

constexpr uint64_t kBlockBytes = 8192;  // two planes of 64 float32, each on a page
constexpr uint32_t kBlocks = 200;
const std::vector<uint64_t> kGroups = {3200, 3200, 3200, 3200};

NodeState::Options SwapOptions() {
  NodeState::Options options = RoomyOptions();
  options.node_bytes = 3 * kBlockBytes;
  options.staging_slots = 3;
  options.staging_slot_bytes = kBlockBytes;
  options.swap = SwapPaths({512 * kBlockBytes, 512 * kBlockBytes});
  return options;
}

uint64_t FixedBytes(const std::shared_ptr<const protocol::Layout>& layout) {
  NodeHarness node(RoomyOptions(), 1);
  node.Attach(layout, {});
  const JobView job = *node.FindJob("job");
  return job.dram_bytes - job.resident_bytes;
}

// A job of one rank, with DRAM for `resident` of its 200 blocks.
class NodeStateResidency : public ::testing::Test {
 protected:
  NodeState::Options Options(uint32_t resident) const {
    NodeState::Options options = SwapOptions();
    options.dram_limit_bytes =
        options.node_bytes + FixedBytes(layout_) + resident * kBlockBytes + kBlockBytes / 2;
    return options;
  }
  void Start(const NodeState::Options& options) {
    node_ = std::make_unique<NodeHarness>(options, 1);
    session_ = node_->Attach(layout_, {});
  }
  void TearDown() override { EXPECT_EQ(node_->fault(), ""); }

  void DeliverGradients(uint64_t session, uint64_t step) {
    for (uint32_t group = 0; group < kGroups.size(); ++group) {
      node_->Gradient(session, group, step);
      node_->RunTasks();
    }
  }
  ErrorId TrainStep(uint64_t step) {
    DeliverGradients(session_, step);
    const uint64_t tag = node_->Step(session_, step);
    node_->RunTasks();
    return node_->ErrorOf(tag);
  }
  void Move(uint32_t block) { node_->Send(BlockMoveRequested{.job = 1, .block = block}); }
  JobView View() const { return *node_->FindJob("job"); }
  uint64_t SwapUsed() const { return node_->state().Node().swap_used_bytes; }
  void ExpectAllOfStep(uint64_t step) {
    const auto written = node_->model().WrittenSteps(1);
    EXPECT_EQ(written.size(), kBlocks);
    for (const auto& [block, written_step] : written) EXPECT_EQ(written_step, step) << block;
  }
  // Expects that `blocks` blocks are resident, by the model's count and by the status.
  void ExpectResident(uint32_t blocks) {
    EXPECT_EQ(View().resident_blocks, blocks);
    EXPECT_EQ(View().resident_bytes, blocks * kBlockBytes);
    EXPECT_EQ(node_->model().StateBytes(1), blocks * kBlockBytes);
    EXPECT_EQ(View().dram_bytes, FixedBytes(layout_) + blocks * kBlockBytes);
    EXPECT_EQ(SwapUsed(), 2 * (kBlocks - blocks) * kBlockBytes);
  }

  std::shared_ptr<const protocol::Layout> layout_ = MakeLayout(kGroups);
  std::unique_ptr<NodeHarness> node_;
  uint64_t session_ = 0;
};

TEST_F(NodeStateResidency, ABlockLeavesDramAndComesBackBetweenSteps) {
  Start(Options(150));
  ASSERT_EQ(TrainStep(1), ErrorId::kNone);
  ExpectResident(150);
  Move(7);
  ASSERT_EQ(node_->Running<EvictBlock>().size(), 1U);
  EXPECT_EQ(node_->Running<EvictBlock>()[0].identity.block, 7U);
  EXPECT_EQ(View().resident_bytes, 150 * kBlockBytes) << "until its bytes are free";
  node_->RunTasks();
  ExpectResident(149);
  ASSERT_EQ(TrainStep(2), ErrorId::kNone);
  ExpectAllOfStep(2);
  Move(180);
  ASSERT_EQ(node_->Running<PromoteBlock>().size(), 1U);
  EXPECT_EQ(View().resident_bytes, 150 * kBlockBytes) << "from now on";
  Move(181);  // DRAM does not fit both blocks.
  node_->RunTasks();
  ExpectResident(150);
  ASSERT_EQ(TrainStep(3), ErrorId::kNone);
  ExpectAllOfStep(3);
  EXPECT_EQ(View().moves.evicted, 1U);
  EXPECT_EQ(View().moves.promoted, 1U);
  EXPECT_EQ(View().moves.failed, 0U);
}

TEST_F(NodeStateResidency, EveryBlockMovesBothWaysWhateverTheOrder) {
  Start(Options(kBlocks));
  ASSERT_EQ(TrainStep(1), ErrorId::kNone);
  for (uint32_t i = 0; i < kBlocks; ++i) Move(i * 77 % kBlocks);
  node_->RunTasks();
  ExpectResident(0);
  ASSERT_EQ(TrainStep(2), ErrorId::kNone);
  ExpectAllOfStep(2);
  for (uint32_t i = 0; i < kBlocks; ++i) Move(i * 131 % kBlocks);
  node_->RunTasks();
  ExpectResident(kBlocks);
  ASSERT_EQ(TrainStep(3), ErrorId::kNone);
  ExpectAllOfStep(3);
}

TEST_F(NodeStateResidency, AStepWaitsForTheOneMoveThatRuns) {
  Start(Options(150));
  DeliverGradients(session_, 1);
  Move(0);
  Move(1);
  ASSERT_EQ(node_->Running<EvictBlock>().size(), 1U);
  const uint64_t tag = node_->Step(session_, 1);
  EXPECT_TRUE(node_->Logged<UpdateBlock>().empty());
  node_->Finish(node_->Running<EvictBlock>()[0].task);
  EXPECT_FALSE(node_->Running<UpdateBlock>().empty());
  EXPECT_EQ(node_->Logged<EvictBlock>().size(), 1U) << "the second waits for the next gap";
  while (node_->ErrorOf(tag) == ErrorId::kTimeout) {
    EXPECT_TRUE(node_->Running<EvictBlock>().empty());
    node_->Finish(node_->model().running().begin()->first);
  }
  EXPECT_EQ(node_->Running<EvictBlock>().size(), 1U);
  node_->RunTasks();
  ExpectResident(148);
  ExpectAllOfStep(1);
}

TEST_F(NodeStateResidency, ReadsOfStatesAndMovesTakeTurns) {
  Start(Options(150));
  ASSERT_EQ(TrainStep(1), ErrorId::kNone);
  for (const uint32_t block : {10U, 11U, 12U}) Move(block);
  std::vector<uint64_t> reads;
  for (int i = 0; i < 3; ++i) reads.push_back(node_->ReadState(session_, 0, 0, 64));
  int turns = 0;
  while (!node_->model().running().empty()) {
    EXPECT_EQ(node_->model().running().size(), 1U);
    EXPECT_EQ(node_->Running<EvictBlock>().size(), turns % 2 == 0 ? 1U : 0U) << turns;
    node_->Finish(node_->model().running().begin()->first);
    ++turns;
  }
  EXPECT_EQ(turns, 6);
  for (const uint64_t tag : reads) EXPECT_EQ(node_->ErrorOf(tag), ErrorId::kNone);
  ExpectResident(147);
}

TEST_F(NodeStateResidency, AFailedWriteGoesToTheOtherPathElseTheBlockStays) {
  Start(Options(150));
  ASSERT_EQ(TrainStep(1), ErrorId::kNone);
  const absl::Status broken = protocol::MakeError(ErrorId::kSwapIo, "path: No space left");
  Move(3);
  const uint32_t first = node_->Running<EvictBlock>()[0].place.slot->path;
  node_->Finish(node_->Running<EvictBlock>()[0].task, broken);
  ASSERT_EQ(node_->Running<EvictBlock>().size(), 1U);
  EXPECT_NE(node_->Running<EvictBlock>()[0].place.slot->path, first);
  node_->RunTasks();
  EXPECT_EQ(View().resident_blocks, 149U);
  EXPECT_EQ(View().moves.failed, 1U);

  Move(4);
  while (!node_->Running<EvictBlock>().empty()) {
    node_->Finish(node_->Running<EvictBlock>()[0].task, broken);
  }
  ExpectResident(149);  // Each of the other blocks has two slots, whatever moves have failed.
  EXPECT_TRUE(View().failed.ok());
  ASSERT_EQ(TrainStep(2), ErrorId::kNone);
  ExpectAllOfStep(2);
}

TEST_F(NodeStateResidency, AFailedReadLeavesTheBlockOnSwap) {
  Start(Options(150));
  ASSERT_EQ(TrainStep(1), ErrorId::kNone);
  Move(0);
  node_->RunTasks();
  Move(199);
  node_->Finish(node_->Running<PromoteBlock>()[0].task,
                protocol::MakeError(ErrorId::kSwapIo, "path: Input/output error"));
  ExpectResident(149);
  EXPECT_EQ(View().moves.failed, 1U);
  ASSERT_EQ(TrainStep(2), ErrorId::kNone);
  ExpectAllOfStep(2);
  Move(199);
  node_->RunTasks();
  ExpectResident(150);
}

TEST_F(NodeStateResidency, ABlockThatWasReadAheadIsDroppedWhenItIsPromoted) {
  Start(Options(150));
  Move(0);
  node_->RunTasks();
  node_->Gradient(session_, 0, 1);
  ASSERT_FALSE(node_->Running<ReadBlock>().empty());
  const uint32_t staged = static_cast<uint32_t>(node_->Running<ReadBlock>()[0].block);
  Move(staged);
  EXPECT_TRUE(node_->Running<PromoteBlock>().empty()) << "not before the read has ended";
  node_->RunTasks();
  ExpectResident(150);
  ASSERT_EQ(TrainStep(1), ErrorId::kNone);
  ExpectAllOfStep(1);
}

// ----------------------------------------------------------------------------------- a second job

class NodeStateSecondJob : public NodeStateResidency {
 protected:
  // The first job has all its states in DRAM and leaves half a block free.
  void SetUp() override {
    Start(Options(kBlocks));
    ASSERT_EQ(View().resident_blocks, kBlocks);
  }
  std::shared_ptr<const protocol::Layout> small_ = MakeLayout({640});
};

TEST_F(NodeStateSecondJob, WaitsUntilTheFirstHasMovedWhatItNeedsThenBothTrainOn) {
  const uint64_t second = node_->RequestAttach(small_, {.job = "second"});
  EXPECT_EQ(node_->attached(second), nullptr);
  EXPECT_EQ(node_->Running<EvictBlock>().size(), 1U);
  EXPECT_TRUE(node_->Running<CreateSessionMemory>().empty());
  EXPECT_EQ(node_->FindJob("second")->dram_bytes, 0U) << "it takes nothing yet";
  const auto waits = node_->Logged<RoomAwaited>();
  ASSERT_EQ(waits.size(), 1U);
  EXPECT_EQ(waits[0].job, "1000:second");
  EXPECT_EQ(waits[0].missing_bytes, FixedBytes(small_) - kBlockBytes / 2);
  EXPECT_EQ(waits[0].evicting_jobs, std::vector<std::string>{"1000:job"});
  node_->RunTasks();
  ASSERT_NE(node_->attached(second), nullptr);
  EXPECT_TRUE(node_->attached(second)->status.ok());
  const uint64_t needed = FixedBytes(small_);
  const auto moved = static_cast<uint32_t>((needed - kBlockBytes / 2 - 1) / kBlockBytes + 1);
  EXPECT_EQ(View().resident_blocks, kBlocks - moved) << "no block more than was missing";
  EXPECT_EQ(node_->FindJob("second")->resident_blocks, 0U);
  EXPECT_EQ(node_->FindJob("second")->dram_bytes, needed);
  ASSERT_EQ(TrainStep(1), ErrorId::kNone);
  ExpectAllOfStep(1);
}

TEST_F(NodeStateSecondJob, IsRefusedAtOnceWithTheNumbersWhereEvenAllStatesAreTooFew) {
  const auto large = MakeLayout({400000});
  const uint64_t second = node_->RequestAttach(large, {.job = "second"});
  ASSERT_NE(node_->attached(second), nullptr);
  const absl::Status status = node_->attached(second)->status;
  EXPECT_THAT(status, HasError(ErrorId::kDramLimit));
  for (const uint64_t number : {FixedBytes(large), node_->state().Node().dram_limit_bytes,
                                View().dram_bytes, kBlocks * kBlockBytes}) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat(number, " bytes")));
  }
  EXPECT_TRUE(node_->Logged<EvictBlock>().empty());
}

TEST_F(NodeStateSecondJob, IsRefusedWhereSwapHasNoSlotsForTheFirst) {
  NodeState::Options options = Options(kBlocks);
  options.swap = SwapPaths({30 * kBlockBytes});  // The second job needs 20 of these slots.
  Start(options);
  const uint64_t second = node_->RequestAttach(small_, {.job = "second"});
  ASSERT_NE(node_->attached(second), nullptr);
  const absl::Status status = node_->attached(second)->status;
  EXPECT_THAT(status, HasError(ErrorId::kDramLimit));
  EXPECT_THAT(std::string(status.message()),
              HasSubstr(absl::StrCat(5 * kBlockBytes, " bytes) can")));
  EXPECT_TRUE(node_->Logged<EvictBlock>().empty());
  EXPECT_EQ(SwapUsed(), 0U);
}

TEST_F(NodeStateSecondJob, IsRefusedWhenTheFirstCannotWriteItsBlocks) {
  const uint64_t second = node_->RequestAttach(small_, {.job = "second"});
  while (!node_->Running<EvictBlock>().empty()) {
    node_->Finish(node_->Running<EvictBlock>()[0].task,
                  protocol::MakeError(ErrorId::kSwapIo, "path 1: Input/output error"));
  }
  ASSERT_NE(node_->attached(second), nullptr);
  EXPECT_THAT(node_->attached(second)->status, HasError(ErrorId::kDramLimit));
  EXPECT_THAT(std::string(node_->attached(second)->status.message()),
              ::testing::AllOf(HasSubstr("Input/output error"), HasSubstr("job job"),
                               HasSubstr(absl::StrCat(FixedBytes(small_), " bytes"))));
  node_->RunTasks();
  EXPECT_FALSE(node_->FindJob("second").has_value());
  ASSERT_EQ(TrainStep(1), ErrorId::kNone);
  ExpectAllOfStep(1);
}

TEST_F(NodeStateSecondJob, ThatDiesWhileItWaitsLeavesNothingAndNoMoreBlocksMove) {
  const uint64_t second = node_->RequestAttach(small_, {.job = "second"});
  node_->End(second, EndCause::kLost);
  EXPECT_FALSE(node_->FindJob("second").has_value());
  EXPECT_TRUE(node_->is_closed(second));
  node_->RunTasks();
  ExpectResident(kBlocks - 1);  // The block whose move had begun is on swap.
  ASSERT_EQ(TrainStep(1), ErrorId::kNone);
  ExpectAllOfStep(1);
}

TEST_F(NodeStateSecondJob, ThatDiesDuringAStepLeavesItsSlotsToTheNode) {
  DeliverGradients(session_, 1);
  const uint64_t tag = node_->Step(session_, 1);
  const uint64_t second = node_->RequestAttach(small_, {.job = "second"});
  EXPECT_GT(SwapUsed(), 0U);
  node_->End(second, EndCause::kLost);
  node_->RunTasks();
  EXPECT_EQ(node_->ErrorOf(tag), ErrorId::kNone);
  ExpectResident(kBlocks);
  ExpectAllOfStep(1);
}

TEST_F(NodeStateSecondJob, ThatDiesTakesNoRoomFromAThird) {
  const uint64_t second = node_->RequestAttach(small_, {.job = "second"});
  const uint64_t third = node_->RequestAttach(small_, {.job = "third"});
  node_->End(second, EndCause::kLost);
  node_->RunTasks();
  ASSERT_NE(node_->attached(third), nullptr);
  EXPECT_TRUE(node_->attached(third)->status.ok());
  const auto moved = static_cast<uint32_t>((FixedBytes(small_) - 1) / kBlockBytes + 1);
  EXPECT_NEAR(View().resident_blocks, kBlocks - moved, 1) << "what the third needed";
  ASSERT_EQ(TrainStep(1), ErrorId::kNone);
  ExpectAllOfStep(1);
}

TEST_F(NodeStateSecondJob, GetsTheRoomOfAFirstThatIsDeletedMeanwhile) {
  const uint64_t second = node_->RequestAttach(small_, {.job = "second"});
  node_->End(session_, EndCause::kDetached);
  node_->Send(DeleteJobRequested{.request = 1, .uid = 1000, .job = "job"});
  node_->RunTasks();
  ASSERT_NE(node_->attached(second), nullptr);
  EXPECT_TRUE(node_->attached(second)->status.ok());
}

TEST_F(NodeStateSecondJob, AThirdWaitsForItsOwnRoom) {
  const uint64_t second = node_->RequestAttach(small_, {.job = "second"});
  const uint64_t third = node_->RequestAttach(small_, {.job = "third"});
  EXPECT_EQ(node_->attached(third), nullptr);
  node_->RunTasks();
  for (const uint64_t session : {second, third}) {
    ASSERT_NE(node_->attached(session), nullptr);
    EXPECT_TRUE(node_->attached(session)->status.ok());
  }
  EXPECT_LE(node_->state().Node().dram_used_bytes, node_->state().Node().dram_limit_bytes);
}

// Blocks of the first job return to DRAM when another job ends, except for the DRAM that is reserved for readers.
class NodeStateReturn : public NodeStateSecondJob {
 protected:
  uint64_t AttachSecond() {
    const uint64_t second = node_->RequestAttach(small_, {.job = "second"});
    node_->RunTasks();
    EXPECT_NE(node_->attached(second), nullptr);
    return second;
  }
  void Delete(uint64_t session, const std::string& job) {
    node_->End(session, EndCause::kDetached);
    node_->Send(DeleteJobRequested{.request = 1, .uid = 1000, .job = job});
  }
  uint32_t ReturnedBlocks() const {
    const NodeView node = node_->state().Node();
    const uint64_t room = node.dram_limit_bytes - node.dram_limit_bytes / 64;
    return static_cast<uint32_t>((room - SwapOptions().node_bytes - FixedBytes(layout_)) /
                                 kBlockBytes);
  }
  // Ends a second job. A promotion of one of the first job's blocks is then in progress.
  void BeginReturn() {
    Delete(AttachSecond(), "second");
    left_ = View().resident_blocks;
    node_->FinishUntil<PromoteBlock>();
  }

  uint32_t left_ = 0;  // Number of resident blocks before any block has returned.
};

TEST_F(NodeStateReturn, BlocksComeBackWhenTheJobThatTheyMadeRoomForEnds) {
  const uint64_t second = AttachSecond();
  const uint32_t left = View().resident_blocks;
  ASSERT_LT(left, ReturnedBlocks());
  ASSERT_EQ(TrainStep(1), ErrorId::kNone);
  EXPECT_EQ(View().resident_blocks, left) << "as long as the second is there";
  Delete(second, "second");
  node_->RunTasks();
  ExpectResident(ReturnedBlocks());
  ASSERT_EQ(TrainStep(2), ErrorId::kNone);
  ExpectAllOfStep(2);
  ExpectResident(ReturnedBlocks());
}

TEST_F(NodeStateReturn, OneBlockIsOnItsWayAtATimeAndTheStepWaitsForThatAlone) {
  BeginReturn();
  EXPECT_EQ(node_->Running<PromoteBlock>().size(), 1U);
  EXPECT_EQ(View().resident_bytes, (left_ + 1) * kBlockBytes);
  DeliverGradients(session_, 1);
  const uint64_t tag = node_->Step(session_, 1);
  node_->RunTasks();
  EXPECT_EQ(node_->ErrorOf(tag), ErrorId::kNone);
  ExpectAllOfStep(1);
  ExpectResident(ReturnedBlocks());
}

TEST_F(NodeStateReturn, AnAttachHasTheRoomThatBlocksWereComingBackTo) {
  BeginReturn();
  const uint64_t third = node_->RequestAttach(small_, {.job = "third"});
  EXPECT_EQ(node_->attached(third), nullptr) << "the block is on its way";
  node_->RunTasks();
  ASSERT_NE(node_->attached(third), nullptr);
  EXPECT_OK(node_->attached(third)->status);
  EXPECT_EQ(View().resident_blocks, left_);
  EXPECT_EQ(View().moves.promoted, 1U);
  ASSERT_EQ(TrainStep(1), ErrorId::kNone);
  ExpectAllOfStep(1);
}

TEST_F(NodeStateReturn, AnAttachNeedsNoFreeSlotsForTheBlockOnItsWay) {
  AttachSecond();
  const uint32_t moved = kBlocks - View().resident_blocks;
  NodeState::Options options = Options(kBlocks);
  // Ten blocks belong to the second job.
  options.swap = SwapPaths({2 * (moved + 10) * kBlockBytes});
  Start(options);
  BeginReturn();
  const uint64_t third = node_->RequestAttach(small_, {.job = "third"});
  node_->RunTasks();
  ASSERT_NE(node_->attached(third), nullptr);
  EXPECT_OK(node_->attached(third)->status);
  EXPECT_EQ(View().resident_blocks, left_);
  EXPECT_EQ(node_->state().Node().swap_used_bytes, node_->state().Node().swap_capacity_bytes);
}

TEST_F(NodeStateReturn, AnAttachThatIsGivenUpLeavesTheBlockInDram) {
  BeginReturn();
  const uint64_t third = node_->RequestAttach(small_, {.job = "third"});
  node_->End(third, EndCause::kLost);
  node_->RunTasks();
  EXPECT_FALSE(node_->FindJob("third").has_value());
  ExpectResident(ReturnedBlocks());
  ASSERT_EQ(TrainStep(1), ErrorId::kNone);
  ExpectAllOfStep(1);
}

TEST_F(NodeStateReturn, ABlockThatCannotBeReadStaysAndTheNextOnesComeBack) {
  BeginReturn();
  node_->Finish(node_->Running<PromoteBlock>()[0].task,
                protocol::MakeError(ErrorId::kSwapIo, "path 1: Input/output error"));
  node_->RunTasks();
  ExpectResident(ReturnedBlocks());
  EXPECT_EQ(View().moves.failed, 1U);
  EXPECT_OK(View().failed);
  ASSERT_EQ(TrainStep(1), ErrorId::kNone);
  ExpectAllOfStep(1);
}

TEST_F(NodeStateReturn, AJobThatFailsMeanwhileMovesNothingMore) {
  BeginReturn();
  const uint64_t third = node_->RequestAttach(small_, {.job = "third"});
  Delete(session_, "job");
  node_->RunTasks();
  EXPECT_FALSE(node_->FindJob("job").has_value());
  ASSERT_NE(node_->attached(third), nullptr);
  EXPECT_OK(node_->attached(third)->status);
}

TEST_F(NodeStateReturn, AWorldThatIsGivenUpLeavesItsRoomToTheNextBlocks) {
  BeginReturn();
  node_->End(session_, EndCause::kDetached);
  const uint64_t gone =
      node_->RequestAttach(layout_, {.world_size = 2, .grad_arena_bytes = uint64_t{512} << 10});
  EXPECT_EQ(node_->attached(gone), nullptr) << "it waits for more than the blocks were coming to";
  node_->End(gone, EndCause::kLost);
  node_->RunTasks();
  ExpectResident(ReturnedBlocks());
  EXPECT_EQ(View().world_size, 1U);
}

TEST_F(NodeStateReturn, AWorldThatIsRefusedLeavesItsRoomToTheNextBlocks) {
  BeginReturn();
  node_->End(session_, EndCause::kDetached);
  const uint64_t refused =
      node_->RequestAttach(layout_, {.world_size = 2, .grad_arena_bytes = uint64_t{512} << 10});
  node_->FinishUntil<EvictBlock>();
  while (!node_->Running<EvictBlock>().empty()) {
    node_->Finish(node_->Running<EvictBlock>()[0].task,
                  protocol::MakeError(ErrorId::kSwapIo, "path 1: Input/output error"));
  }
  node_->RunTasks();
  ASSERT_NE(node_->attached(refused), nullptr);
  EXPECT_THAT(node_->attached(refused)->status, HasError(ErrorId::kDramLimit));
  ExpectResident(ReturnedBlocks());
}

}  // namespace
}  // namespace forebay::daemon::node_state_residency_test
