// SPDX-License-Identifier: Apache-2.0
// Goal    The world size belongs to a job's sessions. After all ranks of the old world have ended, a job continues with any
//         number of ranks from its committed step. Ranks that are in both worlds recover their extra_state. Until then another
//         world size is an error that names both numbers.
// Method  The harness. Its model reports a fault if the step arena is replaced while a task uses it.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/node_harness.h"
#include "tests/support/status_test.h"

namespace forebay::daemon::node_state_world_test {
namespace {

using ::forebay::testing::HasError;
using ::forebay::testing::MakeLayout;
using ::forebay::testing::NodeHarness;
using ::forebay::testing::RoomyOptions;
using ::forebay::testing::SwapPaths;
using protocol::ErrorId;
using ::testing::AllOf;
using ::testing::HasSubstr;

class NodeStateWorld : public ::testing::Test {
 protected:
  void TearDown() override { EXPECT_EQ(node_.fault(), ""); }

  JobView View() { return *node_.FindJob("job"); }
  void AttachWorld(uint32_t world_size) {
    sessions_.clear();
    for (uint32_t rank = 0; rank < world_size; ++rank) {
      sessions_.push_back(node_.Attach(layout_, {.rank = rank, .world_size = world_size}));
      ASSERT_TRUE(node_.attached(sessions_.back())->status.ok());
    }
  }
  void Deliver(uint64_t step) {
    for (const uint64_t session : sessions_) {
      for (uint32_t group = 0; group < 2; ++group) node_.Gradient(session, group, step);
    }
  }
  // Calls step on every rank. Rank r commits 10 + r bytes of extra_state.
  std::vector<uint64_t> CallStep(uint64_t step) {
    std::vector<uint64_t> tags;
    for (uint32_t rank = 0; rank < sessions_.size(); ++rank) {
      tags.push_back(node_.Step(sessions_[rank], step, 0.1, 0, 10 + rank));
    }
    return tags;
  }
  void TrainStep(uint64_t step) {
    Deliver(step);
    const std::vector<uint64_t> tags = CallStep(step);
    node_.RunTasks();
    for (const uint64_t tag : tags) EXPECT_EQ(node_.ErrorOf(tag), ErrorId::kNone);
    EXPECT_EQ(node_.model().committed_gradients(1).at(0).size(), sessions_.size());
  }
  void DetachAll() {
    for (const uint64_t session : sessions_) node_.End(session, EndCause::kDetached);
    node_.RunTasks();
  }
  uint64_t ExtraStateOf(uint32_t rank) const {
    return node_.attached(sessions_[rank])->extra_state_bytes;
  }

  std::shared_ptr<const protocol::Layout> layout_ = MakeLayout({300, 100});
  NodeHarness node_{RoomyOptions(), 2};
  std::vector<uint64_t> sessions_;
};

TEST_F(NodeStateWorld, ChangesBetweenStepsInBothDirections) {
  uint64_t step = 0;
  uint32_t before = 0;
  for (const uint32_t world_size : {2U, 1U, 3U, 3U}) {
    SCOPED_TRACE(world_size);
    AttachWorld(world_size);
    EXPECT_EQ(View().world_size, world_size);
    for (uint32_t rank = 0; rank < world_size; ++rank) {
      const AnswerAttach& answer = *node_.attached(sessions_[rank]);
      EXPECT_EQ(answer.committed_step, step);
      EXPECT_EQ(answer.extra_state_bytes, rank < before ? 10 + rank : 0U);
      EXPECT_EQ(answer.rank0_extra_state_bytes, rank > 0 && step > 0 ? 10U : 0U);
    }
    TrainStep(++step);
    DetachAll();
    before = world_size;
  }
  EXPECT_EQ(node_.Logged<ReplaceStepArena>().size(), 2U);
}

TEST_F(NodeStateWorld, IsRefusedWhileARankOfTheOldOneLives) {
  AttachWorld(2);
  TrainStep(1);
  node_.End(sessions_[1], EndCause::kDetached);
  node_.RunTasks();
  const uint64_t refused = node_.RequestAttach(layout_, {.rank = 0, .world_size = 3});
  const absl::Status status = node_.attached(refused)->status;
  EXPECT_THAT(status, HasError(ErrorId::kRank));
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("has 2"), HasSubstr("1 are attached"), HasSubstr("wants 3")));
  EXPECT_EQ(View().world_size, 2U);
  EXPECT_FALSE(node_.is_closed(sessions_[0])) << "nobody is evicted";
}

TEST_F(NodeStateWorld, WaitsForTheStepThatTheOldOneHasCalled) {
  AttachWorld(2);
  Deliver(1);
  CallStep(1);
  node_.FinishAll<CopyToStepArena>();
  node_.FinishAll<AddGradients>();
  ASSERT_FALSE(node_.Running<UpdateBlock>().empty());
  for (const uint64_t session : sessions_) node_.End(session, EndCause::kLost);
  const uint64_t alone = node_.RequestAttach(layout_, {.rank = 0, .world_size = 1});
  EXPECT_EQ(node_.attached(alone), nullptr);
  while (node_.Logged<ReplaceStepArena>().empty()) {
    ASSERT_FALSE(node_.model().running().empty());
    node_.Finish(node_.model().running().begin()->first);
  }
  EXPECT_TRUE(node_.Running<UpdateBlock>().empty());
  node_.RunTasks();
  EXPECT_TRUE(node_.attached(alone)->status.ok());
  EXPECT_EQ(node_.attached(alone)->committed_step, 1U);
  EXPECT_EQ(node_.attached(alone)->extra_state_bytes, 10U);
}

TEST_F(NodeStateWorld, ForgetsTheGradientsOfAStepThatWasNotCalledByAll) {
  AttachWorld(2);
  TrainStep(1);
  Deliver(2);
  node_.Step(sessions_[0], 2);
  for (const uint64_t session : sessions_) node_.End(session, EndCause::kLost);
  AttachWorld(1);
  EXPECT_EQ(node_.attached(sessions_[0])->committed_step, 1U);
  TrainStep(2);
}

TEST_F(NodeStateWorld, ThatDoesNotFitLeavesTheOldOne) {
  AttachWorld(2);
  const uint64_t used_bytes = node_.state().Node().dram_used_bytes;
  NodeState::Options options = RoomyOptions();
  options.dram_limit_bytes = used_bytes + 4096;
  NodeHarness tight(options, 2);
  tight.Attach(layout_, {.rank = 0});
  tight.Attach(layout_, {.rank = 1});
  for (const uint64_t session : {1U, 2U}) tight.End(session, EndCause::kDetached);
  tight.RunTasks();
  const uint64_t refused = tight.RequestAttach(layout_, {.rank = 0, .world_size = 4});
  EXPECT_THAT(tight.attached(refused)->status, HasError(ErrorId::kDramLimit));
  EXPECT_THAT(std::string(tight.attached(refused)->status.message()),
              HasSubstr("4 x (gradient arena"));
  EXPECT_EQ(tight.state().Node().dram_used_bytes, used_bytes);
  const uint64_t back = tight.Attach(layout_, {.rank = 0});
  EXPECT_TRUE(tight.attached(back)->status.ok());
  EXPECT_TRUE(tight.Logged<ReplaceStepArena>().empty());
}

// The states of a world of one rank fill the DRAM. A world of two ranks needs more DRAM.
class NodeStateWorldOnSwap : public ::testing::Test {
 protected:
  static constexpr uint64_t kBlockBytes = 8192;  // two planes of 64 float32, each on a page

  static NodeState::Options Options(uint64_t spare_slots, uint64_t free_bytes = 0) {
    NodeHarness roomy(RoomyOptions(), 1);
    roomy.Attach(MakeLayout({320, 320}), {});
    const JobView job = *roomy.FindJob("job");
    NodeState::Options options = RoomyOptions();
    options.node_bytes = 3 * kBlockBytes;
    options.dram_limit_bytes = options.node_bytes + job.dram_bytes + free_bytes;
    options.staging_slots = 3;
    options.staging_slot_bytes = kBlockBytes;
    options.swap = SwapPaths({spare_slots * kBlockBytes});
    return options;
  }
  void TrainStep(NodeHarness& node, const std::vector<uint64_t>& sessions, uint64_t step) {
    for (const uint64_t session : sessions) {
      for (uint32_t group = 0; group < 2; ++group) node.Gradient(session, group, step);
    }
    for (const uint64_t session : sessions) node.Step(session, step);
    node.RunTasks();
    EXPECT_EQ(node.FindJob("job")->committed_step, step);
  }

  // Detaches the only rank and requests an attach as rank 0 of two. Returns the session of that request.
  uint64_t RequestTwoRanks(NodeHarness& node, uint64_t alone) {
    node.End(alone, EndCause::kDetached);
    node.RunTasks();
    return node.RequestAttach(layout_, {.rank = 0, .world_size = 2});
  }

  std::shared_ptr<const protocol::Layout> layout_ = MakeLayout({320, 320});
};

TEST_F(NodeStateWorldOnSwap, MovesStatesToSwapWhereItNeedsTheirDram) {
  NodeHarness node(Options(/*spare_slots=*/20), 1);
  const uint64_t alone = node.Attach(layout_, {});
  EXPECT_EQ(node.FindJob("job")->resident_blocks, 10U);
  TrainStep(node, {alone}, 1);
  const uint64_t first = RequestTwoRanks(node, alone);
  EXPECT_TRUE(node.Logged<ReplaceStepArena>().empty()) << "there is no room yet";
  ASSERT_EQ(node.Logged<RoomAwaited>().size(), 1U);
  EXPECT_GT(node.Logged<RoomAwaited>()[0].missing_bytes, 0U);
  EXPECT_EQ(node.Running<EvictBlock>().size(), 1U);
  node.RunTasks();
  node.Send(SessionMapped{.session = first});
  const uint64_t second = node.Attach(layout_, {.rank = 1, .world_size = 2});
  EXPECT_TRUE(node.attached(first)->status.ok() && node.attached(second)->status.ok());
  EXPECT_LT(node.FindJob("job")->resident_blocks, 10U);
  EXPECT_GT(node.FindJob("job")->resident_blocks, 0U);
  TrainStep(node, {first, second}, 2);
  EXPECT_EQ(node.fault(), "");
}

// The missing bytes are a whole number of blocks, so evicted blocks can free exactly the missing bytes.
TEST_F(NodeStateWorldOnSwap, TheWaitNamesTheJobThatMakesTheRoom) {
  const auto wait = [&](uint64_t free_bytes) {
    NodeHarness node(Options(/*spare_slots=*/20, free_bytes), 1);
    const uint64_t alone = node.Attach(layout_, {});
    RequestTwoRanks(node, alone);
    const std::vector<RoomAwaited> waits = node.Logged<RoomAwaited>();
    EXPECT_EQ(waits.size(), 1U);
    return waits.empty() ? RoomAwaited{} : waits.front();
  };
  const uint64_t growth_bytes = wait(0).missing_bytes;
  ASSERT_GT(growth_bytes, kBlockBytes);
  const RoomAwaited tight = wait(growth_bytes % kBlockBytes);
  EXPECT_EQ(tight.missing_bytes, growth_bytes - growth_bytes % kBlockBytes);
  EXPECT_EQ(tight.evicting_jobs, std::vector<std::string>{"1000:job"});
}

TEST_F(NodeStateWorldOnSwap, MovesNoMoreStatesWhenWhoWaitedIsGone) {
  NodeHarness node(Options(/*spare_slots=*/20), 1);
  const uint64_t alone = node.Attach(layout_, {});
  TrainStep(node, {alone}, 1);
  const uint64_t gone = RequestTwoRanks(node, alone);
  EXPECT_EQ(node.Running<EvictBlock>().size(), 1U);
  node.End(gone, EndCause::kLost);
  node.RunTasks();
  EXPECT_EQ(node.FindJob("job")->resident_blocks, 9U) << "whose move had begun";
  EXPECT_TRUE(node.Logged<ReplaceStepArena>().empty());
  const uint64_t back = node.Attach(layout_, {});
  TrainStep(node, {back}, 2);
  EXPECT_EQ(node.fault(), "");
}

TEST_F(NodeStateWorldOnSwap, IsRefusedWhereSwapHasNoSlots) {
  NodeHarness node(Options(/*spare_slots=*/1), 1);
  const uint64_t alone = node.Attach(layout_, {});
  const uint64_t refused = RequestTwoRanks(node, alone);
  EXPECT_THAT(node.attached(refused)->status, HasError(ErrorId::kDramLimit));
  const uint64_t back = node.Attach(layout_, {});
  EXPECT_TRUE(node.attached(back)->status.ok());
  EXPECT_EQ(node.FindJob("job")->resident_blocks, 10U);
  EXPECT_EQ(node.fault(), "");
}

TEST_F(NodeStateWorldOnSwap, IsRefusedWhereTheStatesCannotBeWritten) {
  NodeHarness node(Options(/*spare_slots=*/20), 1);
  const uint64_t alone = node.Attach(layout_, {});
  TrainStep(node, {alone}, 1);
  const uint64_t refused = RequestTwoRanks(node, alone);
  while (!node.Running<EvictBlock>().empty()) {
    node.Finish(node.Running<EvictBlock>()[0].task,
                protocol::MakeError(ErrorId::kSwapIo, "the disk says no"));
  }
  node.RunTasks();
  EXPECT_THAT(node.attached(refused)->status, HasError(ErrorId::kDramLimit));
  const uint64_t back = node.Attach(layout_, {});
  EXPECT_TRUE(node.attached(back)->status.ok());
  TrainStep(node, {back}, 2);
  EXPECT_EQ(node.fault(), "");
}

TEST_F(NodeStateWorld, TakesItsShareOfTheLimitAndGivesItBack) {
  AttachWorld(1);
  const uint64_t one_bytes = node_.state().Node().dram_used_bytes;
  DetachAll();
  AttachWorld(3);
  EXPECT_GT(node_.state().Node().dram_used_bytes, one_bytes);
  DetachAll();
  AttachWorld(1);
  EXPECT_EQ(node_.state().Node().dram_used_bytes, one_bytes);
}

TEST_F(NodeStateWorld, IsTriedAgainWhereItsArenaCouldNotBeMade) {
  AttachWorld(2);
  TrainStep(1);
  DetachAll();
  const uint64_t first = node_.RequestAttach(layout_, {.rank = 0, .world_size = 3});
  const uint64_t second = node_.RequestAttach(layout_, {.rank = 2, .world_size = 3});
  ASSERT_EQ(node_.Running<ReplaceStepArena>().size(), 1U);
  node_.Finish(node_.Running<ReplaceStepArena>()[0].task,
               protocol::MakeError(ErrorId::kMemlock, "no memory"));
  EXPECT_THAT(node_.attached(first)->status, HasError(ErrorId::kMemlock));
  EXPECT_THAT(node_.attached(second)->status, HasError(ErrorId::kMemlock));
  EXPECT_TRUE(View().ready) << "the job stays";
  AttachWorld(3);
  const auto tries = node_.Logged<ReplaceStepArena>();
  ASSERT_EQ(tries.size(), 2U);
  EXPECT_EQ(tries[1].extra_state[1].size_bytes, 11U);
  EXPECT_EQ(ExtraStateOf(1), 11U);
  TrainStep(2);
}

TEST_F(NodeStateWorld, IsThatOfWhoeverWaitsLast) {
  AttachWorld(2);
  Deliver(1);
  CallStep(1);
  for (const uint64_t session : sessions_) node_.End(session, EndCause::kLost);
  const uint64_t gone = node_.RequestAttach(layout_, {.rank = 3, .world_size = 4});
  const uint64_t other = node_.RequestAttach(layout_, {.rank = 0, .world_size = 1});
  EXPECT_THAT(node_.attached(other)->status, HasError(ErrorId::kRank)) << "4 waits";
  node_.End(gone, EndCause::kLost);
  const uint64_t alone = node_.RequestAttach(layout_, {.rank = 0, .world_size = 1});
  node_.RunTasks();
  EXPECT_TRUE(node_.attached(alone)->status.ok());
  EXPECT_EQ(View().world_size, 1U);
  EXPECT_EQ(View().committed_step, 1U);
}

TEST_F(NodeStateWorld, IsNothingToAReader) {
  AttachWorld(2);
  TrainStep(1);
  const uint64_t reader = node_.AttachReader(layout_);
  DetachAll();
  AttachWorld(1);
  EXPECT_EQ(node_.ErrorOf(node_.Fetch(reader, 0)), ErrorId::kNone);
  EXPECT_FALSE(node_.is_closed(reader));
}

}  // namespace
}  // namespace forebay::daemon::node_state_world_test
