// SPDX-License-Identifier: Apache-2.0
// Goal    A read that the disk never ends is given up and fails like any other read. Its staging slot is not used until the
//         disk has ended the read; other blocks and jobs use the other slots. A block whose read has failed is read again from
//         its newest slot, never from an older one.
// Method  The harness with all states on swap. The test acts as the disk.

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "daemon/core/blocks/staging.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "tests/support/node_harness.h"
#include "tests/support/status_test.h"

namespace forebay::daemon::node_state_swap_fault_test {
namespace {

using ::forebay::testing::MakeLayout;
using ::forebay::testing::NodeHarness;
using ::forebay::testing::RoomyOptions;
using ::forebay::testing::SwapPaths;
using protocol::ErrorId;

constexpr uint64_t kBlockBytes = 8192;  // two planes of 64 float32, each on a page
constexpr uint32_t kSlots = 3;

// DRAM bytes of a job without its resident blocks.
uint64_t FixedBytes(const std::shared_ptr<const protocol::Layout>& layout) {
  NodeHarness node(RoomyOptions(), 1);
  node.Attach(layout, {});
  const JobView job = *node.FindJob("job");
  return job.dram_bytes - job.resident_blocks * kBlockBytes;
}

// Two jobs of 8 blocks each, all on swap, that share three staging slots.
class NodeStateSwapFault : public ::testing::Test {
 protected:
  static NodeState::Options Options(uint64_t fixed_bytes) {
    NodeState::Options options = RoomyOptions();
    options.node_bytes = kSlots * kBlockBytes;
    options.dram_limit_bytes = options.node_bytes + 2 * fixed_bytes;
    options.staging_slots = kSlots;
    options.staging_slot_bytes = kBlockBytes;
    options.swap = SwapPaths({4 * 8 * kBlockBytes});
    return options;
  }
  void SetUp() override {
    session_ = node_.Attach(layout_, {});
    other_ = node_.Attach(layout_, {.job = "other"});
    ASSERT_EQ(node_.FindJob("job")->resident_blocks, 0U);
  }
  void TearDown() override { EXPECT_EQ(node_.fault(), ""); }

  void DeliverAll(uint64_t session, uint64_t step) {
    for (uint32_t group = 0; group < 2; ++group) node_.Gradient(session, group, step);
    node_.RunTasks();
  }
  ErrorId StepNow(uint64_t session, uint64_t step) {
    const uint64_t tag = node_.Step(session, step);
    node_.RunTasks();
    return node_.ErrorOf(tag);
  }
  ErrorId TrainStep(uint64_t session, uint64_t step) {
    DeliverAll(session, step);
    return StepNow(session, step);
  }

  // Gives up the step's first read, which the disk never ends. Returns the read's staging slot.
  uint32_t GiveUpRead(uint64_t session, uint64_t step, bool keeps) {
    node_.Gradient(session, 0, step);
    const ReadBlock read = node_.Running<ReadBlock>().at(0);
    if (keeps) node_.Send(StagingSlotKept{.slot = read.place.staging_slot});
    node_.Finish(read.task, protocol::MakeError(ErrorId::kSwapTimeout, "after 60 s"));
    given_up_at_ = node_.log().size();
    return read.place.staging_slot;
  }
  bool IsUsedSince(uint32_t slot) {
    for (size_t i = given_up_at_; i < node_.log().size(); ++i) {
      const auto* read = std::get_if<ReadBlock>(&node_.log()[i]);
      if (read != nullptr && read->place.staging_slot == slot) return true;
    }
    return false;
  }

  std::shared_ptr<const protocol::Layout> layout_ = MakeLayout({256, 256});
  NodeHarness node_{Options(FixedBytes(layout_)), 1};
  uint64_t session_ = 0;
  uint64_t other_ = 0;
  size_t given_up_at_ = 0;
};

TEST_F(NodeStateSwapFault, TheSlotOfAReadThatWasGivenUpIsLeftAloneUntilItHasEnded) {
  const uint32_t slot = GiveUpRead(session_, 1, /*keeps=*/true);
  node_.RunTasks();
  EXPECT_EQ(TrainStep(other_, 1), ErrorId::kNone) << "other jobs go on";
  node_.Gradient(session_, 1, 1);
  node_.RunTasks();
  EXPECT_EQ(StepNow(session_, 1), ErrorId::kSwapTimeout) << "the step is refused, not failed";
  EXPECT_TRUE(node_.FindJob("job")->failed.ok());
  EXPECT_EQ(StepNow(session_, 1), ErrorId::kNone);
  EXPECT_EQ(TrainStep(session_, 2), ErrorId::kNone);
  EXPECT_FALSE(IsUsedSince(slot));
  node_.Send(StagingSlotReturned{.slot = slot});
  given_up_at_ = node_.log().size();
  EXPECT_EQ(TrainStep(session_, 3), ErrorId::kNone);
  EXPECT_TRUE(IsUsedSince(slot));
}

TEST_F(NodeStateSwapFault, WithoutThatTheSlotIsUsedAtOnce) {
  const uint32_t slot = GiveUpRead(session_, 1, /*keeps=*/false);
  node_.RunTasks();
  EXPECT_EQ(TrainStep(other_, 1), ErrorId::kNone);
  EXPECT_TRUE(IsUsedSince(slot));
}

TEST_F(NodeStateSwapFault, WhileTheDiskHasAllSlotsStepsWaitAndGoOnWhenItReturnsOne) {
  DeliverAll(session_, 1);  // All staging slots hold blocks that were read ahead.
  ASSERT_EQ(StepNow(session_, 1), ErrorId::kNone);
  for (uint32_t slot = 0; slot < kSlots; ++slot) {
    const uint64_t step = slot + 2;
    EXPECT_NE(GiveUpRead(session_, step, /*keeps=*/true), slot - 1);
    node_.RunTasks();
    if (slot + 1 == kSlots) break;
    DeliverAll(session_, step);
    (void)StepNow(session_, step);  // refused
    ASSERT_EQ(StepNow(session_, step), ErrorId::kNone);
  }
  EXPECT_EQ(node_.state().Node().staging_slots_used, 0U);
  DeliverAll(other_, 1);
  const uint64_t waits = node_.Step(other_, 1);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(waits), ErrorId::kTimeout) << "unanswered";
  node_.Send(StagingSlotReturned{.slot = 1});
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(waits), ErrorId::kNone);
}

TEST_F(NodeStateSwapFault, AJobThatIsDeletedLeavesTheSlotToTheDisk) {
  const uint32_t slot = GiveUpRead(session_, 1, /*keeps=*/true);
  node_.RunTasks();
  node_.End(session_, EndCause::kDetached);
  node_.Send(DeleteJobRequested{.request = 1, .uid = 1000, .job = "job"});
  node_.RunTasks();
  EXPECT_EQ(TrainStep(other_, 1), ErrorId::kNone);
  EXPECT_FALSE(IsUsedSince(slot));
  node_.Send(StagingSlotReturned{.slot = slot});
  EXPECT_EQ(TrainStep(other_, 2), ErrorId::kNone);
}

TEST_F(NodeStateSwapFault, ABlockIsReadAgainFromItsNewestSlotAlone) {
  for (uint64_t step = 1; step <= 3; ++step) ASSERT_EQ(TrainStep(session_, step), ErrorId::kNone);
  std::map<uint64_t, nvme::Slot> newest;
  for (const WriteBlock& write : node_.Logged<WriteBlock>()) {
    if (write.job == node_.FindJob("job")->id) newest[write.identity.block] = *write.place.slot;
  }
  ASSERT_EQ(newest.size(), 8U);
  const size_t begin = node_.Logged<ReadBlock>().size();
  (void)GiveUpRead(session_, 4, /*keeps=*/false);
  const uint64_t failed = node_.Logged<ReadBlock>().at(begin).block;
  node_.RunTasks();
  node_.Gradient(session_, 1, 4);
  node_.RunTasks();
  ASSERT_EQ(StepNow(session_, 4), ErrorId::kSwapTimeout);
  ASSERT_EQ(StepNow(session_, 4), ErrorId::kNone);
  const std::vector<ReadBlock> reads = node_.Logged<ReadBlock>();
  uint32_t tries = 0;
  for (size_t i = begin; i < reads.size(); ++i) {
    EXPECT_EQ(*reads[i].place.slot, newest.at(reads[i].block)) << reads[i].block;
    if (reads[i].block == failed) ++tries;
  }
  EXPECT_EQ(tries, 2U);
}

}  // namespace
}  // namespace forebay::daemon::node_state_swap_fault_test
