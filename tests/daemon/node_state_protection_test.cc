// SPDX-License-Identifier: Apache-2.0
// Goal    The daemon trusts no value that a client writes into its ring: no op, kind, group, range, length or lease. The range
//         check and the fence are both needed: if one of them is switched off, a fault shows.
// Method  Wild values for every field of a command. The harness's model reports a fault if an action names bytes outside an
//         arena, and records the contributions to each gradient sum.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "daemon/core/base/limits.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/node_harness.h"

namespace forebay::daemon::node_state_protection_test {
namespace {

using ::forebay::testing::MakeLayout;
using ::forebay::testing::NodeHarness;
using ::forebay::testing::RoomyOptions;
using protocol::Command;
using protocol::ErrorId;
using protocol::Op;
using ::testing::HasSubstr;

class NodeStateProtection : public ::testing::Test {
 protected:
  void SetUp() override { session_ = node_.Attach(layout_, {}); }
  void TearDown() override { EXPECT_EQ(node_.fault(), ""); }

  ErrorId ErrorFor(const Command& command) {
    const ErrorId error = node_.ErrorOf(node_.Command(session_, command));
    EXPECT_FALSE(node_.is_closed(session_)) << "a bad command does not end the session";
    return error;
  }
  Command Gradient() const {
    Command command{};
    command.op = static_cast<uint16_t>(Op::kGradReady);
    command.step = 1;
    command.length_bytes = layout_->partition_bytes(0);
    return command;
  }

  std::shared_ptr<const protocol::Layout> layout_ = MakeLayout({200, 100});
  NodeHarness node_{RoomyOptions(), 1};
  uint64_t session_ = 0;
};

TEST_F(NodeStateProtection, UnknownOpsAndKindsAreRefused) {
  for (const int op : {0, 15, 0xffff}) {
    Command command = Gradient();
    command.op = static_cast<uint16_t>(op);
    EXPECT_EQ(ErrorFor(command), ErrorId::kProtocol) << op;
  }
  for (const Op op : {Op::kFetch, Op::kStep, Op::kDecide}) {
    for (const int kind : {2, 0xffff}) {
      Command command{};
      command.op = static_cast<uint16_t>(op);
      command.kind = static_cast<uint16_t>(kind);
      EXPECT_EQ(ErrorFor(command), ErrorId::kProtocol) << kind;
    }
  }
  Command command{};
  command.op = static_cast<uint16_t>(Op::kFetch);
  command.attempt = 1;
  EXPECT_EQ(ErrorFor(command), ErrorId::kProtocol);
}

TEST_F(NodeStateProtection, GroupsThatAreNotThereAreRefused) {
  for (const Op op : {Op::kFetch, Op::kGradReady, Op::kReadState, Op::kWriteInitial,
                      Op::kWriteState, Op::kWriteUpdates}) {
    for (const uint32_t group : {2U, UINT32_MAX}) {
      Command command = Gradient();
      command.op = static_cast<uint16_t>(op);
      command.partition = group;
      EXPECT_EQ(ErrorFor(command), ErrorId::kRange);
    }
  }
}

TEST_F(NodeStateProtection, RangesAreCheckedWithoutOverflow) {
  // Bytes of group 0 in whole cache lines.
  const uint64_t room = layout_->largest_gradient_bytes();
  const uint64_t arena = 4 * room;
  const uint64_t length = layout_->partition_bytes(0);
  for (const uint64_t offset :
       {arena, arena - room + 64, UINT64_MAX - 63, uint64_t{0} - room, uint64_t{1} << 63}) {
    Command command = Gradient();
    command.arena_offset_bytes = offset;
    EXPECT_EQ(ErrorFor(command), ErrorId::kRange) << offset;
  }
  for (const uint64_t offset : {1U, 8U, 63U, 65U}) {
    Command command = Gradient();
    command.arena_offset_bytes = offset;
    EXPECT_EQ(ErrorFor(command), ErrorId::kRange) << offset << " is not aligned";
  }
  for (const uint64_t bad : {uint64_t{0}, length - 4, length + 4, UINT64_MAX}) {
    Command command = Gradient();
    command.length_bytes = bad;
    EXPECT_EQ(ErrorFor(command), ErrorId::kRange) << bad;
  }
  Command last = Gradient();
  last.arena_offset_bytes = arena - room;
  node_.model().PutGradient(session_, last.arena_offset_bytes,
                            {.session = session_, .rank = 0, .partition = 0, .step = 1});
  const uint64_t tag = node_.Command(session_, last);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(tag), ErrorId::kNone) << "the last one that fits";
}

TEST_F(NodeStateProtection, AStepRequestLiesInTheStepRegion) {
  const AnswerAttach& attach = *node_.attached(session_);
  Command command{};
  command.op = static_cast<uint16_t>(Op::kStep);
  command.step = 1;
  for (const uint64_t offset :
       {uint64_t{0}, attach.step_region_offset - 64, attach.grad_arena_bytes,
        attach.grad_arena_bytes - 64, UINT64_MAX - 63}) {
    command.arena_offset_bytes = offset;
    command.length_bytes = sizeof(protocol::StepRequest) + sizeof(protocol::HyperParams);
    EXPECT_EQ(ErrorFor(command), ErrorId::kRange) << offset;
  }
  command.arena_offset_bytes = attach.step_region_offset;
  for (const uint64_t length : {uint64_t{0}, uint64_t{31}, UINT64_MAX}) {
    command.length_bytes = length;
    EXPECT_EQ(ErrorFor(command), ErrorId::kRange) << length;
  }
  EXPECT_TRUE(node_.Logged<CopyStepRequest>().empty());
}

TEST_F(NodeStateProtection, ReadsOfStatesStayInTheirParameter) {
  Command good{};
  good.op = static_cast<uint16_t>(Op::kReadState);
  good.length_bytes = 40;
  const uint64_t elems = layout_->params()[0].elems;
  const auto refused = [&](uint16_t state, uint64_t element, uint64_t length) {
    Command command = good;
    command.kind = state;
    command.element_offset = element;
    command.length_bytes = length;
    return ErrorFor(command);
  };
  EXPECT_EQ(refused(3, 0, 40), ErrorId::kRange) << "a master and two moments";
  EXPECT_EQ(refused(0, elems, 4), ErrorId::kRange);
  EXPECT_EQ(refused(0, elems - 1, 8), ErrorId::kRange);
  EXPECT_EQ(refused(0, UINT64_MAX, 4), ErrorId::kRange);
  EXPECT_EQ(refused(0, 1, 0), ErrorId::kRange) << "none, and not from the first on";
  EXPECT_EQ(refused(0, 0, 0), ErrorId::kNone) << "how many updates it has had";
  EXPECT_EQ(refused(0, 0, 6), ErrorId::kRange) << "not whole elements";
  EXPECT_EQ(refused(0, 0, UINT64_MAX - 3), ErrorId::kRange);
  Command other = good;
  other.partition = 2;
  EXPECT_EQ(ErrorFor(other), ErrorId::kRange) << "two parameters";
  good.element_offset = elems - 10;
  const uint64_t tag = node_.Command(session_, good);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(tag), ErrorId::kNone);
}

TEST_F(NodeStateProtection, ALeaseIsReleasedOnceAndByItsOwner) {
  const uint64_t other = node_.Attach(layout_, {.job = "other"});
  const uint64_t fetch = node_.Fetch(session_, 0);
  const uint64_t lease = node_.answer(fetch)->completion.lease_id;
  EXPECT_EQ(node_.ErrorOf(node_.Release(other, lease)), ErrorId::kLease);
  EXPECT_EQ(node_.ErrorOf(node_.Release(session_, lease + 1)), ErrorId::kLease);
  EXPECT_EQ(node_.ErrorOf(node_.Release(session_, lease)), ErrorId::kNone);
  EXPECT_EQ(node_.ErrorOf(node_.Release(session_, lease)), ErrorId::kLease);
}

TEST_F(NodeStateProtection, LeasesOfASessionAreLimitedAndEndWithIt) {
  for (uint32_t i = 0; i < kLeasesPerSessionMax; ++i) {
    ASSERT_EQ(node_.ErrorOf(node_.Fetch(session_, 0)), ErrorId::kNone);
  }
  EXPECT_EQ(node_.ErrorOf(node_.Fetch(session_, 0)), ErrorId::kLimit);
  EXPECT_EQ(node_.FindJob("job")->leases, kLeasesPerSessionMax);
  node_.End(session_, EndCause::kLost);
  EXPECT_EQ(node_.FindJob("job")->leases, 0U);
}

TEST(NodeStateProtectionLimits, CommandsInFlightAreLimited) {
  const auto layout = MakeLayout({100});
  NodeHarness node(RoomyOptions(), 2);
  const uint64_t session = node.Attach(layout, {.rank = 0});
  node.Attach(layout, {.rank = 1});
  node.Step(session, 1);  // The step waits for rank 1, and the fetches wait for the step.
  for (uint32_t i = 1; i < protocol::kRingEntries; ++i) {
    EXPECT_EQ(node.answer(node.Fetch(session, 0)), nullptr);
  }
  EXPECT_EQ(node.ErrorOf(node.Fetch(session, 0)), ErrorId::kLimit);
}

// The gradient of a killed rank's last session arrives late, after its successor has attached.
std::string FaultOfALateGradient(bool fence) {
  const auto layout = MakeLayout({100, 100});
  NodeState::Options options = RoomyOptions();
  options.disable_fence_for_test = !fence;
  NodeHarness node(options);
  // The gradient arenas have two pieces: gradients that arrive in order are added at once.
  const uint64_t arena_bytes = 2 * layout->largest_gradient_bytes();
  const uint64_t old_first = node.Attach(layout, {.rank = 0, .grad_arena_bytes = arena_bytes});
  const uint64_t old_second = node.Attach(layout, {.rank = 1, .grad_arena_bytes = arena_bytes});
  node.End(old_second, EndCause::kLost);  // The generation ends before rank 0 notices.
  const uint64_t second = node.Attach(layout, {.rank = 1, .grad_arena_bytes = arena_bytes});
  node.Gradient(old_first, 0, 1);
  node.RunTasks();
  const uint64_t first = node.Attach(layout, {.rank = 0, .grad_arena_bytes = arena_bytes});
  for (const uint64_t session : {first, second}) node.Gradient(session, 1, 1);
  node.Gradient(second, 0, 1);
  node.RunTasks();
  node.Step(first, 1);
  node.Step(second, 1);
  node.RunTasks();
  for (const auto& [group, tokens] : node.model().committed_gradients(1)) {
    for (const ::forebay::testing::GradientToken& token : tokens) {
      if (token.session == old_first) return "a gradient of a dropped generation was used";
    }
  }
  return node.FindJob("job")->committed_step == 1 ? "" : "the step was not committed";
}

TEST(NodeStateFence, KeepsLateGradientsOutAndIsNeededForIt) {
  EXPECT_EQ(FaultOfALateGradient(/*fence=*/true), "");
  EXPECT_EQ(FaultOfALateGradient(/*fence=*/false), "a gradient of a dropped generation was used");
}

std::string FaultOfAWildOffset(bool range_check) {
  const auto layout = MakeLayout({100});
  NodeState::Options options = RoomyOptions();
  options.disable_range_check_for_test = !range_check;
  NodeHarness node(options, 1);
  const uint64_t session = node.Attach(layout, {});
  Command command{};
  command.op = static_cast<uint16_t>(Op::kGradReady);
  command.step = 1;
  command.length_bytes = layout->partition_bytes(0);
  command.arena_offset_bytes = uint64_t{1} << 40;
  node.Command(session, command);
  return node.fault();
}

TEST(NodeStateRangeCheck, KeepsWildOffsetsOutAndIsNeededForIt) {
  EXPECT_EQ(FaultOfAWildOffset(/*range_check=*/true), "");
  EXPECT_THAT(FaultOfAWildOffset(/*range_check=*/false), HasSubstr("outside grad"));
}

}  // namespace
}  // namespace forebay::daemon::node_state_protection_test
