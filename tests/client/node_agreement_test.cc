// SPDX-License-Identifier: Apache-2.0
// Goal    Every rank concludes the same from the messages of all ranks. A step is committed if all nodes have prepared it
//         alike; otherwise every rank hears the error that another rank met. At attach all nodes come to one step, or an error
//         names both steps.
// Method  Messages of four ranks on two nodes are encoded and decoded.

#include "client/internal/node_agreement.h"

#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "tests/support/status_test.h"

namespace forebay::client::internal::node_agreement_test {
namespace {

using ::forebay::testing::HasError;
using protocol::ErrorId;
using protocol::MakeError;
using protocol::StepDecision;
using protocol::StepSummary;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Kind = NodeMessage::Kind;
using Todo = AttachOutcome::Todo;

constexpr uint64_t kStep = 7;

protocol::Layout MakeLayout() {
  protocol::LayoutSpec spec;
  spec.params = {{.name = "first", .shape = {8}}, {.name = "second", .shape = {8}}};
  spec.group_names = {"all"};
  return *protocol::Layout::Create(std::move(spec));
}

StepSummary SummaryOf(uint64_t squares) {
  StepSummary summary{
      .head = {.step = kStep, .params = 2, .scalars = 5}, .present = {3}, .lacking = {0}};
  summary.head.squares[4] = squares;
  return summary;
}

std::vector<std::byte> Encoded(const StepSummary& summary) {
  std::vector<std::byte> bytes(protocol::StepSummaryBytes(summary.head.params));
  protocol::EncodeStepSummary(summary, bytes);
  return bytes;
}

// Ranks of the test: two on each of two nodes.
struct World {
  NodeMessage messages[4];

  World(Kind kind, const StepSummary& first, const StepSummary& second) {
    for (uint32_t rank = 0; rank < 4; ++rank) {
      messages[rank] = {
          .kind = kind, .first_rank = rank / 2 * 2, .summary = Encoded(rank < 2 ? first : second)};
    }
  }
  std::vector<std::string> sent() const {
    std::vector<std::string> sent;
    for (const NodeMessage& message : messages) sent.push_back(EncodeNodeMessage(message));
    return sent;
  }
};

World Prepared() { return {Kind::kPrepared, SummaryOf(3), SummaryOf(4)}; }

TEST(NodeAgreement, AStepThatAllHavePreparedIsCommittedWithEachNodesPartOnce) {
  ASSERT_OK_AND_ASSIGN(const StepOutcome outcome,
                       DecideStep(Prepared().sent(), MakeLayout(), kStep));
  EXPECT_OK(outcome.error);
  EXPECT_EQ(outcome.summary.head.decision, StepDecision::kCommit);
  EXPECT_EQ(outcome.summary.head.squares[4], 7U);
}

TEST(NodeAgreement, ARefusedCallIsHeardByAllAndRepeated) {
  World world = Prepared();
  world.messages[2] = {.kind = Kind::kRefused,
                       .first_rank = 2,
                       .error = MakeError(ErrorId::kLease, "leases are held", "release them")};
  ASSERT_OK_AND_ASSIGN(const StepOutcome outcome, DecideStep(world.sent(), MakeLayout(), kStep));
  EXPECT_EQ(outcome.summary.head.decision, StepDecision::kRepeat);
  EXPECT_THAT(outcome.error, HasError(ErrorId::kLease));
  EXPECT_EQ(outcome.error.message(), "rank 2: leases are held");
  EXPECT_EQ(protocol::HintOf(outcome.error), "release them");
}

TEST(NodeAgreement, ACallThatAnotherRankHasWithdrawnIsNoReason) {
  World world = Prepared();
  const absl::Status withdrawn = MakeError(ErrorId::kStep, "rank 1 met an error");
  world.messages[0] = {.kind = Kind::kWithdrawn, .error = withdrawn};
  world.messages[1] = {.kind = Kind::kRefused, .error = MakeError(ErrorId::kLease, "leases")};
  world.messages[2] = {.kind = Kind::kWithdrawn, .first_rank = 2, .error = withdrawn};
  ASSERT_OK_AND_ASSIGN(const StepOutcome outcome, DecideStep(world.sent(), MakeLayout(), kStep));
  EXPECT_EQ(outcome.error.message(), "rank 1: leases");
  EXPECT_EQ(outcome.summary.head.decision, StepDecision::kRepeat);
}

TEST(NodeAgreement, GradientsThatAreLostAnywhereAreDroppedEverywhere) {
  World world = Prepared();
  world.messages[0] = {.kind = Kind::kRefused, .error = MakeError(ErrorId::kStep, "withdrawn")};
  world.messages[3] = {.kind = Kind::kLost, .error = MakeError(ErrorId::kNonfinite, "infinite")};
  ASSERT_OK_AND_ASSIGN(const StepOutcome outcome, DecideStep(world.sent(), MakeLayout(), kStep));
  EXPECT_EQ(outcome.summary.head.decision, StepDecision::kDrop);
}

TEST(NodeAgreement, OtherScalarsOnOneNodeAreNamedByRank) {
  World world = Prepared();
  StepSummary other = SummaryOf(4);
  other.head.scalars = 6;
  world.messages[2].summary = world.messages[3].summary = Encoded(other);
  ASSERT_OK_AND_ASSIGN(const StepOutcome outcome, DecideStep(world.sent(), MakeLayout(), kStep));
  EXPECT_EQ(outcome.summary.head.decision, StepDecision::kRepeat);
  EXPECT_THAT(outcome.error, HasError(ErrorId::kStep));
  EXPECT_THAT(std::string(outcome.error.message()), HasSubstr("ranks 0 and 2 called step 7"));
}

TEST(NodeAgreement, AParameterThatOneNodeLacksIsNamed) {
  World world = Prepared();
  StepSummary lacking = SummaryOf(4);
  lacking.present = {1};
  lacking.lacking = {2};
  world.messages[2].summary = world.messages[3].summary = Encoded(lacking);
  ASSERT_OK_AND_ASSIGN(const StepOutcome outcome, DecideStep(world.sent(), MakeLayout(), kStep));
  EXPECT_THAT(outcome.error, HasError(ErrorId::kGradPartial));
  EXPECT_THAT(std::string(outcome.error.message()),
              AllOf(HasSubstr("node of rank 2"), HasSubstr("parameter second")));
}

TEST(NodeAgreement, AReplicaThatDiffersIsNamed) {
  World world = Prepared();
  const ReplicaDigest common{.partition = 11, .digest = 5, .group = 0};
  world.messages[0].digests = {common, {.partition = 12, .digest = 6, .group = 0}};
  world.messages[2].digests = {{.partition = 13, .digest = 7, .group = 0}, common};
  ASSERT_OK_AND_ASSIGN(StepOutcome outcome, DecideStep(world.sent(), MakeLayout(), kStep));
  EXPECT_EQ(outcome.summary.head.decision, StepDecision::kCommit);
  world.messages[2].digests[1].digest = 4;
  ASSERT_OK_AND_ASSIGN(outcome, DecideStep(world.sent(), MakeLayout(), kStep));
  EXPECT_EQ(outcome.summary.head.decision, StepDecision::kRepeat);
  EXPECT_THAT(outcome.error, HasError(ErrorId::kCorrupt));
  EXPECT_THAT(
      std::string(outcome.error.message()),
      AllOf(HasSubstr("replicas of all on the nodes of ranks 0 and 2"), HasSubstr("after step 6")));
}

TEST(NodeAgreement, DigestsAreOfWhatAPartitionHolds) {
  const protocol::Layout layout = MakeLayout();
  const uint64_t known[] = {8, 0, 9};
  const auto bytes = std::as_bytes(std::span(known)).first(layout.partitions().size() * 8);
  const std::vector<ReplicaDigest> digests = ReplicaDigestsOf(layout, bytes);
  for (const ReplicaDigest& one : digests) EXPECT_NE(one.digest, 0U) << "not known";
  EXPECT_EQ(digests.at(0).digest, 8U);
  EXPECT_EQ(digests.at(0).group, layout.partitions()[0].group);
}

TEST(NodeAgreement, AnotherStepAndBytesThatAreNoMessageAreRefused) {
  EXPECT_THAT(DecideStep(Prepared().sent(), MakeLayout(), kStep + 1).status(),
              HasError(ErrorId::kProtocol));
  std::vector<std::string> sent = Prepared().sent();
  const std::string whole = sent[1];
  for (size_t bytes = 0; bytes < whole.size(); bytes += 8) {
    sent[1] = whole.substr(0, bytes);
    EXPECT_FALSE(DecideStep(sent, MakeLayout(), kStep).ok()) << bytes << " of a message's bytes";
  }
  EXPECT_FALSE(DecideStep({}, MakeLayout(), kStep).ok());
}

// ------------------------------------------------------------------------------------------- attach

World Attached(NodeMessage::State first, NodeMessage::State second) {
  World world(Kind::kAttached, SummaryOf(3), SummaryOf(4));
  for (uint32_t rank = 0; rank < 4; ++rank) world.messages[rank].state = rank < 2 ? first : second;
  return world;
}

TEST(NodeAgreement, NodesAtOneStepGoOn) {
  ASSERT_OK_AND_ASSIGN(
      const AttachOutcome outcome,
      AgreeOnStep(Attached({.committed_step = 5}, {.committed_step = 5}).sent(), "j"));
  EXPECT_EQ(outcome.todo, Todo::kNothing);
}

TEST(NodeAgreement, WhatOneNodeHasPreparedAndNoneCommittedIsDropped) {
  ASSERT_OK_AND_ASSIGN(
      const AttachOutcome outcome,
      AgreeOnStep(Attached({.committed_step = 5}, {.committed_step = 5, .prepared_step = 6}).sent(),
                  "j"));
  EXPECT_EQ(outcome.todo, Todo::kDrop);
  EXPECT_EQ(outcome.step, 6U);
}

TEST(NodeAgreement, WhatOneNodeHasCommittedTheOthersFollow) {
  const World world = Attached({.committed_step = 5, .prepared_step = 6}, {.committed_step = 6});
  ASSERT_OK_AND_ASSIGN(const AttachOutcome outcome, AgreeOnStep(world.sent(), "j"));
  EXPECT_EQ(outcome.todo, Todo::kCommit);
  EXPECT_EQ(outcome.step, 6U);
  EXPECT_EQ(outcome.summary, world.messages[2].summary) << "of the node that has committed it";
}

TEST(NodeAgreement, ADaemonThatLostItsMemoryIsNamedWithBothSteps) {
  World world = Attached({.committed_step = 9}, {.committed_step = 0, .is_new = true});
  absl::Status status = AgreeOnStep(world.sent(), "gpt").status();
  EXPECT_THAT(status, HasError(ErrorId::kStep));
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("ranks 0, 1 at step 9"), HasSubstr("ranks 2, 3 have no parameters")));
  world = Attached({.committed_step = 9, .durable_step = 8, .durable_before = 6},
                   {.committed_step = 4, .durable_step = 4});
  status = AgreeOnStep(world.sent(), "gpt").status();
  EXPECT_THAT(std::string(status.message()), HasSubstr("ranks 2, 3 at step 4 (durable 4)"));
  EXPECT_THAT(protocol::HintOf(status), HasSubstr("--delete gpt"));
}

TEST(NodeAgreement, AllGoBackToTheNewestStepThatEveryNodeHas) {
  const NodeMessage::State lost{.committed_step = 4, .durable_step = 4};
  for (const NodeMessage::State& ahead :
       {NodeMessage::State{.committed_step = 6, .prepared_step = 7, .durable_step = 4},
        NodeMessage::State{.committed_step = 6, .durable_step = 6, .durable_before = 4},
        NodeMessage::State{.committed_step = 5, .durable_step = 4}}) {
    ASSERT_OK_AND_ASSIGN(const AttachOutcome outcome,
                         AgreeOnStep(Attached(ahead, lost).sent(), "j"));
    EXPECT_EQ(outcome.todo, Todo::kGoBack);
    EXPECT_EQ(outcome.step, 4U);
    EXPECT_EQ(outcome.from_step, ahead.committed_step);
  }
}

TEST(NodeAgreement, AnAttachThatFailsOnOneRankFailsOnAll) {
  World world = Attached({.committed_step = 5}, {.committed_step = 5});
  world.messages[3] = {.kind = Kind::kRefused,
                       .error = MakeError(ErrorId::kDramLimit, "too large")};
  const absl::Status status = AgreeOnStep(world.sent(), "j").status();
  EXPECT_THAT(status, HasError(ErrorId::kDramLimit));
  EXPECT_EQ(status.message(), "rank 3: too large");
}

}  // namespace
}  // namespace forebay::client::internal::node_agreement_test
