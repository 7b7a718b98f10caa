// SPDX-License-Identifier: Apache-2.0
// Goal    The contributions of all ranks are added in rank order, regardless of their order of arrival. Every order of delivery
//         ends with the same result. A parameter is updated if any rank has a gradient of it. The newest attempt counts. A
//         non-finite value never reaches a committed step.
// Method  The harness runs the state machine. A model of the workers records, for each accumulator, the list of contributions
//         added to it. Each test chooses which tasks end and when.

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/node_harness.h"

namespace forebay::daemon::node_state_gradient_test {
namespace {

using ::forebay::testing::GradientToken;
using ::forebay::testing::MakeLayout;
using ::forebay::testing::MakeLayoutOfParams;
using ::forebay::testing::NodeHarness;
using ::forebay::testing::RoomyOptions;
using protocol::ErrorId;
using ::testing::ElementsAre;

std::vector<uint32_t> Ranks(const std::vector<GradientToken>& tokens) {
  std::vector<uint32_t> ranks;
  for (const GradientToken& token : tokens) ranks.push_back(token.rank);
  return ranks;
}

// A job of three ranks and four groups of one size, all attached.
class NodeStateGradient : public ::testing::Test {
 protected:
  static constexpr uint32_t kWorld = 3;

  void SetUp() override {
    // Each arena has three pieces: two gradients may wait while the rank writes one more.
    for (uint32_t rank = 0; rank < kWorld; ++rank) {
      sessions_.push_back(node_.Attach(
          layout_, {.rank = rank, .grad_arena_bytes = 3 * layout_->largest_gradient_bytes()}));
    }
  }
  void TearDown() override { EXPECT_EQ(node_.fault(), ""); }

  std::vector<ErrorId> StepAll(uint64_t step) { return node_.StepAll(sessions_, step); }
  std::vector<uint32_t> AddedRanks(uint32_t group) {
    const auto& gradients = node_.model().committed_gradients(1);
    const auto it = gradients.find(group);
    return it == gradients.end() ? std::vector<uint32_t>() : Ranks(it->second);
  }

  std::shared_ptr<const protocol::Layout> layout_ = MakeLayout({150, 192, 100, 192});
  NodeHarness node_{RoomyOptions(), kWorld};
  std::vector<uint64_t> sessions_;
};

TEST_F(NodeStateGradient, AreAddedInRankOrderForEveryOrderOfArrival) {
  std::vector<uint32_t> order = {0, 1, 2};
  uint64_t step = 1;
  do {
    SCOPED_TRACE(::testing::PrintToString(order));
    for (const uint32_t rank : order) node_.Gradient(sessions_[rank], 1, step);
    node_.RunTasks();
    ASSERT_THAT(StepAll(step), ElementsAre(ErrorId::kNone, ErrorId::kNone, ErrorId::kNone));
    EXPECT_THAT(AddedRanks(1), ElementsAre(0, 1, 2));
    ++step;
  } while (std::next_permutation(order.begin(), order.end()));
  EXPECT_EQ(step, 7U);
}

TEST_F(NodeStateGradient, AreAddedInOnePassWhereAllHaveArrived) {
  for (const uint32_t rank : {2U, 0U, 1U}) {
    EXPECT_TRUE(node_.Running<AddGradients>().empty());
    node_.Gradient(sessions_[rank], 0, 1);
  }
  const std::vector<AddGradients> adds = node_.Running<AddGradients>();
  ASSERT_EQ(adds.size(), 1U);
  EXPECT_TRUE(adds[0].assign);
  EXPECT_EQ(adds[0].elems, layout_->groups()[0].elems);
  ASSERT_EQ(adds[0].sources.size(), 3U);
  for (uint32_t rank = 0; rank < kWorld; ++rank) {
    EXPECT_EQ(adds[0].sources[rank].session, sessions_[rank]);
  }
}

TEST_F(NodeStateGradient, AreAddedBeforeWhereARankIsShortOfPieces) {
  // Arenas of three pieces: with two held, one is free.
  node_.Gradient(sessions_[0], 0, 1);
  EXPECT_TRUE(node_.Running<AddGradients>().empty());
  node_.Gradient(sessions_[0], 1, 1);
  const std::vector<AddGradients> adds = node_.Running<AddGradients>();
  ASSERT_EQ(adds.size(), 2U) << "what has arrived in order of all that the rank holds";
  EXPECT_TRUE(adds[0].assign);
  node_.RunTasks();
  node_.Gradient(sessions_[2], 0, 1);
  node_.Gradient(sessions_[1], 0, 1);
  ASSERT_EQ(node_.Running<AddGradients>().size(), 1U);
  EXPECT_FALSE(node_.Running<AddGradients>()[0].assign);
  EXPECT_EQ(node_.Running<AddGradients>()[0].sources.size(), 2U);
}

TEST_F(NodeStateGradient, OfOneRangeAreAddedInOnePassAtATime) {
  for (const uint64_t session : sessions_) node_.Gradient(session, 0, 1);
  EXPECT_EQ(node_.Running<AddGradients>().size(), 1U);
  for (const uint64_t session : sessions_) node_.Gradient(session, 1, 1);
  EXPECT_EQ(node_.Running<AddGradients>().size(), 2U) << "groups do not wait for each other";
}

TEST_F(NodeStateGradient, AreAnsweredWhenTheirBytesAreFree) {
  const uint64_t late = node_.Gradient(sessions_[1], 0, 1);
  node_.RunTasks();
  EXPECT_EQ(node_.answer(late), nullptr) << "rank 0 comes first";
  const uint64_t first = node_.Gradient(sessions_[0], 0, 1);
  EXPECT_EQ(node_.answer(first), nullptr);
  node_.Gradient(sessions_[2], 0, 1);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(first), ErrorId::kNone);
  EXPECT_EQ(node_.ErrorOf(late), ErrorId::kNone);
}

TEST_F(NodeStateGradient, StayInTheArenaWhileItHasRoomForOneMore) {
  node_.Gradient(sessions_[1], 1, 1);
  node_.Gradient(sessions_[1], 3, 1);
  EXPECT_TRUE(node_.Running<CopyToStepArena>().empty());
  node_.Gradient(sessions_[1], 0, 1);
  ASSERT_EQ(node_.Running<CopyToStepArena>().size(), 1U) << "the third is moved to the overflow";
  EXPECT_EQ(node_.Running<CopyToStepArena>()[0].bytes, layout_->partition_bytes(0));
}

TEST_F(NodeStateGradient, OfTheLastRankMayAllComeFirst) {
  // Rank 2 delivers everything before the other ranks begin: two gradients in its arena, two in overflow slots.
  for (const uint32_t group : {3U, 2U, 1U, 0U}) {
    node_.Gradient(sessions_[2], group, 1);
    node_.RunTasks();
  }
  EXPECT_EQ(node_.Logged<CopyToStepArena>().size(), 2U);
  for (uint32_t group = 0; group < 4; ++group) {
    node_.Gradient(sessions_[1], group, 1);
    node_.Gradient(sessions_[0], group, 1);
    node_.RunTasks();
  }
  ASSERT_THAT(StepAll(1), ElementsAre(ErrorId::kNone, ErrorId::kNone, ErrorId::kNone));
  for (uint32_t group = 0; group < 4; ++group) {
    EXPECT_THAT(AddedRanks(group), ElementsAre(0, 1, 2)) << group;
  }
}

// Three ranks deliver four ranges of one group, each rank in a different order and with the smallest pool. A rank delivers
// while a piece of its pool is free, as a client does. Ranks take turns by `turns`. Tasks end when no rank can deliver any
// more.
class SmallestPools {
 public:
  static constexpr uint32_t kWorld = 3;
  static constexpr uint64_t kRanges = 4;
  static constexpr uint64_t kUnit = protocol::kGradUnitElems;

  SmallestPools() {
    // A piece has the size of the largest group, which is one range.
    const std::vector<uint64_t> elems(kRanges, kUnit);
    layout_ = MakeLayout(elems);
    for (uint32_t rank = 0; rank < kWorld; ++rank) {
      sessions_.push_back(node_.Attach(
          layout_, {.rank = rank, .grad_arena_bytes = 2 * layout_->largest_gradient_bytes()}));
    }
  }

  // Delivers by `orders`, one order of groups for each rank. `turns` gives the ranks that deliver next, over and over. Returns
  // whether all deliveries were answered.
  bool Deliver(const std::vector<std::vector<uint32_t>>& orders, const std::vector<uint32_t>& turns,
               uint64_t step) {
    std::vector<std::vector<uint64_t>> tags(kWorld);
    std::vector<size_t> next(kWorld, 0);
    const auto in_pool = [&](uint32_t rank) {
      return std::count_if(tags[rank].begin(), tags[rank].end(),
                           [this](uint64_t tag) { return node_.answer(tag) == nullptr; });
    };
    while (true) {
      bool moved = false;
      for (const uint32_t rank : turns) {
        if (next[rank] == kRanges || in_pool(rank) == 2) continue;
        const uint32_t group = orders[rank][next[rank]++];
        tags[rank].push_back(node_.Gradient(sessions_[rank], group, step));
        moved = true;
      }
      if (!moved && node_.model().running().empty()) break;
      if (!moved) node_.RunTasks();
    }
    for (const auto& of_rank : tags) {
      for (const uint64_t tag : of_rank) {
        if (node_.ErrorOf(tag) != ErrorId::kNone) return false;
      }
    }
    return true;
  }

  std::vector<ErrorId> StepAll(uint64_t step) { return node_.StepAll(sessions_, step); }

  NodeHarness node_{RoomyOptions(), kWorld};
  std::shared_ptr<const protocol::Layout> layout_;
  std::vector<uint64_t> sessions_;
};

TEST(NodeStateGradientOrder, EveryOrderOfThreeRanksAndFourRangesEndsWithTheResult) {
  SmallestPools pools;
  std::vector<std::vector<uint32_t>> permutations;
  std::vector<uint32_t> order = {0, 1, 2, 3};
  do permutations.push_back(order);
  while (std::next_permutation(order.begin(), order.end()));
  // The ranks take turns, or one rank delivers everything before the next one begins.
  const std::vector<std::vector<uint32_t>> turns = {
      {0, 1, 2}, {2, 1, 0}, {2, 2, 2, 2, 1, 1, 1, 1, 0}};
  uint64_t step = 1;
  for (size_t i = 0; i < permutations.size(); ++i) {
    for (size_t j = 0; j < permutations.size(); ++j) {
      // Rank 0's order is always the first permutation, because only differences between the orders matter.
      const std::vector<std::vector<uint32_t>> orders = {permutations[0], permutations[i],
                                                         permutations[j]};
      ASSERT_TRUE(pools.Deliver(orders, turns[step % turns.size()], step)) << i << " " << j;
      ASSERT_THAT(pools.StepAll(step), ElementsAre(ErrorId::kNone, ErrorId::kNone, ErrorId::kNone));
      for (uint32_t param = 0; param < 4; ++param) {
        const auto& used = pools.node_.model().committed_gradients(1);
        ASSERT_THAT(Ranks(used.at(param)), ElementsAre(0, 1, 2)) << i << " " << j;
      }
      ++step;
    }
  }
  EXPECT_EQ(pools.node_.fault(), "");
}

// Rank 0 delivers last, and is first in the order of additions: the other ranks wait, then all deliveries are answered.
TEST(NodeStateGradientOrder, AFullOverflowIsBackPressureAndNoError) {
  SmallestPools pools;
  NodeHarness& node = pools.node_;
  std::vector<uint64_t> tags;
  for (const uint32_t group : {3U, 2U, 1U, 0U}) {
    tags.push_back(node.Gradient(pools.sessions_[2], group, 1));
    node.RunTasks();
  }
  EXPECT_EQ(node.Logged<CopyToStepArena>().size(), 2U) << "two pieces a rank";
  EXPECT_EQ(std::count_if(tags.begin(), tags.end(),
                          [&](uint64_t tag) { return node.answer(tag) == nullptr; }),
            2)
      << "the pool's two pieces wait";
  for (const uint32_t rank : {1U, 0U}) {
    for (uint32_t group = 0; group < 4; ++group) {
      node.Gradient(pools.sessions_[rank], group, 1);
      node.RunTasks();
    }
  }
  for (const uint64_t tag : tags) EXPECT_EQ(node.ErrorOf(tag), ErrorId::kNone);
  EXPECT_THAT(pools.StepAll(1), ElementsAre(ErrorId::kNone, ErrorId::kNone, ErrorId::kNone));
  EXPECT_EQ(node.fault(), "");
}

// With 8 ranks in bfloat16, the ranks' gradients are read once and the sum is written once.
TEST(NodeStateGradientOrder, EightRanksCostTwentyBytesOfMemoryTrafficAParameter) {
  constexpr uint64_t kElems = 4 * protocol::kGradUnitElems;
  protocol::LayoutSpec spec;
  spec.dtype = protocol::DType::kBFloat16;
  spec.format = protocol::Format::kExact;
  spec.params = {{.name = "w", .shape = {kElems}}};
  spec.group_names = {"g"};
  const auto layout =
      std::make_shared<const protocol::Layout>(protocol::Layout::Create(spec).value());
  NodeHarness node(RoomyOptions(), 8);
  std::vector<uint64_t> sessions;
  for (uint32_t rank = 0; rank < 8; ++rank) {
    sessions.push_back(node.Attach(layout, {.rank = rank}));
  }
  for (const uint32_t rank : {3U, 7U, 0U, 1U, 6U, 2U, 5U, 4U}) node.Gradient(sessions[rank], 0, 1);
  for (const uint64_t session : sessions) node.Step(session, 1);
  node.RunTasks();
  uint64_t bytes = 0;
  for (const AddGradients& add : node.Logged<AddGradients>()) {
    const uint64_t width = add.sources.size() * 2 + (add.assign ? 4 : 8);
    bytes += add.elems * width;
  }
  for (const CopyToStepArena& copy : node.Logged<CopyToStepArena>()) bytes += 2 * copy.bytes;
  for (const SumGradient& sum : node.Logged<SumGradient>()) bytes += 4 * sum.elems;
  EXPECT_EQ(bytes, 20 * kElems);
  EXPECT_EQ(node.model().committed_step(1), 1U);
}

TEST(NodeStateGradientOrder, WaitsWithoutErrorWhereTheRanksAgree) {
  const auto layout = MakeLayout(std::vector<uint64_t>(8, 128));
  NodeHarness node(RoomyOptions());
  std::vector<uint64_t> sessions;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    sessions.push_back(node.Attach(
        layout, {.rank = rank, .grad_arena_bytes = 2 * layout->largest_gradient_bytes()}));
  }
  std::vector<uint64_t> tags;
  for (uint32_t group = 0; group < 4; ++group) {
    tags.push_back(node.Gradient(sessions[1], group, 1));
    node.RunTasks();
  }
  EXPECT_EQ(node.ErrorOf(tags[3]), ErrorId::kTimeout) << "full: back-pressure, no error";
  for (uint32_t group = 0; group < 4; ++group) {
    node.Gradient(sessions[0], group, 1);
    node.RunTasks();
  }
  for (const uint64_t tag : tags) EXPECT_EQ(node.ErrorOf(tag), ErrorId::kNone);
  EXPECT_EQ(node.fault(), "");
}

TEST(NodeStateGradientOrder, ARankThatCallsStepIsNotWaitedFor) {
  // Rank 0 never delivers group 0. Rank 1's arena is full of gradients that wait for rank 0, and rank 1 must still reach its
  // own step.
  const auto layout = MakeLayout(std::vector<uint64_t>(6, 128));
  NodeHarness node(RoomyOptions());
  std::vector<uint64_t> sessions;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    sessions.push_back(node.Attach(
        layout, {.rank = rank, .grad_arena_bytes = 2 * layout->largest_gradient_bytes()}));
  }
  std::vector<uint64_t> tags;
  for (uint32_t group = 0; group < 4; ++group) {
    tags.push_back(node.Gradient(sessions[1], group, 1));
    node.RunTasks();
  }
  EXPECT_EQ(node.ErrorOf(tags[3]), ErrorId::kTimeout);
  const uint64_t step0 = node.Step(sessions[0], 1);
  node.RunTasks();
  for (const uint64_t tag : tags) EXPECT_EQ(node.ErrorOf(tag), ErrorId::kNone);
  const uint64_t step1 = node.Step(sessions[1], 1);
  node.RunTasks();
  EXPECT_EQ(node.ErrorOf(step0), ErrorId::kNone);
  EXPECT_EQ(node.ErrorOf(step1), ErrorId::kNone);
  EXPECT_EQ(node.fault(), "");
}

TEST_F(NodeStateGradient, ASecondOneForAGroupIsRefused) {
  node_.Gradient(sessions_[0], 0, 1);
  const uint64_t second = node_.Gradient(sessions_[0], 0, 1);
  EXPECT_EQ(node_.ErrorOf(second), ErrorId::kGradRepeat);
  EXPECT_THAT(std::string(node_.answer(second)->status.message()), ::testing::HasSubstr("g0"));
}

TEST_F(NodeStateGradient, OfAnotherStepIsRefused) {
  EXPECT_EQ(node_.ErrorOf(node_.Gradient(sessions_[0], 0, 0)), ErrorId::kStep);
  EXPECT_EQ(node_.ErrorOf(node_.Gradient(sessions_[0], 0, 2)), ErrorId::kStep);
}

TEST_F(NodeStateGradient, AfterItsRanksStepIsRefused) {
  node_.Step(sessions_[0], 1);
  EXPECT_EQ(node_.ErrorOf(node_.Gradient(sessions_[0], 0, 1)), ErrorId::kStep);
}

TEST_F(NodeStateGradient, NotFiniteIsNamedAndRefusesTheStepOfEveryRank) {
  const uint64_t bad = node_.Gradient(sessions_[1], 2, 1, /*finite=*/false);
  node_.Gradient(sessions_[0], 2, 1);
  node_.Gradient(sessions_[2], 2, 1);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(bad), ErrorId::kNonfinite);
  const std::string message(node_.answer(bad)->status.message());
  EXPECT_THAT(message, ::testing::HasSubstr("rank 1"));
  EXPECT_THAT(message, ::testing::HasSubstr("group 2 (g2)"));
  EXPECT_THAT(message, ::testing::HasSubstr("step 1"));
  const uint64_t more = node_.Gradient(sessions_[1], 3, 1);
  EXPECT_EQ(node_.ErrorOf(more), ErrorId::kNone) << "discarded: the attempt has ended";
  EXPECT_THAT(StepAll(1),
              ElementsAre(ErrorId::kNonfinite, ErrorId::kNonfinite, ErrorId::kNonfinite));
  EXPECT_EQ(node_.model().committed_step(1), 0U);
  EXPECT_TRUE(node_.Logged<UpdateBlock>().empty());
}

TEST_F(NodeStateGradient, AStepThatWasNotFiniteCanBeRepeated) {
  node_.Gradient(sessions_[1], 2, 1, /*finite=*/false);
  node_.Gradient(sessions_[0], 2, 1);
  node_.Gradient(sessions_[2], 2, 1);
  node_.RunTasks();
  // Rank 0 has received the error, and repeats its gradient before rank 2 delivers in its first attempt.
  EXPECT_EQ(node_.ErrorOf(node_.Step(sessions_[0], 1)), ErrorId::kNonfinite);
  const uint64_t repeated = node_.Gradient(sessions_[0], 1, 1);
  const uint64_t stale = node_.Gradient(sessions_[2], 3, 1);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(stale), ErrorId::kNone) << "discarded";
  EXPECT_EQ(node_.ErrorOf(node_.Step(sessions_[1], 1)), ErrorId::kNonfinite);
  EXPECT_EQ(node_.ErrorOf(node_.Step(sessions_[2], 1)), ErrorId::kNonfinite);
  node_.Gradient(sessions_[2], 1, 1);
  node_.Gradient(sessions_[1], 1, 1);
  EXPECT_THAT(StepAll(1), ElementsAre(ErrorId::kNone, ErrorId::kNone, ErrorId::kNone));
  EXPECT_EQ(node_.ErrorOf(repeated), ErrorId::kNone);
  EXPECT_THAT(AddedRanks(1), ElementsAre(0, 1, 2));
  EXPECT_THAT(AddedRanks(2), ElementsAre());
  EXPECT_THAT(AddedRanks(3), ElementsAre()) << "a gradient of the first attempt";
}

TEST_F(NodeStateGradient, NotFiniteAfterTheLastStepCallRefusesIt) {
  node_.Gradient(sessions_[2], 0, 1, /*finite=*/false);  // waits for ranks 0 and 1
  std::vector<uint64_t> tags;
  for (const uint64_t session : sessions_) tags.push_back(node_.Step(session, 1));
  node_.RunTasks();
  for (const uint64_t tag : tags) EXPECT_EQ(node_.ErrorOf(tag), ErrorId::kNonfinite);
  EXPECT_EQ(node_.model().committed_step(1), 0U);
  for (const uint64_t session : sessions_) node_.Gradient(session, 0, 1);
  EXPECT_THAT(StepAll(1), ElementsAre(ErrorId::kNone, ErrorId::kNone, ErrorId::kNone));
}

TEST_F(NodeStateGradient, ASumThatIsNotFiniteRefusesTheStep) {
  for (const uint64_t session : sessions_) node_.Gradient(session, 0, 1);
  const std::vector<AddGradients> adds = node_.Running<AddGradients>();
  ASSERT_EQ(adds.size(), 1U);
  TaskDone done = node_.model().Finish(adds[0].task);
  done.squares.AddChunk(std::numeric_limits<double>::infinity());
  node_.Send(done);
  EXPECT_THAT(StepAll(1),
              ElementsAre(ErrorId::kNonfinite, ErrorId::kNonfinite, ErrorId::kNonfinite));
}

TEST_F(NodeStateGradient, APassOverAllRanksBringsTheSquaresWithIt) {
  for (const uint64_t session : sessions_) node_.Gradient(session, 0, 1);
  EXPECT_THAT(StepAll(1), ElementsAre(ErrorId::kNone, ErrorId::kNone, ErrorId::kNone));
  EXPECT_THAT(node_.Logged<SumGradient>(), ::testing::IsEmpty());
}

TEST_F(NodeStateGradient, ARangeWithoutTheLastRankIsSummedWhenThatRankCallsStep) {
  node_.Gradient(sessions_[0], 0, 1);
  // Both gradients are added, because rank 0 has only one free piece.
  node_.Gradient(sessions_[0], 1, 1);
  node_.RunTasks();
  EXPECT_THAT(node_.Logged<SumGradient>(), ::testing::IsEmpty());
  std::vector<uint64_t> tags;
  for (const uint64_t session : sessions_) tags.push_back(node_.Step(session, 1));
  ASSERT_EQ(node_.Running<SumGradient>().size(), 2U);
  TaskDone done = node_.model().Finish(node_.Running<SumGradient>()[0].task);
  done.squares.AddChunk(std::numeric_limits<double>::infinity());
  node_.Send(done);
  for (const uint64_t tag : tags) EXPECT_EQ(node_.ErrorOf(tag), ErrorId::kNonfinite);
  EXPECT_EQ(node_.model().committed_step(1), 0U);
}

// ----------------------------------------------------------------------------- ranges and presence

// A job of two ranks whose group has three parameters and three units. The middle parameter crosses both borders of units.
class NodeStatePresence : public ::testing::Test {
 protected:
  static constexpr uint64_t kUnit = protocol::kGradUnitElems;

  void SetUp() override {
    for (uint32_t rank = 0; rank < 2; ++rank) {
      sessions_.push_back(node_.Attach(layout_, {.rank = rank}));
    }
  }
  void TearDown() override { EXPECT_EQ(node_.fault(), ""); }

  std::vector<ErrorId> StepBoth(uint64_t step) {
    std::vector<uint64_t> tags;
    for (const uint64_t session : sessions_) tags.push_back(node_.Step(session, step));
    node_.RunTasks();
    return {node_.ErrorOf(tags[0]), node_.ErrorOf(tags[1])};
  }
  // Returns t of each parameter that the newest step has updated.
  std::map<uint32_t, uint64_t> Updated(uint64_t step) const {
    std::map<uint32_t, uint64_t> updated;
    for (const UpdateBlock& update : node_.Logged<UpdateBlock>()) {
      if (update.identity_after.written_step != step) continue;
      for (const UpdateSegment& segment : update.segments) {
        updated[segment.param] = node_.UpdateCount(segment);
      }
    }
    return updated;
  }

  std::shared_ptr<const protocol::Layout> layout_ =
      MakeLayoutOfParams(std::vector<std::vector<uint64_t>>{{1000, 2 * kUnit, 500}, {100}});
  uint64_t end_ = layout_->groups()[0].elems;
  NodeHarness node_{RoomyOptions()};
  std::vector<uint64_t> sessions_;
};

using ::testing::Pair;

TEST_F(NodeStatePresence, AParameterMovesWhereAnyRankHasAGradientOfIt) {
  // All of parameter 0 and the begin of parameter 1.
  node_.GradientRange(sessions_[0], 0, 0, kUnit, 1);
  EXPECT_THAT(StepBoth(1), ElementsAre(ErrorId::kNone, ErrorId::kNone));
  EXPECT_THAT(Updated(1), ElementsAre(Pair(0, 1)));
  // Parameter 2 and the end of parameter 1.
  node_.GradientRange(sessions_[1], 0, 2 * kUnit, end_, 2);
  EXPECT_THAT(StepBoth(2), ElementsAre(ErrorId::kNone, ErrorId::kNone));
  EXPECT_THAT(Updated(2), ElementsAre(Pair(2, 1)));
  node_.Gradient(sessions_[0], 0, 3);
  EXPECT_THAT(StepBoth(3), ElementsAre(ErrorId::kNone, ErrorId::kNone));
  EXPECT_THAT(Updated(3), ElementsAre(Pair(0, 2), Pair(1, 1), Pair(2, 2)))
      << "t stands still while a parameter has no gradient";
}

TEST_F(NodeStatePresence, BlocksWithoutAGradientAreNotWritten) {
  node_.GradientRange(sessions_[0], 0, 0, kUnit, 1);
  EXPECT_THAT(StepBoth(1), ElementsAre(ErrorId::kNone, ErrorId::kNone));
  for (const auto& [block, step] : node_.model().WrittenSteps(1)) EXPECT_LE(step, 1U);
  for (const UpdateBlock& update : node_.Logged<UpdateBlock>()) {
    EXPECT_FALSE(update.segments.empty());
  }
}

TEST_F(NodeStatePresence, AParameterInPartIsAnErrorByNameAndCanBeCompleted) {
  node_.GradientRange(sessions_[0], 0, 0, 2 * kUnit, 1);
  node_.SetPresent(sessions_[0], 1, true);
  const uint64_t tag = node_.Step(sessions_[0], 1);
  EXPECT_EQ(node_.ErrorOf(tag), ErrorId::kGradPartial);
  EXPECT_THAT(
      std::string(node_.answer(tag)->status.message()),
      ::testing::AllOf(::testing::HasSubstr("p1"), ::testing::HasSubstr("7192 of the 8192")));
  node_.GradientRange(sessions_[0], 0, 2 * kUnit, end_, 1);
  EXPECT_THAT(StepBoth(1), ElementsAre(ErrorId::kNone, ErrorId::kNone));
  EXPECT_THAT(Updated(1), ElementsAre(Pair(0, 1), Pair(1, 1), Pair(2, 1)));
}

TEST_F(NodeStatePresence, RanksMayCutAGroupDifferently) {
  node_.GradientRange(sessions_[0], 0, 0, 2 * kUnit, 1);
  node_.GradientRange(sessions_[1], 0, kUnit, end_, 1);
  node_.GradientRange(sessions_[1], 0, 0, kUnit, 1);
  node_.SetPresent(sessions_[1], 1, true);
  node_.GradientRange(sessions_[0], 0, 2 * kUnit, end_, 1);
  node_.SetPresent(sessions_[0], 1, true);
  node_.SetPresent(sessions_[1], 2, true);
  EXPECT_THAT(StepBoth(1), ElementsAre(ErrorId::kNone, ErrorId::kNone));
  for (uint32_t param = 0; param < 3; ++param) {
    EXPECT_THAT(Ranks(node_.model().committed_gradients(1).at(param)), ElementsAre(0, 1)) << param;
  }
}

TEST_F(NodeStatePresence, RangesAreChecked) {
  const auto refused = [this](uint64_t begin, uint64_t bytes) {
    protocol::Command command{};
    command.op = static_cast<uint16_t>(protocol::Op::kGradReady);
    command.step = 1;
    command.element_offset = begin;
    command.length_bytes = bytes;
    return node_.ErrorOf(node_.Command(sessions_[0], command));
  };
  for (const auto& [begin, bytes] :
       std::vector<std::pair<uint64_t, uint64_t>>{{64, 4 * kUnit},     // begins within a unit
                                                  {0, 4 * kUnit - 4},  // ends within one
                                                  {0, 0},              // nothing
                                                  {0, 4 * end_ + 4},   // past the end
                                                  {kUnit, 4 * end_},   // likewise
                                                  {end_, 4 * kUnit},   // begins there
                                                  {UINT64_MAX - 4095, 4 * kUnit},
                                                  {0, UINT64_MAX - 3}}) {
    EXPECT_EQ(refused(begin, bytes), ErrorId::kRange) << begin << " " << bytes;
  }
  node_.GradientRange(sessions_[0], 0, kUnit, 2 * kUnit, 1);
  EXPECT_EQ(node_.ErrorOf(node_.Gradient(sessions_[0], 0, 1)), ErrorId::kGradRepeat)
      << "a unit of it was delivered";
}

// ----------------------------------------------------------------------------------------- attempts

TEST_F(NodeStatePresence, TheNewestAttemptCountsAndOlderDeliveriesAreDiscarded) {
  node_.Gradient(sessions_[0], 0, 1);
  node_.Gradient(sessions_[1], 0, 1);
  node_.SetAttempt(sessions_[0], 1);
  node_.Gradient(sessions_[0], 1, 1);  // Rank 0 has dropped a batch.
  const uint64_t stale = node_.Gradient(sessions_[1], 1, 1);
  EXPECT_EQ(node_.ErrorOf(stale), ErrorId::kNone) << "discarded";
  const uint64_t waits = node_.Step(sessions_[0], 1);
  const uint64_t dropped = node_.Step(sessions_[1], 1);
  EXPECT_EQ(node_.ErrorOf(dropped), ErrorId::kGradDropped);
  EXPECT_EQ(node_.answer(dropped)->completion.attempt, 1U) << "brings the rank to the newest";
  EXPECT_EQ(node_.answer(waits), nullptr);
  node_.Gradient(sessions_[1], 1, 1);
  const uint64_t last = node_.Step(sessions_[1], 1);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(waits), ErrorId::kNone);
  EXPECT_EQ(node_.ErrorOf(last), ErrorId::kNone);
  EXPECT_THAT(Updated(1), ElementsAre(Pair(3, 1))) << "group 0 was of the older attempt";
  // Attempts count from 0 again in the next step.
  node_.Gradient(sessions_[0], 0, 2);
  EXPECT_THAT(StepBoth(2), ElementsAre(ErrorId::kNone, ErrorId::kNone));
}

TEST_F(NodeStatePresence, ARankThatWaitsInStepLearnsOfANewAttempt) {
  node_.Gradient(sessions_[0], 0, 1);
  const uint64_t waits = node_.Step(sessions_[0], 1);
  node_.Gradient(sessions_[1], 0, 1);
  node_.SetAttempt(sessions_[1], 1);
  const uint64_t anew = node_.Step(sessions_[1], 1);
  EXPECT_EQ(node_.ErrorOf(waits), ErrorId::kGradDropped);
  EXPECT_EQ(node_.answer(anew), nullptr);
  node_.Gradient(sessions_[0], 1, 1);
  const uint64_t again = node_.Step(sessions_[0], 1);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(again), ErrorId::kNone);
  EXPECT_EQ(node_.ErrorOf(anew), ErrorId::kNone);
}

TEST_F(NodeStatePresence, RanksThatAllDropSeeNoError) {
  for (const uint64_t session : sessions_) node_.Gradient(session, 0, 1);
  for (const uint64_t session : sessions_) node_.SetAttempt(session, 1);
  for (const uint64_t session : sessions_) node_.Gradient(session, 1, 1);
  EXPECT_THAT(StepBoth(1), ElementsAre(ErrorId::kNone, ErrorId::kNone));
  EXPECT_THAT(Updated(1), ElementsAre(Pair(3, 1)));
}

TEST_F(NodeStatePresence, NothingIsAddedWhileTasksOfAnOlderAttemptRun) {
  for (const uint64_t session : sessions_) node_.Gradient(session, 0, 1);
  ASSERT_EQ(node_.Running<AddGradients>().size(), 1U);
  for (const uint64_t session : sessions_) node_.SetAttempt(session, 1);
  for (const uint64_t session : sessions_) node_.Gradient(session, 0, 1);
  EXPECT_EQ(node_.Running<AddGradients>().size(), 1U) << "it writes to the same bytes";
  EXPECT_THAT(StepBoth(1), ElementsAre(ErrorId::kNone, ErrorId::kNone));
  for (const GradientToken& token : node_.model().committed_gradients(1).at(0)) {
    EXPECT_EQ(token.attempt, 1U);
  }
}

TEST_F(NodeStatePresence, AnAttemptFarAheadIsRefused) {
  node_.SetAttempt(sessions_[0], 2);
  EXPECT_EQ(node_.ErrorOf(node_.Gradient(sessions_[0], 0, 1)), ErrorId::kProtocol);
  EXPECT_EQ(node_.ErrorOf(node_.Step(sessions_[0], 1)), ErrorId::kProtocol);
  node_.SetAttempt(sessions_[0], UINT64_MAX);
  EXPECT_EQ(node_.ErrorOf(node_.Step(sessions_[0], 1)), ErrorId::kProtocol);
}

}  // namespace
}  // namespace forebay::daemon::node_state_gradient_test
