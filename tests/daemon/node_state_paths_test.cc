// SPDX-License-Identifier: Apache-2.0
// Goal    A path on which writes fail again and again is marked and no longer used. Training continues if the other paths have
//         free slots. Blocks that no step writes are moved off the path unchanged. If writes to the marked path succeed as a
//         last resort, the mark is removed.
// Method  The harness. Its model reports a fault if a block has the wrong content or is overwritten.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <variant>
#include <vector>

#include "daemon/core/blocks/path_table.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/node_harness.h"
#include "tests/support/sharded_job.h"
#include "tests/support/status_test.h"

namespace forebay::daemon::node_state_paths_test {
namespace {

using ::forebay::testing::MakeLayout;
using ::forebay::testing::NodeHarness;
using ::forebay::testing::RoomyOptions;
using ::forebay::testing::SwapPaths;
using protocol::ErrorId;

constexpr uint64_t kBlockBytes = 8192;  // two planes of 64 float32, each on a page
constexpr uint32_t kBlocks = 20;

const absl::Status kIoError = protocol::MakeError(ErrorId::kSwapIo, "Input/output error");

// A job of one rank with four groups of five blocks, all on swap.
class NodeStatePaths : public ::testing::Test {
 protected:
  static NodeState::Options Options(const std::vector<uint64_t>& path_slots) {
    NodeState::Options options = RoomyOptions();
    NodeHarness roomy(options, 1);
    roomy.Attach(MakeLayout({320, 320, 320, 320}), {});
    const JobView job = *roomy.FindJob("job");
    options.node_bytes = 6 * kBlockBytes;
    options.dram_limit_bytes = options.node_bytes + job.dram_bytes - job.resident_bytes;
    options.staging_slots = 6;
    options.staging_slot_bytes = kBlockBytes;
    std::vector<uint64_t> path_bytes;
    for (const uint64_t slots : path_slots) path_bytes.push_back(slots * kBlockBytes);
    options.swap = SwapPaths(path_bytes);
    return options;
  }
  void Start(const std::vector<uint64_t>& path_slots) {
    node_ = std::make_unique<NodeHarness>(Options(path_slots), 1);
    session_ = node_->Attach(layout_, {});
    ASSERT_EQ(View().resident_blocks, 0U);
  }
  void TearDown() override { EXPECT_EQ(node_->fault(), ""); }

  // Ends all tasks. Writes to path `failing_` end with an error. If `reads_fail_`, so do reads from path `failing_` between
  // steps.
  void RunTasks() {
    for (int i = 0; i < 2000 && !node_->model().running().empty(); ++i) {
      const auto [task, action] = *node_->model().running().begin();
      const auto* read = std::get_if<ReadBlock>(&action);
      const auto* write = std::get_if<WriteBlock>(&action);
      bool fails = write != nullptr && write->place.slot->path == failing_;
      const bool is_between = View().published_step == called_step_;
      fails = fails || (read != nullptr && reads_fail_ && is_between && read->place.slot &&
                        read->place.slot->path == failing_);
      if (write != nullptr) ++(fails ? failed_writes_ : writes_);
      node_->Finish(task, fails ? kIoError : absl::OkStatus());
    }
  }
  uint64_t CallStep(uint64_t step, const std::vector<uint32_t>& groups) {
    called_step_ = step;
    for (const uint32_t group : groups) {
      node_->Gradient(session_, group, step);
      RunTasks();
    }
    const uint64_t tag = node_->Step(session_, step);
    RunTasks();
    return tag;
  }
  ErrorId TrainStep(uint64_t step, const std::vector<uint32_t>& groups = {0, 1, 2, 3}) {
    return node_->ErrorOf(CallStep(step, groups));
  }
  JobView View() { return *node_->FindJob("job"); }
  bool IsMarked(uint32_t path) { return node_->state().Node().swap_paths.at(path).marked; }
  // Trains a step of all blocks and returns the paths that it read from.
  std::set<uint32_t> PathsReadBy(uint64_t step) {
    const size_t before = node_->Logged<ReadBlock>().size();
    EXPECT_EQ(TrainStep(step), ErrorId::kNone);
    const std::vector<ReadBlock> reads = node_->Logged<ReadBlock>();
    EXPECT_EQ(reads.size() - before, kBlocks);
    std::set<uint32_t> paths;
    for (size_t i = before; i < reads.size(); ++i) paths.insert(reads[i].place.slot->path);
    return paths;
  }
  uint64_t UsedSlots(uint32_t path) {
    return node_->state().Node().swap_paths.at(path).used_bytes / kBlockBytes;
  }

  std::shared_ptr<const protocol::Layout> layout_ = MakeLayout({320, 320, 320, 320});
  std::unique_ptr<NodeHarness> node_;
  uint64_t session_ = 0;
  std::optional<uint32_t> failing_;
  bool reads_fail_ = false;
  uint64_t called_step_ = 0;
  uint64_t writes_ = 0;
  uint64_t failed_writes_ = 0;
};

TEST_F(NodeStatePaths, AFailingPathIsMarkedAndTrainingGoesOnOnTheOther) {
  Start({2 * kBlocks, 2 * kBlocks});
  ASSERT_EQ(TrainStep(1), ErrorId::kNone);
  EXPECT_EQ(UsedSlots(0), kBlocks);
  EXPECT_EQ(UsedSlots(1), kBlocks);
  failing_ = 0;
  for (uint64_t step = 2; step <= 4; ++step) ASSERT_EQ(TrainStep(step), ErrorId::kNone);
  EXPECT_TRUE(IsMarked(0));
  EXPECT_FALSE(IsMarked(1));
  EXPECT_GE(failed_writes_, PathTable::kPathErrorsMax);
  EXPECT_EQ(UsedSlots(0), 0U) << "nothing of the job is there any more";
  EXPECT_EQ(UsedSlots(1), 2 * kBlocks);
  failed_writes_ = 0;
  ASSERT_EQ(TrainStep(5), ErrorId::kNone);
  EXPECT_EQ(failed_writes_, 0U);
  for (const auto& [block, step] : node_->model().WrittenSteps(1)) EXPECT_EQ(step, 5U) << block;
  EXPECT_TRUE(View().swap_wait.ok());
}

TEST_F(NodeStatePaths, ANewJobGetsNoSlotOfAMarkedPath) {
  Start({4 * kBlocks, 4 * kBlocks});
  failing_ = 0;
  for (uint64_t step = 1; step <= 3; ++step) ASSERT_EQ(TrainStep(step), ErrorId::kNone);
  ASSERT_TRUE(IsMarked(0));
  node_->End(session_, EndCause::kDetached);
  node_->Send(DeleteJobRequested{.request = 1, .uid = 1000, .job = "job"});
  node_->RunTasks();
  session_ = node_->Attach(layout_, {});
  EXPECT_EQ(UsedSlots(0), 0U);
  EXPECT_EQ(UsedSlots(1), 2 * kBlocks);
}

TEST_F(NodeStatePaths, BlocksThatNoStepWritesMoveOffAMarkedPath) {
  Start({2 * kBlocks, 2 * kBlocks});
  ASSERT_EQ(TrainStep(1), ErrorId::kNone);
  failing_ = 0;
  for (uint64_t step = 2; !IsMarked(0); ++step) {
    ASSERT_LT(step, 50U);
    ASSERT_EQ(TrainStep(step, {0, 1}), ErrorId::kNone);
  }
  const uint64_t step = View().published_step;
  RunTasks();
  EXPECT_GT(View().moves.relocated, 0U);
  EXPECT_EQ(View().moves.failed, 0U);
  for (const auto& [block, written_step] : node_->model().WrittenSteps(1)) {
    EXPECT_EQ(written_step, block < 10 ? step : 1) << block;
  }
  // The relocated blocks are unchanged: the next step verifies their content.
  EXPECT_EQ(PathsReadBy(step + 1), std::set<uint32_t>{1});
  for (const auto& [block, written_step] : node_->model().WrittenSteps(1)) {
    EXPECT_EQ(written_step, step + 1) << block;
  }
}

// Writes of another job mark the path after the block's early update.
TEST_F(NodeStatePaths, ABlockThatWasUpdatedEarlyMovesToo) {
  NodeState::Options options = Options({8 * kBlocks, 8 * kBlocks});
  uint64_t other = 0;
  do {  // Smallest limit that fits both jobs.
    options.dram_limit_bytes += protocol::kPageBytes;
    ASSERT_LT(options.dram_limit_bytes, 8 << 20);
    node_ = std::make_unique<NodeHarness>(options, 1);
    session_ = node_->Attach(layout_, {.early_updates = true});
    other = node_->AttachOnly(layout_, {.job = "other"});
  } while (!node_->attached(other)->status.ok());
  options.dram_limit_bytes += 2 * protocol::kPageBytes;  // DRAM for new weights of some blocks.
  node_ = std::make_unique<NodeHarness>(options, 1);
  session_ = node_->Attach(layout_, {.early_updates = true});
  other = node_->Attach(layout_, {.job = "other"});
  const auto deliver = [&](uint64_t session, uint64_t step, const std::vector<uint32_t>& groups) {
    for (const uint32_t group : groups) {
      node_->Gradient(session, group, step);
      RunTasks();
    }
  };
  const auto train = [&](uint64_t session, uint64_t step) {
    deliver(session, step, {0, 1, 2, 3});
    const uint64_t tag = node_->Step(session, step);
    RunTasks();
    EXPECT_EQ(node_->ErrorOf(tag), ErrorId::kNone);
  };
  train(session_, 1);
  train(other, 1);
  node_->Announce(session_, 2);
  deliver(session_, 2, {3, 2});
  const std::vector<WriteBlock> writes = node_->Logged<WriteBlock>();
  ASSERT_TRUE(std::ranges::any_of(writes, [](const WriteBlock& write) {
    return write.job == 1 && write.identity.written_step == 2;
  })) << "blocks were updated early";
  failing_ = 1;
  train(other, 2);
  ASSERT_TRUE(IsMarked(1));
  deliver(session_, 2, {1, 0});
  EXPECT_GT(View().moves.relocated, 0U);
  const uint64_t tag = node_->Step(session_, 2);
  RunTasks();
  EXPECT_EQ(node_->ErrorOf(tag), ErrorId::kNone);
  for (const auto& [block, step] : node_->model().WrittenSteps(1)) EXPECT_EQ(step, 2U) << block;
}

TEST_F(NodeStatePaths, ABlockThatCannotBeReadStaysUntilItCan) {
  Start({2 * kBlocks, 2 * kBlocks});
  ASSERT_EQ(TrainStep(1), ErrorId::kNone);
  failing_ = 0;
  reads_fail_ = true;
  for (uint64_t step = 2; !IsMarked(0); ++step) {
    ASSERT_LT(step, 50U);
    ASSERT_EQ(TrainStep(step, {0, 1}), ErrorId::kNone);
  }
  const uint64_t step = View().published_step;
  EXPECT_EQ(View().moves.relocated, 0U);
  EXPECT_EQ(View().moves.failed, 5U) << "each of groups 2 and 3 on the path, once";
  reads_fail_ = false;
  ASSERT_EQ(TrainStep(step + 1, {0}), ErrorId::kNone);
  RunTasks();
  EXPECT_GE(View().moves.relocated, 5U);
  EXPECT_EQ(PathsReadBy(step + 2), std::set<uint32_t>{1});
}

TEST_F(NodeStatePaths, WhereTheOthersAreFullAMarkedPathIsTheLastResortAndMayRecover) {
  Start({kBlocks, kBlocks});
  ASSERT_EQ(TrainStep(1), ErrorId::kNone);
  failing_ = 0;
  const uint64_t tag = CallStep(2, {0, 1, 2, 3});
  EXPECT_EQ(node_->ErrorOf(tag), ErrorId::kTimeout) << "it waits for room";
  EXPECT_TRUE(IsMarked(0));
  EXPECT_TRUE(View().failed.ok());
  for (const WriteBlock& write : node_->Running<WriteBlock>()) EXPECT_TRUE(write.pause);
  failing_.reset();
  RunTasks();
  EXPECT_EQ(node_->ErrorOf(tag), ErrorId::kNone);
  for (uint64_t step = 3; step <= 4; ++step) ASSERT_EQ(TrainStep(step), ErrorId::kNone);
  EXPECT_FALSE(IsMarked(0));
  EXPECT_EQ(UsedSlots(0), kBlocks);
  std::vector<bool> marks;
  for (const SwapPathMarked& reported : node_->Logged<SwapPathMarked>()) {
    EXPECT_EQ(reported.path, 0U);
    marks.push_back(reported.marked);
  }
  EXPECT_EQ(marks, (std::vector<bool>{true, false}));
}

}  // namespace
}  // namespace forebay::daemon::node_state_paths_test
