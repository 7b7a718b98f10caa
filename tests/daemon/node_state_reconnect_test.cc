// SPDX-License-Identifier: Apache-2.0
// Goal    A rank whose connection is lost and restored continues its session, whatever commands it has sent and whatever
//         answers it has not received. No command is executed twice or lost, and no other rank notices.
// Method  The harness, with a client whose connection is lost after each turn of some steps in turn, together with some of the
//         newest answers. The client sends unanswered commands again. The model reports a fault if a gradient is added twice or
//         not at all. Each command must be answered once.

#include <cstdint>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "tests/support/job_cases.h"
#include "tests/support/node_harness.h"
#include "tests/support/points.h"
#include "tests/support/turned_training.h"

namespace forebay::daemon::node_state_reconnect_test {
namespace {

using ::forebay::testing::JobCase;
using ::forebay::testing::kCasesThatGoOn;
using ::forebay::testing::kUnanswered;
using ::forebay::testing::NodeHarness;
using ::forebay::testing::OptionsOf;
using ::forebay::testing::Place;
using ::forebay::testing::Training;
using protocol::ErrorId;
using ::testing::HasSubstr;

// Most answers that a client has not received when it sends a command: enough for all answers of a step, but few enough that it
// receives some.
constexpr size_t kUnheard = 8;

class NodeStateReconnect : public ::testing::TestWithParam<JobCase> {};

TEST_P(NodeStateReconnect, AtAnyPointARankGoesOn) {
  const NodeState::Options options = OptionsOf(GetParam());
  const auto reconnect = [](Training& run, uint64_t point) {
    const std::vector<uint64_t> sessions = run.sessions_;
    // The first rank reconnects at once. The second rank reconnects after three tasks, loses its connection again, and
    // reconnects at once.
    run.LoseClientOf(point % 2, 0);
    run.LoseClientOf(1 - point % 2, 3);
    run.LoseClientOf(1 - point % 2, 0);
    ASSERT_FALSE(::testing::Test::HasFailure());
    run.TrainTo(run.answered_ + 1);
    // Both ranks remain disconnected until every task that can run without them has ended.
    for (const uint64_t session : sessions) run.node_->Disconnect(session);
    run.Resume();
    for (const uint64_t session : sessions) run.node_->Reconnect(session);
    run.TrainTo(run.answered_ + 1);
    ASSERT_EQ(run.node_->fault(), "");
    ASSERT_FALSE(::testing::Test::HasFailure());
    ASSERT_EQ(run.View().generation, 0U);
    for (const uint64_t session : sessions) ASSERT_FALSE(run.node_->is_closed(session));
    for (const AnswerCommand& answer : run.node_->Logged<AnswerCommand>()) ASSERT_OK(answer.status);
  };
  const auto hold_answers = [](Training& run) { run.node_->set_unheard_max(kUnheard); };
  EXPECT_GE(testing::AtEachPoint<Training>(GetParam(), options, reconnect, hold_answers), 20U);
}

INSTANTIATE_TEST_SUITE_P(Places, NodeStateReconnect, ::testing::ValuesIn(kCasesThatGoOn));

class NodeStateReconnectJob : public ::testing::Test {
 protected:
  NodeStateReconnectJob() : run_(kCase, OptionsOf(kCase)) {
    run_.AttachAll();
    run_.TrainTo(1);
  }
  void TearDown() override { EXPECT_EQ(run_.node_->fault(), ""); }
  NodeHarness& node() { return *run_.node_; }

  static constexpr JobCase kCase{testing::kMemory, Place::kDram};
  Training run_;
};

TEST_F(NodeStateReconnectJob, WhoStaysAwayIsLost) {
  const uint64_t away = run_.sessions_[0];
  const uint64_t other = run_.sessions_[1];
  node().Disconnect(away);
  const uint64_t call = node().Step(other, 2);
  node().RunTasks();
  EXPECT_EQ(node().ErrorOf(call), kUnanswered) << "it waits";
  node().End(away, EndCause::kLost);
  EXPECT_EQ(node().ErrorOf(call), ErrorId::kRankLost);
  EXPECT_TRUE(node().is_closed(away));
}

TEST_F(NodeStateReconnectJob, WhoIsReplacedMeanwhileHearsOfIt) {
  const uint64_t away = run_.sessions_[0];
  node().Disconnect(away);
  const uint64_t anew = node().Attach(run_.layout_, {.rank = 0, .resume = true});
  ASSERT_NE(node().attached(anew), nullptr);
  EXPECT_OK(node().attached(anew)->status);
  EXPECT_TRUE(node().is_closed(away));
  EXPECT_THAT(node().close_reason(away).message(), HasSubstr("newer session"));
}

TEST_F(NodeStateReconnectJob, WhoseGenerationIsOverHearsOfIt) {
  const uint64_t away = run_.sessions_[0];
  node().Disconnect(away);
  node().End(run_.sessions_[1], EndCause::kLost);
  node().Reconnect(away);
  ASSERT_NE(node().attached(away), nullptr);
  EXPECT_EQ(protocol::IdOf(node().attached(away)->status), ErrorId::kRankLost);
}

TEST_F(NodeStateReconnectJob, AReaderIsLostAtOnce) {
  const uint64_t reader = node().AttachReader(run_.layout_);
  node().Disconnect(reader);
  EXPECT_TRUE(node().is_closed(reader));
}

// A rank that reconnects may be served by another gateway. A gateway numbers its own fetches from the beginning, so that the
// same tag may name another fetch.
TEST_F(NodeStateReconnectJob, AFetchIsNotAnsweredWithThePlaceOfAnother) {
  const uint64_t session = run_.sessions_[0];
  node().Step(session, 2);
  protocol::Command fetch{};
  fetch.op = static_cast<uint16_t>(protocol::Op::kFetch);
  fetch.tag = uint64_t{1} << 62;
  fetch.partition = 0;
  node().Send(CommandArrived{.session = session, .command = fetch});
  ASSERT_EQ(node().answer(fetch.tag), nullptr) << "it waits for the step";
  node().Disconnect(session);
  node().Reconnect(session);
  fetch.partition = 1;
  node().Send(CommandArrived{.session = session, .command = fetch});
  node().Step(run_.sessions_[1], 2);
  node().RunTasks();
  ASSERT_NE(node().answer(fetch.tag), nullptr);
  const auto offset_of = [&](uint32_t partition) {
    return node().answer(node().Fetch(session, partition))->completion.offset_bytes;
  };
  EXPECT_EQ(node().answer(fetch.tag)->completion.offset_bytes, offset_of(1));
  EXPECT_NE(offset_of(1), offset_of(0));
}

// Only a command that is sent again after a reconnection may arrive twice. A second new gradient is still an error.
TEST_F(NodeStateReconnectJob, AGradientThatComesTwiceIsAnErrorStill) {
  const uint64_t session = run_.sessions_[0];
  node().Disconnect(session);
  node().Reconnect(session);
  const uint64_t first = node().Gradient(session, 0, 2);
  node().RunTasks();
  EXPECT_EQ(node().ErrorOf(first), ErrorId::kNone);
  const uint64_t second = node().Gradient(session, 0, 2);
  node().RunTasks();
  EXPECT_EQ(node().ErrorOf(second), ErrorId::kGradRepeat);
}

TEST(NodeStateReconnectInitial, WhoWritesTheParametersIsLostAtOnce) {
  const JobCase with{testing::kMemory, Place::kDram, false, true};
  NodeHarness node(OptionsOf(with), testing::kCaseRanks);
  const auto layout = testing::LayoutOf(with);
  const uint64_t writer = node.AttachOnly(layout, RequestOf(0, with));
  ASSERT_TRUE(node.attached(writer)->writes_initial);
  node.WriteInitial(writer, 0);
  node.Disconnect(writer);
  node.RunTasks();
  EXPECT_TRUE(node.is_closed(writer));
  EXPECT_EQ(node.fault(), "");
}

}  // namespace
}  // namespace forebay::daemon::node_state_reconnect_test
