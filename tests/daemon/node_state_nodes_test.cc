// SPDX-License-Identifier: Apache-2.0
// Goal    A step over several nodes is applied by all nodes or by none. Each node prepares the step, and continues with the
//         summaries of all nodes that the ranks bring. The loss of ranks undoes neither a prepared nor a decided step. Clipping
//         uses the norm of the whole gradient, with the bits that a single node would have.
// Method  Two harnesses, each a node with two of four ranks. The test carries summaries between the nodes as ranks do, and
//         loses ranks before each message.

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/step_summary.h"
#include "tests/support/job_cases.h"
#include "tests/support/node_harness.h"
#include "tests/support/status_test.h"

namespace forebay::daemon::node_state_nodes_test {
namespace {

using ::forebay::testing::AttachRequest;
using ::forebay::testing::MakeShardedLayout;
using ::forebay::testing::NodeHarness;
using ::forebay::testing::Place;
using ::forebay::testing::RoomyCaseOptions;
using ::forebay::testing::RoomyOptions;
using ::forebay::testing::ShardCut;
using ::forebay::testing::ShardedParam;
using protocol::ErrorId;
using protocol::StepDecision;
using protocol::StepSummary;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

constexpr uint32_t kRanks = 4;
constexpr uint32_t kNodeRanks = 2;
constexpr protocol::Durability kEveryOther{.level = protocol::DurabilityLevel::kEpoch, .steps = 2};
constexpr ErrorId kUnanswered = ErrorId::kTimeout;  // ErrorOf() of an unanswered command.

// All shards of the second parameter are on the first node.
const std::vector<std::vector<ShardedParam>> kGroups = {
    {{.rows = 301}, {.rows = 2, .columns = 100}},
    {{.rows = 20, .columns = 15, .cut = ShardCut::kColumns}}};

class OneOfTwo {
 public:
  explicit OneOfTwo(uint32_t number, const NodeState::Options& options = RoomyOptions(),
                    protocol::Durability durability = {})
      : first_rank_(number * kNodeRanks),
        layout_(MakeShardedLayout(
            kGroups,
            {.ranks = kRanks, .node_ranks = kNodeRanks, .first_rank = number * kNodeRanks})),
        durability_(durability),
        node_(options, kNodeRanks) {}

  AttachRequest RequestOf(uint32_t rank) const {
    return {.rank = rank, .world_ranks = kRanks, .durability = durability_};
  }
  void AttachAll() {
    sessions_.clear();
    for (uint32_t rank = 0; rank < kNodeRanks; ++rank) {
      sessions_.push_back(node_.Attach(layout_, RequestOf(rank)));
      ASSERT_OK(node_.attached(sessions_.back())->status);
    }
  }
  void Deliver(uint64_t step, bool finite = true) {
    for (uint32_t i = 0; i < layout_->partitions().size(); ++i) {
      node_.Gradient(sessions_[layout_->partitions()[i].owner], i, step, finite);
      node_.RunTasks();
    }
  }
  std::vector<ErrorId> Call(uint64_t step, double max_grad_norm = 0, double lr = 0.1) {
    tags_.clear();
    for (const uint64_t session : sessions_) {
      tags_.push_back(node_.Step(session, step, lr, max_grad_norm));
    }
    node_.RunTasks();
    return Errors();
  }
  std::vector<ErrorId> Decide(const StepSummary& world) {
    tags_.clear();
    for (const uint64_t session : sessions_) tags_.push_back(node_.Decide(session, world));
    node_.RunTasks();
    return Errors();
  }
  std::vector<ErrorId> Errors() const {
    std::vector<ErrorId> errors;
    for (const uint64_t tag : tags_) errors.push_back(node_.ErrorOf(tag));
    return errors;
  }
  const StepSummary& Summary() const { return node_.SummaryTo(sessions_[0]); }
  void LoseAll() {
    for (const uint64_t session : sessions_) node_.End(session, EndCause::kLost);
    node_.RunTasks();
  }
  uint64_t committed() const { return node_.FindJob("job")->committed_step; }
  const AnswerAttach& attached(uint32_t rank) const { return *node_.attached(sessions_[rank]); }

  uint32_t first_rank_;
  std::shared_ptr<const protocol::Layout> layout_;
  protocol::Durability durability_;
  NodeHarness node_;
  std::vector<uint64_t> sessions_;
  std::vector<uint64_t> tags_;
};

class NodeStateNodes : public ::testing::Test {
 protected:
  void SetUp() override {
    for (OneOfTwo* node : {&a_, &b_}) node->AttachAll();
  }
  void TearDown() override {
    EXPECT_EQ(a_.node_.fault(), "");
    EXPECT_EQ(b_.node_.fault(), "");
  }
  StepSummary World(StepDecision decision = StepDecision::kCommit) const {
    StepSummary world = a_.Summary();
    world.Merge(b_.Summary());
    world.head.decision = decision;
    return world;
  }
  void Prepare(uint64_t step) {
    for (OneOfTwo* node : {&a_, &b_}) {
      node->Deliver(step);
      EXPECT_THAT(node->Call(step), Each(ErrorId::kNone));
    }
  }
  void Train(uint64_t step) {
    Prepare(step);
    for (OneOfTwo* node : {&a_, &b_}) {
      EXPECT_THAT(node->Decide(World()), Each(ErrorId::kNone));
      EXPECT_EQ(node->committed(), step);
    }
  }

  OneOfTwo a_{0}, b_{1};
};

TEST_F(NodeStateNodes, AStepIsPreparedByEachAndCommittedByWhatAllSay) {
  a_.Deliver(1);
  EXPECT_THAT(a_.Call(1), Each(ErrorId::kNone));
  for (const uint64_t tag : a_.tags_) {
    EXPECT_EQ(a_.node_.answer(tag)->completion.flags, protocol::kStepPrepared);
  }
  EXPECT_THAT(a_.node_.Logged<UpdateBlock>(), IsEmpty());
  EXPECT_EQ(a_.committed(), 0U);
  b_.Deliver(1);
  b_.Call(1);
  for (OneOfTwo* node : {&a_, &b_}) {
    EXPECT_THAT(node->Decide(World()), Each(ErrorId::kNone));
    EXPECT_EQ(node->committed(), 1U);
    EXPECT_EQ(node->node_.Logged<UpdateBlock>().size(), node->node_.FindJob("job")->blocks);
  }
  Train(2);
}

TEST_F(NodeStateNodes, TheFirstRankThatBringsTheDecisionCommitsForItsNode) {
  Prepare(1);
  const uint64_t first = a_.node_.Decide(a_.sessions_[1], World());
  a_.node_.RunTasks();
  EXPECT_EQ(a_.node_.ErrorOf(first), ErrorId::kNone);
  EXPECT_EQ(a_.committed(), 1U);
  const uint64_t second = a_.node_.Decide(a_.sessions_[0], World());
  EXPECT_EQ(a_.node_.ErrorOf(second), ErrorId::kNone);
  EXPECT_EQ(a_.node_.Logged<UpdateBlock>().size(), a_.node_.FindJob("job")->blocks) << "once";
  b_.Decide(World());
}

TEST_F(NodeStateNodes, TheNormIsThatOfTheWholeGradientWithTheBitsOfOneNode) {
  const auto deliver = [](NodeHarness& node, const std::vector<uint64_t>& sessions,
                          const protocol::Layout& layout, uint32_t first_rank) {
    for (uint32_t i = 0; i < layout.partitions().size(); ++i) {
      const protocol::PartitionPlace& place = layout.partitions()[i];
      node.Gradient(sessions[place.owner], i, 1);
      TaskDone done = node.model().Finish(node.Running<AddGradients>().at(0).task);
      done.squares = {};
      done.squares.AddChunk(1.0 / (3 + first_rank + place.owner) + 1e-9 * place.group);
      node.Send(done);
    }
  };
  for (OneOfTwo* node : {&a_, &b_}) {
    deliver(node->node_, node->sessions_, *node->layout_, node->first_rank_);
    node->Call(1, /*max_grad_norm=*/0.25);
  }
  const auto whole = MakeShardedLayout(kGroups, {.ranks = kRanks});
  NodeHarness one(RoomyOptions(), kRanks);
  std::vector<uint64_t> sessions;
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    sessions.push_back(one.Attach(whole, {.rank = rank}));
  }
  deliver(one, sessions, *whole, 0);
  std::vector<uint64_t> tags;
  for (const uint64_t session : sessions) tags.push_back(one.Step(session, 1, 0.1, 0.25));
  one.RunTasks();
  const protocol::Completion expected = one.answer(tags[0])->completion;
  EXPECT_EQ(expected.flags, protocol::kStepClipped);
  for (OneOfTwo* node : {&a_, &b_}) {
    EXPECT_THAT(node->Decide(World()), Each(ErrorId::kNone));
    for (const uint64_t tag : node->tags_) {
      const protocol::Completion& answer = node->node_.answer(tag)->completion;
      EXPECT_EQ(answer.norm, expected.norm);
      EXPECT_NE(answer.flags & protocol::kStepClipped, 0);
    }
    EXPECT_EQ(node->node_.Logged<UpdateBlock>()[0].segments[0].scalars.grad_scale,
              one.Logged<UpdateBlock>()[0].segments[0].scalars.grad_scale);
  }
}

TEST_F(NodeStateNodes, AParameterThatAnotherNodeHasAGradientOfIsUpdatedThere) {
  // No rank of node b has a part of parameter 1, so that no rank of b lacks its gradient.
  Prepare(1);
  EXPECT_TRUE(protocol::IsPresent(a_.Summary().present, 1));
  EXPECT_FALSE(protocol::IsPresent(b_.Summary().present, 1));
  EXPECT_FALSE(protocol::IsPresent(b_.Summary().lacking, 1));
  EXPECT_EQ(World().FirstPartial(), 3U);
  a_.Decide(World());
  b_.Decide(World());
  for (OneOfTwo* node : {&a_, &b_}) {
    EXPECT_EQ(node->node_.answer(node->node_.ReadState(node->sessions_[0], 1, 0, 0))
                  ->completion.offset_bytes,
              1U)
        << "every node counts the updates of every parameter";
  }
}

TEST_F(NodeStateNodes, APartThatIsLackingOnOneNodeIsNamed) {
  a_.Deliver(1);
  a_.Call(1);
  for (uint32_t i = 0; i < b_.layout_->partitions().size(); ++i) {
    if (b_.layout_->partitions()[i].group != 0) continue;
    b_.node_.Gradient(b_.sessions_[b_.layout_->partitions()[i].owner], i, 1);
    b_.node_.RunTasks();
  }
  EXPECT_THAT(b_.Call(1), Each(ErrorId::kNone));
  EXPECT_EQ(World().FirstPartial(), 2U);
}

// ------------------------------------------------------------------------------------ ranks are lost

TEST_F(NodeStateNodes, APreparedStepSurvivesTheLossOfEveryRankAndIsRolledForward) {
  Train(1);
  Prepare(2);
  a_.Decide(World());
  EXPECT_EQ(a_.committed(), 2U);
  const StepSummary decision = World();
  b_.LoseAll();
  a_.LoseAll();
  a_.AttachAll();
  EXPECT_EQ(a_.attached(0).prepared_step, 0U);
  EXPECT_EQ(a_.attached(0).committed_step, 2U);
  ASSERT_OK_AND_ASSIGN(const StepSummary kept,
                       protocol::DecodeStepSummary(a_.attached(0).summary, 3));
  EXPECT_EQ(kept.head.squares, decision.head.squares);
  EXPECT_EQ(kept.head.decision, StepDecision::kCommit);
  b_.AttachAll();
  EXPECT_EQ(b_.attached(1).prepared_step, 2U);
  EXPECT_EQ(b_.attached(1).committed_step, 1U);
  EXPECT_THAT(b_.Decide(kept), Each(ErrorId::kNone));
  EXPECT_EQ(b_.committed(), 2U);
  Train(3);
}

// The ranks bring the decision to the next daemon, without the step calls that the killed daemon had.
TEST(NodeStateNodesKilled, APreparedStepOfAKilledDaemonIsDecided) {
  NodeState::Options options = RoomyOptions();
  options.keeps_jobs = true;
  OneOfTwo a(0, options);
  OneOfTwo b(1);
  for (OneOfTwo* node : {&a, &b}) {
    node->AttachAll();
    node->Deliver(1);
    EXPECT_THAT(node->Call(1), Each(ErrorId::kNone));
  }
  StepSummary world = a.Summary();
  world.Merge(b.Summary());
  world.head.decision = StepDecision::kCommit;
  const std::unique_ptr<NodeHarness> next = NodeHarness::AfterKill(a.node_, options);
  ASSERT_NE(next, nullptr);
  next->RunTasks();
  std::vector<uint64_t> sessions;
  for (uint32_t rank = 0; rank < kNodeRanks; ++rank) {
    AttachRequest request = a.RequestOf(rank);
    request.resume = true;
    sessions.push_back(next->AttachOnly(a.layout_, request));
    next->RunTasks();
    ASSERT_OK(next->attached(sessions.back())->status);
    EXPECT_EQ(next->attached(sessions.back())->prepared_step, 1U);
  }
  for (const uint64_t session : sessions) {
    const uint64_t decide = next->Decide(session, world);
    next->RunTasks();
    EXPECT_EQ(next->ErrorOf(decide), ErrorId::kNone);
  }
  EXPECT_EQ(next->FindJob("job")->committed_step, 1U);
  EXPECT_EQ(next->FindJob("job")->published_step, 1U);
  EXPECT_EQ(next->fault(), "");
}

TEST_F(NodeStateNodes, WhatNoNodeHasCommittedIsDroppedByAll) {
  Prepare(1);
  const StepSummary drop = World(StepDecision::kDrop);
  for (OneOfTwo* node : {&a_, &b_}) {
    node->LoseAll();
    node->AttachAll();
    EXPECT_EQ(node->attached(0).prepared_step, 1U);
    EXPECT_THAT(node->Decide(drop), Each(ErrorId::kNone));
    for (size_t i = 0; i < kNodeRanks; ++i) {
      const uint64_t attempt = node->node_.answer(node->tags_[i])->completion.attempt;
      EXPECT_EQ(attempt, 1U) << "both ranks drop it, once";
      node->node_.SetAttempt(node->sessions_[i], attempt);
    }
  }
  Train(1);
}

TEST_F(NodeStateNodes, ARankThatIsLostBeforeItsCallDropsTheStepOfItsNode) {
  a_.Deliver(1);
  a_.node_.Step(a_.sessions_[0], 1);
  a_.node_.End(a_.sessions_[1], EndCause::kLost);
  a_.LoseAll();
  a_.AttachAll();
  EXPECT_EQ(a_.attached(0).prepared_step, 0U);
  Train(1);
}

// ------------------------------------------------------------------------------ back to a durable step

class NodeStateGoesBack : public ::testing::TestWithParam<Place> {
 protected:
  static NodeState::Options Options() {
    NodeState::Options options = RoomyCaseOptions();
    options.block_elems = 256;
    if (GetParam() == Place::kDram) return options;
    OneOfTwo roomy(0, options, kEveryOther);
    roomy.AttachAll();
    options.dram_limit_bytes =
        roomy.node_.state().Node().dram_used_bytes - roomy.node_.FindJob("job")->resident_bytes;
    return options;
  }
  void TearDown() override { EXPECT_EQ(node_.node_.fault(), ""); }
  // Trains a step with this node alone, so that the node's own summary serves as the summary of the world.
  void Train(uint64_t step) {
    node_.Deliver(step);
    ASSERT_THAT(node_.Call(step), Each(ErrorId::kNone));
    StepSummary world = node_.Summary();
    world.head.decision = StepDecision::kCommit;
    ASSERT_THAT(node_.Decide(world), Each(ErrorId::kNone));
    ASSERT_EQ(node_.committed(), step);
    node_.node_.RunTasks();
  }
  ErrorId GoBack(uint64_t step) {
    const ErrorId met = node_.node_.ErrorOf(node_.node_.GoBack(node_.sessions_[0], step));
    node_.node_.RunTasks();
    return met;
  }

  OneOfTwo node_{0, Options(), kEveryOther};
};

TEST_P(NodeStateGoesBack, ToTheNewestDurableStepOrTheOneBefore) {
  for (const uint64_t to : {4U, 2U}) {
    SCOPED_TRACE(to);
    node_.AttachAll();
    for (uint64_t step = node_.committed() + 1; step <= 5; ++step) Train(step);
    node_.Deliver(6);
    node_.Call(6);
    EXPECT_EQ(GoBack(3), ErrorId::kStep) << "was never durable";
    ASSERT_EQ(GoBack(to), ErrorId::kNone);
    EXPECT_THAT(node_.node_.Logged<JobWentBack>(), Not(IsEmpty()));
    node_.AttachAll();
    for (uint32_t rank = 0; rank < kNodeRanks; ++rank) {
      EXPECT_EQ(node_.attached(rank).committed_step, to);
      EXPECT_EQ(node_.attached(rank).durable_step, to);
      EXPECT_EQ(node_.attached(rank).durable_before, to == 4 ? 2U : 0U);
      EXPECT_FALSE(node_.attached(rank).writes_initial);
    }
    EXPECT_EQ(GoBack(to), ErrorId::kNone) << "it is there";
  }
}

TEST_P(NodeStateGoesBack, BothStepsSurviveTheDaemon) {
  node_.AttachAll();
  for (uint64_t step = 1; step <= 5; ++step) Train(step);
  std::unique_ptr<NodeHarness> next = NodeHarness::Restart(node_.node_, Options());
  for (const uint64_t to : {4U, 2U}) {
    std::vector<uint64_t> sessions;
    for (uint32_t rank = 0; rank < kNodeRanks; ++rank) {
      AttachRequest request = node_.RequestOf(rank);
      request.resume = true;
      sessions.push_back(next->Attach(node_.layout_, request));
      ASSERT_OK(next->attached(sessions.back())->status);
      EXPECT_EQ(next->attached(sessions.back())->committed_step, to);
    }
    EXPECT_EQ(next->attached(sessions[0])->durable_before, to == 4 ? 2U : 0U);
    if (to == 4) {
      ASSERT_EQ(next->ErrorOf(next->GoBack(sessions[1], 2)), ErrorId::kNone);
    }
    next->RunTasks();
  }
  EXPECT_EQ(next->fault(), "");
}

TEST_P(NodeStateGoesBack, AJobThatIsDeletedMeanwhileDoesNotReturn) {
  node_.AttachAll();
  for (uint64_t step = 1; step <= 5; ++step) Train(step);
  NodeHarness& node = node_.node_;
  node.Gradient(node_.sessions_[0], 0, 6);
  ASSERT_THAT(node.Running<AddGradients>(), Not(IsEmpty()));  // the job cannot be freed yet
  ASSERT_EQ(node.ErrorOf(node.GoBack(node_.sessions_[0], 4)), ErrorId::kNone);
  ASSERT_TRUE(node.FindJob("job").has_value());
  node.Send(DeleteJobRequested{.request = 7, .uid = 1000, .job = "job"});
  EXPECT_THAT(node.Logged<AnswerDelete>(), IsEmpty());
  node.RunTasks();
  ASSERT_THAT(node.Logged<AnswerDelete>(), SizeIs(1));
  EXPECT_OK(node.Logged<AnswerDelete>()[0].status);
  EXPECT_FALSE(node.FindJob("job").has_value());
  EXPECT_TRUE(NodeHarness::Restart(node, Options())->state().Jobs().empty());
}

INSTANTIATE_TEST_SUITE_P(Places, NodeStateGoesBack, ::testing::Values(Place::kDram, Place::kSwap));

// ----------------------------------------------------------------------------------------- refusals

TEST_F(NodeStateNodes, AWithdrawnCallLetsTheOthersOfItsNodeGo) {
  a_.Deliver(1);
  const uint64_t waiting = a_.node_.Step(a_.sessions_[0], 1);
  EXPECT_EQ(a_.node_.ErrorOf(waiting), kUnanswered);
  StepSummary withdrawn = {.head = {.step = 1, .decision = StepDecision::kWithdraw, .params = 3},
                           .present = {0},
                           .lacking = {0}};
  EXPECT_EQ(a_.node_.ErrorOf(a_.node_.Decide(a_.sessions_[1], withdrawn)), ErrorId::kNone);
  EXPECT_EQ(a_.node_.ErrorOf(waiting), ErrorId::kStep);
  EXPECT_EQ(a_.node_.answer(waiting)->completion.flags, protocol::kStepWithdrawn);
  b_.Deliver(1);
  b_.Call(1);
  b_.Decide([&] {
    StepSummary repeat = b_.Summary();
    repeat.head.decision = StepDecision::kRepeat;
    return repeat;
  }());
  for (OneOfTwo* node : {&a_, &b_}) EXPECT_THAT(node->Call(1), Each(ErrorId::kNone));
  for (OneOfTwo* node : {&a_, &b_}) {
    EXPECT_THAT(node->Decide(World()), Each(ErrorId::kNone));
    EXPECT_EQ(node->committed(), 1U);
  }
}

TEST_F(NodeStateNodes, ALateRepeatDoesNotReopenWhatIsPreparedAnew) {
  Prepare(1);
  const StepSummary repeat = World(StepDecision::kRepeat);
  a_.Decide(repeat);
  EXPECT_THAT(a_.Call(1), Each(ErrorId::kNone));
  EXPECT_EQ(a_.node_.answer(a_.tags_[0])->completion.flags, protocol::kStepPrepared);
  b_.Decide(repeat);
  b_.Call(1);
  a_.Decide(World());
  b_.Decide(World());
  EXPECT_EQ(a_.committed(), 1U);
  EXPECT_EQ(b_.committed(), 1U);
}

TEST_F(NodeStateNodes, ADecisionThatFitsNothingIsRefused) {
  EXPECT_THAT(a_.Decide({.head = {.step = 1, .decision = StepDecision::kCommit, .params = 3},
                         .present = {0},
                         .lacking = {0}}),
              Each(ErrorId::kStep))
      << "nothing is prepared";
  Prepare(1);
  StepSummary other = World();
  ++other.head.scalars;
  EXPECT_THAT(a_.Decide(other), Each(ErrorId::kStep));
  other = World();
  other.head.step = 2;
  EXPECT_THAT(a_.Decide(other), Each(ErrorId::kStep));
  other = World();
  other.present[0] |= uint64_t{1} << 3;
  EXPECT_THAT(a_.Decide(other), Each(ErrorId::kProtocol)) << "a parameter that there is not";
  other = World();
  other.head.decision = StepDecision::kNone;
  EXPECT_THAT(a_.Decide(other), Each(ErrorId::kProtocol));
  for (OneOfTwo* node : {&a_, &b_}) EXPECT_THAT(node->Decide(World()), Each(ErrorId::kNone));
}

TEST_F(NodeStateNodes, AJobOnOneNodeTakesNoDecision) {
  NodeHarness one(RoomyOptions(), 1);
  const auto layout = MakeShardedLayout(kGroups, {.ranks = 1});
  const uint64_t session = one.Attach(layout, {});
  const StepSummary decision = {.head = {.step = 1, .decision = StepDecision::kCommit, .params = 3},
                                .present = {0},
                                .lacking = {0}};
  EXPECT_EQ(one.ErrorOf(one.Decide(session, decision)), ErrorId::kUnsupported);
}

TEST_F(NodeStateNodes, AnotherWorldIsRefused) {
  a_.LoseAll();
  const auto refused = [&](const std::shared_ptr<const protocol::Layout>& layout, uint32_t ranks) {
    const uint64_t session = a_.node_.AttachOnly(layout, {.rank = 0, .world_ranks = ranks});
    return protocol::IdOf(a_.node_.attached(session)->status);
  };
  EXPECT_EQ(refused(a_.layout_, 6), ErrorId::kRank) << "another number of ranks";
  EXPECT_EQ(refused(a_.layout_, kNodeRanks), ErrorId::kRank) << "all are here";
  EXPECT_EQ(refused(a_.layout_, 0), ErrorId::kLayout) << "a part, and no other nodes";
  EXPECT_EQ(refused(b_.layout_, kRanks), ErrorId::kLayout) << "the other node's ranks";
  EXPECT_EQ(refused(b_.layout_, 3), ErrorId::kRank) << "rank 3 of 3";
}

TEST_F(NodeStateNodes, WhatIsOnAnotherNodeCannotBeReadHere) {
  const uint64_t tag = b_.node_.ReadState(b_.sessions_[0], 1, 0, 10);
  b_.node_.RunTasks();
  EXPECT_EQ(b_.node_.ErrorOf(tag), ErrorId::kRange);
  EXPECT_THAT(std::string(b_.node_.answer(tag)->status.message()), HasSubstr("0 are on this node"));
}

}  // namespace
}  // namespace forebay::daemon::node_state_nodes_test
