// Goal    Contributions of all ranks are added in rank order whatever their order of arrival;
//         opposite orders end in
//         E_GRAD_ORDER and never in a hang; what is not finite never reaches a committed step.
// Method  The harness runs the state machine; a model of the workers keeps, for each accumulator,
//         the list of what
//         was added to it. Each test chooses which tasks end and when.

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/node_harness.h"

namespace forebay::daemon {
namespace {

using ::forebay::testing::GradientToken;
using ::forebay::testing::MakeLayout;
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
    // Room for three groups: two may wait while one more is written.
    for (uint32_t rank = 0; rank < kWorld; ++rank) {
      sessions_.push_back(node_.Attach(
          layout_, {.rank = rank, .grad_arena_bytes = 3 * layout_->largest_group_bytes()}));
    }
  }
  void TearDown() override { EXPECT_EQ(node_.fault(), ""); }

  std::vector<ErrorId> StepAll(uint64_t step) {
    std::vector<uint64_t> tags;
    for (const uint64_t session : sessions_) tags.push_back(node_.Step(session, step));
    node_.RunTasks();
    std::vector<ErrorId> errors;
    for (const uint64_t tag : tags) errors.push_back(node_.ErrorOf(tag));
    return errors;
  }
  std::vector<uint32_t> AddedRanks(uint32_t group) {
    const auto& gradients = node_.model().committed_gradients(1);
    const auto it = gradients.find(group);
    return it == gradients.end() ? std::vector<uint32_t>() : Ranks(it->second);
  }

  std::shared_ptr<const protocol::Layout> layout_ = MakeLayout(kWorld, {150, 192, 100, 192});
  NodeHarness node_{RoomyOptions()};
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

TEST_F(NodeStateGradient, TheFirstAssignsAndTheOthersAdd) {
  for (const uint32_t rank : {2U, 0U, 1U}) node_.Gradient(sessions_[rank], 0, 1);
  node_.RunTasks();
  const std::vector<AddGradient> adds = node_.Logged<AddGradient>();
  ASSERT_EQ(adds.size(), 3U);
  EXPECT_TRUE(adds[0].assign);
  EXPECT_FALSE(adds[1].assign);
  EXPECT_FALSE(adds[2].assign);
  EXPECT_EQ(adds[0].elems, layout_->groups()[0].padded_elems);
}

TEST_F(NodeStateGradient, OfOneGroupAreAddedOneAtATime) {
  for (uint32_t rank = 0; rank < kWorld; ++rank) node_.Gradient(sessions_[rank], 0, 1);
  EXPECT_EQ(node_.Running<AddGradient>().size(), 1U);
  node_.Gradient(sessions_[0], 1, 1);
  EXPECT_EQ(node_.Running<AddGradient>().size(), 2U) << "groups do not wait for each other";
}

TEST_F(NodeStateGradient, AreAnsweredWhenTheirBytesAreFree) {
  const uint64_t late = node_.Gradient(sessions_[1], 0, 1);
  node_.RunTasks();
  EXPECT_EQ(node_.answer(late), nullptr) << "rank 0 comes first";
  const uint64_t first = node_.Gradient(sessions_[0], 0, 1);
  EXPECT_EQ(node_.answer(first), nullptr);
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
  EXPECT_EQ(node_.Running<CopyToStepArena>()[0].bytes, layout_->group_bytes(0));
}

TEST_F(NodeStateGradient, AreTheSameInOppositeOrdersWhileTheOverflowLasts) {
  for (uint32_t group = 0; group < 4; ++group) {
    node_.Gradient(sessions_[0], group, 1);
    node_.Gradient(sessions_[1], 3 - group, 1);
    node_.Gradient(sessions_[2], group, 1);
    node_.RunTasks();
  }
  ASSERT_THAT(StepAll(1), ElementsAre(ErrorId::kNone, ErrorId::kNone, ErrorId::kNone));
  for (uint32_t group = 0; group < 4; ++group) {
    EXPECT_THAT(AddedRanks(group), ElementsAre(0, 1, 2)) << group;
  }
}

TEST_F(NodeStateGradient, OfTheLastRankMayAllComeFirst) {
  // Rank 2 delivers everything before the others have begun: two held, two in the overflow.
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

TEST(NodeStateGradientOrder, EndsInAnErrorWhenTheOverflowIsFull) {
  const auto layout = MakeLayout(2, std::vector<uint64_t>(10, 128));
  NodeHarness node(RoomyOptions());
  std::vector<uint64_t> sessions;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    sessions.push_back(
        node.Attach(layout, {.rank = rank, .grad_arena_bytes = 2 * layout->largest_group_bytes()}));
  }
  std::vector<uint64_t> tags;
  for (uint32_t group = 0; group < 5; ++group) {
    node.Gradient(sessions[0], group, 1);
    node.RunTasks();
    tags.push_back(node.Gradient(sessions[1], 9 - group, 1));
    node.RunTasks();
    if (node.ErrorOf(tags.back()) == ErrorId::kGradOrder) break;
  }
  // One stays in the arena of two, two go to the overflow (one per rank), the fourth is refused.
  ASSERT_EQ(tags.size(), 4U);
  EXPECT_EQ(node.ErrorOf(tags[3]), ErrorId::kGradOrder);
  EXPECT_THAT(std::string(node.answer(tags[3])->status.message()),
              ::testing::AllOf(::testing::HasSubstr("rank 1"), ::testing::HasSubstr("rank 0"),
                               ::testing::HasSubstr("group 6"), ::testing::HasSubstr("group 0")));
  // It was not taken: the rank may deliver the group once there is room.
  for (uint32_t group = 4; group < 10; ++group) {
    node.Gradient(sessions[0], group, 1);
    node.RunTasks();
  }
  EXPECT_EQ(node.ErrorOf(tags[0]), ErrorId::kNone);
  const uint64_t again = node.Gradient(sessions[1], 6, 1);
  node.RunTasks();
  EXPECT_EQ(node.ErrorOf(again), ErrorId::kNone);
  EXPECT_EQ(node.fault(), "");
}

TEST(NodeStateGradientOrder, WaitsWithoutErrorWhereTheRanksAgree) {
  const auto layout = MakeLayout(2, std::vector<uint64_t>(8, 128));
  NodeHarness node(RoomyOptions());
  std::vector<uint64_t> sessions;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    sessions.push_back(
        node.Attach(layout, {.rank = rank, .grad_arena_bytes = 2 * layout->largest_group_bytes()}));
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
    for (const uint64_t tag : tags) EXPECT_NE(node.ErrorOf(tag), ErrorId::kGradOrder);
  }
  for (const uint64_t tag : tags) EXPECT_EQ(node.ErrorOf(tag), ErrorId::kNone);
  EXPECT_EQ(node.fault(), "");
}

TEST(NodeStateGradientOrder, ARankThatCallsStepIsNotWaitedFor) {
  // Rank 0 never uses group 0. Rank 1's arena is full of what waits for it; it must still reach its
  // own step.
  const auto layout = MakeLayout(2, std::vector<uint64_t>(6, 128));
  NodeHarness node(RoomyOptions());
  std::vector<uint64_t> sessions;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    sessions.push_back(
        node.Attach(layout, {.rank = rank, .grad_arena_bytes = 2 * layout->largest_group_bytes()}));
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

TEST_F(NodeStateGradient, OfKindReducedIsRefusedByName) {
  protocol::Command command{};
  command.op = static_cast<uint16_t>(protocol::Op::kGradReady);
  command.kind = static_cast<uint16_t>(protocol::GradKind::kReduced);
  command.step = 1;
  command.length_bytes = layout_->group_bytes(0);
  const uint64_t tag = node_.Command(sessions_[0], command);
  EXPECT_EQ(node_.ErrorOf(tag), ErrorId::kUnsupported);
  EXPECT_THAT(std::string(node_.answer(tag)->status.message()), ::testing::HasSubstr("reduced"));
}

TEST_F(NodeStateGradient, NotFiniteIsNamedAndRefusesTheStepOfEveryRank) {
  const uint64_t bad = node_.Gradient(sessions_[1], 2, 1, /*finite=*/false);
  node_.Gradient(sessions_[0], 2, 1);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(bad), ErrorId::kNonfinite);
  const std::string message(node_.answer(bad)->status.message());
  EXPECT_THAT(message, ::testing::HasSubstr("rank 1"));
  EXPECT_THAT(message, ::testing::HasSubstr("group 2 (g2)"));
  EXPECT_THAT(message, ::testing::HasSubstr("step 1"));
  // It may not be delivered again in this attempt.
  EXPECT_EQ(node_.ErrorOf(node_.Gradient(sessions_[1], 2, 1)), ErrorId::kGradRepeat);
  EXPECT_THAT(StepAll(1),
              ElementsAre(ErrorId::kNonfinite, ErrorId::kNonfinite, ErrorId::kNonfinite));
  EXPECT_EQ(node_.model().committed_step(1), 0U);
  EXPECT_TRUE(node_.Logged<UpdateBlock>().empty());
}

TEST_F(NodeStateGradient, AStepThatWasNotFiniteCanBeRepeated) {
  node_.Gradient(sessions_[1], 2, 1, /*finite=*/false);
  node_.Gradient(sessions_[0], 2, 1);
  node_.RunTasks();
  // Rank 0 has seen the error and is quicker with its repetition than rank 2 with its first
  // attempt.
  EXPECT_EQ(node_.ErrorOf(node_.Step(sessions_[0], 1)), ErrorId::kNonfinite);
  const uint64_t repeated = node_.Gradient(sessions_[0], 1, 1);
  const uint64_t stale = node_.Gradient(sessions_[2], 3, 1);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(stale), ErrorId::kNone) << "taken and dropped";
  EXPECT_EQ(node_.ErrorOf(repeated), ErrorId::kTimeout) << "waits for the others to see it";
  EXPECT_EQ(node_.ErrorOf(node_.Step(sessions_[1], 1)), ErrorId::kNonfinite);
  EXPECT_EQ(node_.ErrorOf(node_.Step(sessions_[2], 1)), ErrorId::kNonfinite);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(repeated), ErrorId::kNone);
  node_.Gradient(sessions_[2], 1, 1);
  node_.Gradient(sessions_[1], 1, 1);
  EXPECT_THAT(StepAll(1), ElementsAre(ErrorId::kNone, ErrorId::kNone, ErrorId::kNone));
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
  node_.FinishAll<AddGradient>();
  node_.FinishAll<AddGradient>();
  const std::vector<AddGradient> last = node_.Running<AddGradient>();
  ASSERT_EQ(last.size(), 1U);
  TaskDone done = node_.model().Finish(last[0].task);
  done.sum_squares = std::numeric_limits<double>::infinity();
  node_.Send(done);
  EXPECT_THAT(StepAll(1),
              ElementsAre(ErrorId::kNonfinite, ErrorId::kNonfinite, ErrorId::kNonfinite));
}

TEST_F(NodeStateGradient, TheLastRanksAdditionCompletesItsGroup) {
  for (const uint64_t session : sessions_) node_.Gradient(session, 0, 1);
  EXPECT_THAT(StepAll(1), ElementsAre(ErrorId::kNone, ErrorId::kNone, ErrorId::kNone));
  std::vector<bool> completes;
  for (const AddGradient& add : node_.Logged<AddGradient>()) completes.push_back(add.completes);
  EXPECT_THAT(completes, ElementsAre(false, false, true));
  EXPECT_THAT(node_.Logged<SumGroup>(), ::testing::IsEmpty());
}

TEST_F(NodeStateGradient, AGroupWithoutTheLastRankIsSummedWhenThatRankCallsStep) {
  node_.Gradient(sessions_[0], 0, 1);
  node_.Gradient(sessions_[1], 0, 1);
  node_.RunTasks();
  EXPECT_THAT(node_.Logged<SumGroup>(), ::testing::IsEmpty());
  std::vector<uint64_t> tags;
  for (const uint64_t session : sessions_) tags.push_back(node_.Step(session, 1));
  ASSERT_EQ(node_.Running<SumGroup>().size(), 1U);
  TaskDone done = node_.model().Finish(node_.Running<SumGroup>()[0].task);
  done.sum_squares = std::numeric_limits<double>::infinity();
  node_.Send(done);
  for (const uint64_t tag : tags) EXPECT_EQ(node_.ErrorOf(tag), ErrorId::kNonfinite);
  EXPECT_EQ(node_.model().committed_step(1), 0U);
}

}  // namespace
}  // namespace forebay::daemon
