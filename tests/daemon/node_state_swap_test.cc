// SPDX-License-Identifier: Apache-2.0
// Goal    Blocks that do not fit in DRAM are streamed through few staging slots: they are read ahead, verified against the
//         right step, updated once, written, and published together. After a failed write the block goes to another slot, or
//         the step waits. A failed read refuses the step; after the decision it fails the job by name. States can be read
//         between steps. Several jobs share the slots without a deadlock.
// Method  The harness with a tight DRAM limit. Its model records the content of the disk and of each slot. The model reports a
//         fault if a block has the wrong content or is overwritten.

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "daemon/core/base/limits.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/node_harness.h"
#include "tests/support/status_test.h"

namespace forebay::daemon::node_state_swap_test {
namespace {

using ::forebay::testing::HasError;
using ::forebay::testing::MakeLayout;
using ::forebay::testing::NodeHarness;
using ::forebay::testing::NodeModel;
using ::forebay::testing::RoomyOptions;
using ::forebay::testing::SwapPaths;
using protocol::ErrorId;
using ::testing::HasSubstr;

constexpr uint64_t kBlockBytes = 8192;  // two planes of 64 float32, each on a page

// DRAM bytes of a job without its resident blocks.
uint64_t FixedBytes(const std::shared_ptr<const protocol::Layout>& layout) {
  NodeHarness node(RoomyOptions(), 1);
  node.Attach(layout, {});
  const JobView job = *node.FindJob("job");
  return job.dram_bytes - job.resident_blocks * kBlockBytes;
}

// A job of one rank with 20 blocks, of which 4 fit in DRAM. The node has 3 staging slots and 2 workers.
class NodeStateSwap : public ::testing::Test {
 protected:
  static NodeState::Options Options(uint64_t fixed_bytes) {
    NodeState::Options options = RoomyOptions();
    options.node_bytes = 3 * kBlockBytes;
    options.dram_limit_bytes = options.node_bytes + fixed_bytes + 4 * kBlockBytes;
    options.staging_slots = 3;
    options.staging_slot_bytes = kBlockBytes;
    options.swap = SwapPaths({2 * 16 * kBlockBytes});
    return options;
  }
  void SetUp() override { session_ = node_.Attach(layout_, {}); }
  void TearDown() override { EXPECT_EQ(node_.fault(), ""); }

  ErrorId TrainStep(uint64_t step) {
    for (uint32_t group = 0; group < 4; ++group) {
      node_.Gradient(session_, group, step);
      node_.RunTasks();
    }
    const uint64_t tag = node_.Step(session_, step);
    node_.RunTasks();
    return node_.ErrorOf(tag);
  }
  JobView View() { return *node_.FindJob("job"); }

  std::shared_ptr<const protocol::Layout> layout_ = MakeLayout({320, 320, 320, 320});
  NodeHarness node_{Options(FixedBytes(layout_)), 1};
  uint64_t session_ = 0;
};

TEST_F(NodeStateSwap, TheFirstBlocksStayInDram) {
  EXPECT_EQ(View().blocks, 20U);
  EXPECT_EQ(View().resident_blocks, 4U);
  const CreateJobSwap swap = node_.Logged<CreateJobSwap>()[0];
  EXPECT_EQ(swap.slots.size(), 2 * 16U);
  for (const nvme::Slot& slot : swap.slots) EXPECT_EQ(slot.size_bytes, kBlockBytes);
  const CreateJobMemory memory = node_.Logged<CreateJobMemory>()[0];
  EXPECT_EQ(memory.state_bytes, 20 * kBlockBytes) << "of addresses";
  ASSERT_EQ(memory.resident.size(), 1U);
  EXPECT_EQ(memory.resident[0].bytes, 4 * kBlockBytes);
  EXPECT_EQ(node_.state().Node().swap_used_bytes, 2 * 16 * kBlockBytes);
}

TEST_F(NodeStateSwap, EveryBlockIsOfTheCommittedStepAfterEachStep) {
  for (uint64_t step = 1; step <= 5; ++step) {
    ASSERT_EQ(TrainStep(step), ErrorId::kNone);
    const auto written = node_.model().WrittenSteps(1);
    EXPECT_EQ(written.size(), 20U);
    for (const auto& [block, written_step] : written) EXPECT_EQ(written_step, step) << block;
  }
  EXPECT_EQ(View().update_reads, 5U * 16);
  EXPECT_EQ(View().last_step_reads, 16U);
  EXPECT_EQ(View().state_read_bytes, 5U * 16 * kBlockBytes);
  EXPECT_EQ(View().state_written_bytes, 5U * 16 * kBlockBytes);
  EXPECT_EQ(node_.state().Node().staging_slots_used, 0U);
}

TEST_F(NodeStateSwap, ReadsAheadFromTheFirstGradientOn) {
  EXPECT_TRUE(node_.Logged<ReadBlock>().empty());
  node_.Gradient(session_, 3, 1);
  ASSERT_EQ(node_.Running<ReadBlock>().size(), kReadsPerPath);
  node_.RunTasks();
  ASSERT_EQ(node_.Logged<ReadBlock>().size(), 3U) << "as many as there are slots";
  for (uint32_t i = 0; i < 3; ++i) EXPECT_EQ(node_.Logged<ReadBlock>()[i].block, 4 + i);
  EXPECT_EQ(node_.state().Node().staging_slots_used, 3U);
  EXPECT_TRUE(node_.Logged<UpdateBlock>().empty());
}

TEST_F(NodeStateSwap, MostReadsAreAskedForBeforeTheyAreNeeded) {
  NodeState::Options options = Options(FixedBytes(layout_));
  // Enough slots to read one block ahead for each update and each write.
  options.staging_slots = 6;
  NodeHarness node(options, 1);
  const uint64_t session = node.Attach(layout_, {});
  for (uint64_t step = 1; step <= 3; ++step) {
    for (uint32_t group = 0; group < 4; ++group) {
      node.Gradient(session, group, step);
      node.RunTasks();
    }
    node.Step(session, step);
    node.RunTasks();
  }
  const JobView view = *node.FindJob("job");
  EXPECT_EQ(view.last_step_reads, 16U);
  EXPECT_GE(view.last_step_reads_prefetched * 10, view.last_step_reads * 9);
}

TEST_F(NodeStateSwap, AReadThatAWorkerWaitsForIsNotCountedAsEarly) {
  NodeState::Options options = Options(FixedBytes(layout_));
  options.staging_slots = 1;
  options.dram_limit_bytes -= 4 * kBlockBytes;
  options.swap = SwapPaths({2 * 20 * kBlockBytes});
  NodeHarness node(options, 1);
  const uint64_t session = node.Attach(layout_, {});
  ASSERT_EQ(node.FindJob("job")->resident_blocks, 0U);
  for (uint32_t group = 0; group < 4; ++group) {
    node.Gradient(session, group, 1);
    node.RunTasks();
  }
  node.Step(session, 1);
  node.RunTasks();
  const JobView view = *node.FindJob("job");
  EXPECT_EQ(view.committed_step, 1U);
  EXPECT_EQ(view.update_reads, 20U);
  EXPECT_EQ(view.update_reads_prefetched, 1U) << "the one read before the decision";
}

TEST_F(NodeStateSwap, WorkersTakeReadyBlocksBeforeResidentOnes) {
  for (uint32_t group = 0; group < 4; ++group) {
    node_.Gradient(session_, group, 1);
    node_.RunTasks();
  }
  node_.Step(session_, 1);
  const std::vector<UpdateBlock> updates = node_.Running<UpdateBlock>();
  ASSERT_EQ(updates.size(), 2U);
  EXPECT_FALSE(updates[0].place.resident);
  EXPECT_FALSE(updates[1].place.resident);
  node_.RunTasks();
}

TEST_F(NodeStateSwap, BlocksReadAheadStayValidWhenTheStepIsDropped) {
  node_.Gradient(session_, 0, 1);
  node_.RunTasks();
  ASSERT_EQ(node_.Logged<ReadBlock>().size(), 3U);
  node_.End(session_, EndCause::kLost);
  session_ = node_.Attach(layout_, {});
  ASSERT_EQ(TrainStep(1), ErrorId::kNone);
  EXPECT_EQ(node_.Logged<ReadBlock>().size(), 16U) << "no block was read twice";
}

TEST_F(NodeStateSwap, BlocksOfSkippedGroupsAreNotRead) {
  node_.Gradient(session_, 0, 1);  // One of the blocks 0 to 4 is on swap.
  node_.RunTasks();
  const uint64_t tag = node_.Step(session_, 1);
  node_.RunTasks();
  ASSERT_EQ(node_.ErrorOf(tag), ErrorId::kNone);
  EXPECT_EQ(View().update_reads, 1U);
  EXPECT_EQ(node_.Logged<WriteBlock>().size(), 1U);
  ASSERT_EQ(TrainStep(2), ErrorId::kNone);
}

TEST_F(NodeStateSwap, AFailedReadAheadRefusesTheStepAndKeepsItsGradients) {
  node_.Gradient(session_, 0, 1);
  node_.Finish(node_.Running<ReadBlock>()[0].task,
               protocol::MakeError(ErrorId::kSwapIo, "path 0: Input/output error"));
  node_.RunTasks();
  ASSERT_TRUE(View().failed.ok());
  for (uint32_t group = 1; group < 4; ++group) {
    node_.Gradient(session_, group, 1);
    node_.RunTasks();
  }
  const uint64_t refused = node_.Step(session_, 1);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(refused), ErrorId::kSwapIo);
  EXPECT_THAT(
      std::string(node_.answer(refused)->status.message()),
      ::testing::AllOf(HasSubstr("path 0"), HasSubstr("block 4"), HasSubstr("parameter p")));
  EXPECT_TRUE(View().failed.ok());
  EXPECT_EQ(View().committed_step, 0U);
  const uint64_t again = node_.Step(session_, 1);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(again), ErrorId::kNone);
  EXPECT_EQ(node_.model().WrittenSteps(1).size(), 20U);
}

// Fails the next task of type A, after the step's decision.
template <typename A>
void FailOne(NodeHarness& node, ErrorId id) {
  node.Finish(node.FinishUntil<A>().task, protocol::MakeError(id, "path 0, offset 3: simulated"));
}

TEST_F(NodeStateSwap, AnErrorAfterTheDecisionFailsTheJobByName) {
  for (const int kind : {0, 1}) {
    SCOPED_TRACE(kind);
    NodeHarness node(Options(FixedBytes(layout_)), 1);
    const uint64_t session = node.Attach(layout_, {});
    for (uint32_t group = 0; group < 4; ++group) {
      node.Gradient(session, group, 1);
      node.RunTasks();
    }
    const uint64_t step = node.Step(session, 1);
    const uint64_t fetch = node.Fetch(session, 3);
    if (kind == 0) FailOne<ReadBlock>(node, ErrorId::kSwapIo);
    if (kind == 1) FailOne<UpdateBlock>(node, ErrorId::kCorrupt);
    const ErrorId expected = kind == 1 ? ErrorId::kCorrupt : ErrorId::kSwapIo;
    EXPECT_EQ(node.ErrorOf(step), expected);
    EXPECT_EQ(node.ErrorOf(fetch), expected);
    const uint64_t later = node.Fetch(session, 0);
    EXPECT_EQ(node.ErrorOf(later), ErrorId::kJobFailed);
    EXPECT_THAT(std::string(node.answer(later)->status.message()),
                ::testing::AllOf(HasSubstr("path 0, offset 3"), HasSubstr("block "),
                                 HasSubstr("parameter p")));
    node.RunTasks();
    EXPECT_EQ(node.state().Node().staging_slots_used, 0U) << "the slots came back";
    EXPECT_EQ(node.FindJob("job")->published_step, 0U);
    node.End(session, EndCause::kDetached);
    const uint64_t again = node.RequestAttach(layout_, {});
    EXPECT_THAT(node.attached(again)->status, HasError(ErrorId::kJobFailed));
    node.Send(DeleteJobRequested{.request = 1, .uid = 1000, .job = "job"});
    node.RunTasks();
    const uint64_t fresh = node.Attach(layout_, {});
    EXPECT_TRUE(node.attached(fresh)->status.ok());
    EXPECT_EQ(node.fault(), "");
  }
}

TEST_F(NodeStateSwap, NothingOfAStepIsPublishedBeforeAllOfItIsWritten) {
  ASSERT_EQ(TrainStep(1), ErrorId::kNone);
  for (uint32_t group = 0; group < 4; ++group) {
    node_.Gradient(session_, group, 2);
    node_.RunTasks();
  }
  const uint64_t tag = node_.Step(session_, 2);
  int written = 0;
  while (node_.answer(tag) == nullptr) {
    ASSERT_FALSE(node_.model().running().empty());
    for (const auto& [block, step] : node_.model().WrittenSteps(1)) {
      if (block < 4) continue;  // in DRAM
      EXPECT_EQ(step, 1U) << "block " << block << " after " << written << " writes";
    }
    const auto& [task, action] = *node_.model().running().begin();
    written += std::holds_alternative<WriteBlock>(action) ? 1 : 0;
    node_.Finish(task);
  }
  EXPECT_EQ(written, 16);
  for (const auto& [block, step] : node_.model().WrittenSteps(1)) EXPECT_EQ(step, 2U);
}

// Returns `options` with two swap paths, each with space for all slots.
NodeState::Options OnTwoPaths(NodeState::Options options) {
  options.swap = SwapPaths({2 * 16 * kBlockBytes, 2 * 16 * kBlockBytes});
  return options;
}

const absl::Status kWriteError =
    protocol::MakeError(ErrorId::kSwapIo, "swap path 0 (/a): write: Input/output error");

TEST_F(NodeStateSwap, AFailedWriteGoesToAnotherPath) {
  for (int failing = 0; failing < 16; ++failing) {
    SCOPED_TRACE(::testing::Message() << "write " << failing << " fails");
    NodeHarness node(OnTwoPaths(Options(FixedBytes(layout_))), 1);
    const uint64_t session = node.Attach(layout_, {});
    for (uint32_t group = 0; group < 4; ++group) {
      node.Gradient(session, group, 1);
      node.RunTasks();
    }
    const uint64_t tag = node.Step(session, 1);
    int writes = 0;
    while (node.answer(tag) == nullptr) {
      const auto [task, action] = *node.model().running().begin();
      const auto* write = std::get_if<WriteBlock>(&action);
      if (write == nullptr || writes++ != failing) {
        node.Finish(task);
        continue;
      }
      node.Finish(task, kWriteError);
      const WriteBlock again = node.Logged<WriteBlock>().back();
      EXPECT_EQ(again.identity.block, write->identity.block);
      EXPECT_NE(again.place.slot->path, write->place.slot->path);
      EXPECT_FALSE(again.pause);
      EXPECT_THAT(node.FindJob("job")->swap_wait, HasError(ErrorId::kSwapIo));
    }
    EXPECT_EQ(writes, 17);
    EXPECT_EQ(node.ErrorOf(tag), ErrorId::kNone);
    EXPECT_TRUE(node.FindJob("job")->swap_wait.ok());
    for (const auto& [block, step] : node.model().WrittenSteps(1)) EXPECT_EQ(step, 1U);
    EXPECT_EQ(node.fault(), "");
  }
}

TEST_F(NodeStateSwap, WhileNoPathAcceptsWritesTheStepWaitsAndOtherJobsGoOn) {
  // A second, small job has all its states in DRAM.
  const std::shared_ptr<const protocol::Layout> small = MakeLayout({64});
  const uint64_t small_bytes = FixedBytes(small) + kBlockBytes;
  NodeState::Options options = OnTwoPaths(Options(FixedBytes(layout_)));
  options.dram_limit_bytes += small_bytes;
  NodeHarness node(options, 1);
  const uint64_t other = node.Attach(small, {.job = "small"});
  const uint64_t session = node.Attach(layout_, {});
  ASSERT_EQ(node.FindJob("small")->resident_blocks, 1U);
  ASSERT_EQ(node.FindJob("job")->resident_blocks, 4U);
  for (uint32_t group = 0; group < 4; ++group) {
    node.Gradient(session, group, 1);
    node.RunTasks();
  }
  const uint64_t tag = node.Step(session, 1);
  const auto turn = [&node](bool disk_works) {
    for (const auto& [task, action] : NodeModel::TaskMap(node.model().running())) {
      const bool fails = std::holds_alternative<WriteBlock>(action) && !disk_works;
      node.Finish(task, fails ? kWriteError : absl::OkStatus());
    }
  };
  for (int i = 0; i < 200; ++i) turn(/*disk_works=*/false);
  EXPECT_EQ(node.answer(tag), nullptr);
  const JobView waiting = *node.FindJob("job");
  EXPECT_TRUE(waiting.failed.ok());
  EXPECT_THAT(std::string(waiting.swap_wait.message()),
              ::testing::AllOf(HasSubstr("swap path 0 (/a)"), HasSubstr("Input/output error")));
  EXPECT_TRUE(node.Running<ReadBlock>().empty()) << "no more blocks are staged";
  for (const WriteBlock& write : node.Running<WriteBlock>()) EXPECT_TRUE(write.pause);

  node.Gradient(other, 0, 1);
  for (int i = 0; i < 5; ++i) turn(/*disk_works=*/false);
  const uint64_t other_tag = node.Step(other, 1);
  for (int i = 0; i < 5; ++i) turn(/*disk_works=*/false);
  EXPECT_EQ(node.ErrorOf(other_tag), ErrorId::kNone);

  for (int i = 0; i < 200 && node.answer(tag) == nullptr; ++i) turn(/*disk_works=*/true);
  EXPECT_EQ(node.ErrorOf(tag), ErrorId::kNone);
  EXPECT_TRUE(node.FindJob("job")->swap_wait.ok());
  EXPECT_EQ(node.fault(), "");
}

TEST_F(NodeStateSwap, AJobThatWaitsForItsDiskCanBeDeleted) {
  for (uint32_t group = 0; group < 4; ++group) {
    node_.Gradient(session_, group, 1);
    node_.RunTasks();
  }
  node_.Step(session_, 1);
  for (int i = 0; i < 50; ++i) {
    for (const auto& [task, action] : NodeModel::TaskMap(node_.model().running())) {
      node_.Finish(task,
                   std::holds_alternative<WriteBlock>(action) ? kWriteError : absl::OkStatus());
    }
  }
  ASSERT_FALSE(View().swap_wait.ok());
  node_.End(session_, EndCause::kLost);
  node_.Send(DeleteJobRequested{.request = 1, .uid = 1000, .job = "job"});
  while (!node_.model().running().empty()) {
    node_.Finish(node_.model().running().begin()->first, kWriteError);
  }
  EXPECT_FALSE(node_.FindJob("job").has_value());
  EXPECT_EQ(node_.state().Node().staging_slots_used, 0U);
  EXPECT_EQ(node_.state().Node().swap_used_bytes, 0U);
}

TEST_F(NodeStateSwap, IsRefusedWithNumbersWhenItDoesNotFit) {
  NodeState::Options options = Options(FixedBytes(layout_));
  options.swap = SwapPaths({2 * 16 * kBlockBytes - 1});
  NodeHarness node(options, 1);
  const uint64_t session = node.RequestAttach(layout_, {});
  const absl::Status status = node.attached(session)->status;
  EXPECT_THAT(status, HasError(ErrorId::kSwapNospc));
  EXPECT_THAT(std::string(status.message()),
              ::testing::AllOf(HasSubstr(std::to_string(2 * 16 * kBlockBytes)),
                               HasSubstr(std::to_string(2 * 16 * kBlockBytes - 1))));
}

TEST_F(NodeStateSwap, StatesAreReadAcrossResidentAndSwappedBlocks) {
  ASSERT_EQ(TrainStep(1), ErrorId::kNone);
  const uint64_t tag = node_.ReadState(session_, 0, 100, 220);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(tag), ErrorId::kNone);
  uint64_t bytes = 0;
  uint64_t end = 0;
  std::set<bool> places;
  for (const DecodeState& copy : node_.Logged<DecodeState>()) {
    EXPECT_EQ(copy.grad_offset_bytes, end) << "pieces lie side by side";
    end += copy.elems * 4;
    bytes += copy.elems * 4;
    places.insert(copy.place.resident);
    EXPECT_EQ(copy.identity.written_step, 1U);
  }
  EXPECT_EQ(bytes, 220U * 4);
  EXPECT_EQ(places.size(), 2U);
  EXPECT_EQ(node_.state().Node().staging_slots_used, 0U);
}

TEST_F(NodeStateSwap, AReadOfStatesMayTakeTheSlotOfABlockReadAhead) {
  ASSERT_EQ(TrainStep(1), ErrorId::kNone);
  node_.Gradient(session_, 0, 2);
  node_.RunTasks();
  ASSERT_EQ(node_.state().Node().staging_slots_used, 3U);
  const uint64_t tag = node_.ReadState(session_, 3, 300, 10);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(tag), ErrorId::kNone);
}

TEST_F(NodeStateSwap, AReadOfStatesAndAStepDoNotOverlap) {
  ASSERT_EQ(TrainStep(1), ErrorId::kNone);
  for (uint32_t group = 0; group < 4; ++group) {
    node_.Gradient(session_, group, 2);
    node_.RunTasks();
  }
  const uint64_t before = node_.ReadState(session_, 0, 0, 10);
  ASSERT_EQ(node_.Running<DecodeState>().size(), 1U);
  const size_t updates = node_.Logged<UpdateBlock>().size();
  const uint64_t step = node_.Step(session_, 2);
  EXPECT_EQ(node_.Logged<UpdateBlock>().size(), updates) << "the step waits for the read";
  const uint64_t after = node_.ReadState(session_, 0, 0, 10);
  node_.FinishAll<DecodeState>();
  EXPECT_EQ(node_.ErrorOf(before), ErrorId::kNone);
  EXPECT_GT(node_.Logged<UpdateBlock>().size(), updates);
  EXPECT_EQ(node_.answer(after), nullptr) << "the read waits for the step";
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(step), ErrorId::kNone);
  EXPECT_EQ(node_.ErrorOf(after), ErrorId::kNone);
  EXPECT_EQ(node_.Logged<DecodeState>().back().identity.written_step, 2U);
}

TEST_F(NodeStateSwap, AFailedReadOfStatesIsTheReadersAlone) {
  ASSERT_EQ(TrainStep(1), ErrorId::kNone);
  const uint64_t tag = node_.ReadState(session_, 3, 0, 10);
  node_.Finish(node_.Running<ReadBlock>()[0].task,
               protocol::MakeError(ErrorId::kSwapIo, "simulated"));
  EXPECT_EQ(node_.ErrorOf(tag), ErrorId::kSwapIo);
  const uint64_t corrupt = node_.ReadState(session_, 3, 0, 10);
  const DecodeState decode = node_.FinishUntil<DecodeState>();
  node_.Finish(decode.task, protocol::MakeError(ErrorId::kCorrupt, "simulated"));
  EXPECT_EQ(node_.ErrorOf(corrupt), ErrorId::kCorrupt);
  EXPECT_THAT(
      std::string(node_.answer(corrupt)->status.message()),
      ::testing::AllOf(HasSubstr("block "), HasSubstr("parameter "), HasSubstr("simulated")));
  EXPECT_EQ(TrainStep(2), ErrorId::kNone);
}

TEST_F(NodeStateSwap, AJobThatOnlyReadsAheadGivesItsSlotsToOneThatSteps) {
  NodeState::Options options = Options(FixedBytes(layout_));
  options.dram_limit_bytes = options.node_bytes + 2 * FixedBytes(layout_) + 20 * kBlockBytes;
  options.swap = SwapPaths({4 * 40 * kBlockBytes});
  NodeHarness node(options, 1);
  // A job takes all free DRAM. Job b gets none while job "filler" is attached; job a gets too little DRAM afterwards.
  const uint64_t filler = node.Attach(layout_, {.job = "filler"});
  const uint64_t b = node.Attach(layout_, {.job = "b"});
  node.End(filler, EndCause::kDetached);
  node.Send(DeleteJobRequested{.request = 1, .uid = 1000, .job = "filler"});
  const uint64_t a = node.Attach(MakeLayout({640, 640, 640, 640}), {.job = "a"});
  for (const char* name : {"a", "b"}) {
    const JobView job = *node.FindJob(name);
    ASSERT_GT(job.blocks - job.resident_blocks, 3U) << name << " is on swap";
  }
  node.Gradient(a, 0, 1);
  node.RunTasks();
  ASSERT_EQ(node.state().Node().staging_slots_used, 3U);
  for (uint32_t group = 0; group < 4; ++group) {
    node.Gradient(b, group, 1);
    node.RunTasks();
  }
  const uint64_t tag = node.Step(b, 1);
  node.RunTasks();
  EXPECT_EQ(node.ErrorOf(tag), ErrorId::kNone);
  for (uint32_t group = 1; group < 4; ++group) {
    node.Gradient(a, group, 1);
    node.RunTasks();
  }
  const uint64_t of_a = node.Step(a, 1);
  node.RunTasks();
  EXPECT_EQ(node.ErrorOf(of_a), ErrorId::kNone);
  EXPECT_EQ(node.fault(), "");
}

TEST_F(NodeStateSwap, AFreedJobGivesItsSlotsBack) {
  node_.Gradient(session_, 0, 1);
  node_.RunTasks();
  ASSERT_EQ(node_.state().Node().staging_slots_used, 3U);
  node_.End(session_, EndCause::kDetached);
  node_.Send(DeleteJobRequested{.request = 1, .uid = 1000, .job = "job"});
  node_.RunTasks();
  EXPECT_EQ(node_.state().Node().staging_slots_used, 0U);
  EXPECT_EQ(node_.state().Node().swap_used_bytes, 0U);
}

}  // namespace
}  // namespace forebay::daemon::node_state_swap_test
