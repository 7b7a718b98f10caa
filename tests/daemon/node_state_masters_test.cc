// SPDX-License-Identifier: Apache-2.0
// Goal    If masters are a plane of their own, a job becomes ready only after its masters have been set from the initial
//         parameters, in DRAM and on swap. Once the initial parameters are complete, the masters are set whatever happens to
//         the sessions.
// Method  The harness with bfloat16 weights in format fp32, few blocks in DRAM; its model faults where
//         a block is not the one it should be.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/node_harness.h"
#include "tests/support/status_test.h"

namespace forebay::daemon::node_state_masters_test {
namespace {

using ::forebay::testing::MakeLayoutOfParams;
using ::forebay::testing::NodeHarness;
using ::forebay::testing::RoomyOptions;
using ::forebay::testing::SwapPaths;
using protocol::ErrorId;
using protocol::Op;

constexpr uint64_t kBlockBytes = 3 * 4096;  // three planes of 64 float32, each on a page
constexpr uint32_t kBlocks = 20;
constexpr uint32_t kResident = 4;

class NodeStateMasters : public ::testing::Test {
 protected:
  static std::shared_ptr<const protocol::Layout> Layout() {
    return MakeLayoutOfParams({{320}, {320}, {320}, {320}}, protocol::DType::kBFloat16);
  }
  static NodeState::Options Options() {
    NodeHarness roomy(RoomyOptions(), 2);
    roomy.Attach(Layout(), {});
    const uint64_t fixed_bytes = roomy.FindJob("job")->dram_bytes - kBlocks * kBlockBytes;
    NodeState::Options options = RoomyOptions();
    options.node_bytes = 3 * kBlockBytes;
    options.dram_limit_bytes = options.node_bytes + fixed_bytes + kResident * kBlockBytes;
    options.staging_slots = 3;
    options.staging_slot_bytes = kBlockBytes;
    options.swap = SwapPaths({16 * kBlockBytes, 16 * kBlockBytes});
    return options;
  }

  // Rank 0 writes all initial parameters and calls InitialDone. No task that this starts has run.
  void WriteInitial() {
    writer_ = node_.RequestAttach(layout_, {.run = "r"});
    node_.RunTasks();
    node_.Send(SessionMapped{.session = writer_});
    for (uint32_t group = 0; group < 4; ++group) {
      protocol::Command command{};
      command.op = static_cast<uint16_t>(Op::kWriteInitial);
      command.partition = group;
      command.length_bytes = layout_->partition_bytes(group);
      node_.Command(writer_, command);
    }
    node_.RunTasks();
    protocol::Command done{};
    done.op = static_cast<uint16_t>(Op::kInitialDone);
    done_ = node_.Command(writer_, done);
  }
  void TearDown() override { EXPECT_EQ(node_.fault(), ""); }

  JobView View() { return *node_.FindJob("job"); }
  // Every block was set once, before any step, and is published.
  void ExpectAllSet() {
    std::vector<uint32_t> set(kBlocks, 0);
    for (const UpdateBlock& update : node_.Logged<UpdateBlock>()) {
      if (update.pass != UpdatePass::kMasters) continue;
      ++set[update.identity_after.block];
      EXPECT_EQ(update.identity_after.written_step, 0U);
    }
    EXPECT_EQ(set, std::vector<uint32_t>(kBlocks, 1));
    const auto written = node_.model().WrittenSteps(1);
    EXPECT_EQ(written.size(), kBlocks);
    for (const auto& [block, step] : written) EXPECT_EQ(step, 0U) << block;
    EXPECT_EQ(node_.state().Node().staging_slots_used, 0U);
  }

  std::shared_ptr<const protocol::Layout> layout_ = Layout();
  NodeHarness node_{Options(), 2};
  uint64_t writer_ = 0;
  uint64_t done_ = 0;
};

TEST_F(NodeStateMasters, AreSetBeforeTheEndOfTheInitialParametersIsAnswered) {
  WriteInitial();
  EXPECT_EQ(View().resident_blocks, kResident);
  EXPECT_FALSE(View().ready);
  EXPECT_EQ(node_.answer(done_), nullptr);
  const uint64_t other = node_.RequestAttach(layout_, {.rank = 1, .run = "r"});
  EXPECT_EQ(node_.ErrorOf(node_.Fetch(writer_, 0)), ErrorId::kNotReady);
  EXPECT_EQ(node_.ErrorOf(node_.Gradient(writer_, 0, 1)), ErrorId::kNotReady);
  while (node_.answer(done_) == nullptr) {
    EXPECT_EQ(node_.attached(other), nullptr);
    ASSERT_FALSE(node_.model().running().empty());
    node_.Finish(node_.model().running().begin()->first);
  }
  EXPECT_EQ(node_.ErrorOf(done_), ErrorId::kNone);
  EXPECT_TRUE(View().ready);
  ExpectAllSet();
  EXPECT_EQ(View().update_reads, 0U) << "these count steps";
  EXPECT_EQ(View().state_read_bytes, 0U);
  EXPECT_EQ(View().state_written_bytes, 0U);
  node_.RunTasks();
  EXPECT_FALSE(node_.attached(other)->writes_initial);
}

TEST_F(NodeStateMasters, AreSetAndTheJobStaysWhenItsWriterDiesMeanwhile) {
  WriteInitial();
  node_.Finish(node_.model().running().begin()->first);
  node_.End(writer_, EndCause::kLost);
  EXPECT_FALSE(View().ready);
  node_.RunTasks();
  EXPECT_TRUE(View().ready);
  ExpectAllSet();
  const uint64_t next = node_.Attach(layout_, {.run = "r"});
  EXPECT_FALSE(node_.attached(next)->writes_initial);
  const uint64_t stranger = node_.RequestAttach(layout_, {.rank = 1, .run = "other"});
  EXPECT_EQ(protocol::IdOf(node_.attached(stranger)->status), ErrorId::kBusy);
}

TEST_F(NodeStateMasters, GoWithTheJobThatIsDeletedMeanwhile) {
  WriteInitial();
  node_.Finish(node_.model().running().begin()->first);
  node_.End(writer_, EndCause::kLost);
  node_.Send(DeleteJobRequested{.request = 7, .uid = 1000, .job = "job"});
  node_.RunTasks();
  EXPECT_FALSE(node_.FindJob("job").has_value());
  EXPECT_EQ(node_.state().Node().staging_slots_used, 0U);
  EXPECT_EQ(node_.state().Node().swap_used_bytes, 0U);
}

TEST_F(NodeStateMasters, GoToAnotherSlotWhereAWriteFails) {
  WriteInitial();
  const auto failed = node_.FinishUntil<WriteBlock>();
  node_.Finish(failed.task, protocol::MakeError(ErrorId::kSwapIo, "the disk says no"));
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(done_), ErrorId::kNone);
  ExpectAllSet();
  uint32_t writes = 0;
  for (const WriteBlock& write : node_.Logged<WriteBlock>()) {
    if (write.identity.block != failed.identity.block) continue;
    EXPECT_TRUE(++writes == 1 || !(write.place.slot == failed.place.slot));
  }
  EXPECT_EQ(writes, 2U);
}

TEST_F(NodeStateMasters, AreReadFromSwapAndVerifiedByTheFirstStep) {
  WriteInitial();
  node_.RunTasks();
  const uint64_t other = node_.Attach(layout_, {.rank = 1, .run = "r"});
  for (const uint64_t session : {writer_, other}) {
    for (uint32_t group = 0; group < 4; ++group) {
      node_.Gradient(session, group, 1);
      node_.RunTasks();
    }
  }
  const uint64_t tag = node_.Step(writer_, 1);
  node_.Step(other, 1);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(tag), ErrorId::kNone);
  EXPECT_EQ(View().state_read_bytes, (kBlocks - kResident) * kBlockBytes);
  for (const UpdateBlock& update : node_.Logged<UpdateBlock>()) {
    if (update.pass == UpdatePass::kMasters) continue;
    EXPECT_EQ(update.place.slot.has_value(), !update.place.resident);
  }
}

TEST(NodeStateWithoutMasters, IsReadyAtOnce) {
  NodeHarness node(RoomyOptions(), 1);
  node.Attach(MakeLayoutOfParams({{320}}), {});
  EXPECT_TRUE(node.Logged<UpdateBlock>().empty());
  EXPECT_TRUE(node.FindJob("job")->ready);
}

}  // namespace
}  // namespace forebay::daemon::node_state_masters_test
