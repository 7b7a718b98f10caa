// SPDX-License-Identifier: Apache-2.0
// Goal    An attach is admitted or refused with the right reason. The loss of a rank, a detach or a newer session has the right
//         effect on the other sessions. Sessions are closed and jobs are freed at the right time.
// Method  The harness drives the state machine; each test chooses which tasks end and when, and
//         reads the answers.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "protocol/units.h"
#include "tests/support/node_harness.h"
#include "tests/support/status_test.h"

namespace forebay::daemon::node_state_attach_test {
namespace {

using ::forebay::testing::AttachRequest;
using ::forebay::testing::HasError;
using ::forebay::testing::MakeLayout;
using ::forebay::testing::NodeHarness;
using ::forebay::testing::RoomyOptions;
using protocol::ErrorId;
using ::testing::AllOf;
using ::testing::HasSubstr;

class NodeStateAttach : public ::testing::Test {
 protected:
  void TearDown() override { EXPECT_EQ(node_.fault(), ""); }

  absl::Status StatusOf(uint64_t session) const {
    const AnswerAttach* answer = node_.attached(session);
    return answer == nullptr ? absl::UnavailableError("no answer yet") : answer->status;
  }
  std::string MessageOf(uint64_t tag) const {
    return std::string(node_.answer(tag)->status.message());
  }
  void AttachBoth() {
    first_ = node_.Attach(layout_, {.rank = 0});
    second_ = node_.Attach(layout_, {.rank = 1});
    ASSERT_TRUE(StatusOf(first_).ok());
    ASSERT_TRUE(StatusOf(second_).ok());
  }
  absl::Status Delete(const std::string& job, uint32_t uid) {
    node_.Send(DeleteJobRequested{.request = ++requests_, .uid = uid, .job = job});
    node_.RunTasks();
    const std::vector<AnswerDelete> answers = node_.Logged<AnswerDelete>();
    EXPECT_EQ(answers.size(), requests_);
    return answers.back().status;
  }

  std::shared_ptr<const protocol::Layout> layout_ = MakeLayout({200, 100});
  NodeHarness node_{RoomyOptions()};
  uint64_t first_ = 0;
  uint64_t second_ = 0;
  uint64_t requests_ = 0;
};

TEST_F(NodeStateAttach, AnotherRunsTrainedJobIsRefusedUnlessItIsToBeResumed) {
  const auto layout = MakeLayout({200});
  node_.End(node_.Attach(layout, {.run = "a"}), EndCause::kDetached);
  node_.RunTasks();
  const absl::Status refused = StatusOf(node_.Attach(layout, {.run = "b"}));
  EXPECT_THAT(refused, HasError(ErrorId::kJobExists));
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("job job"), HasSubstr("step 0"), HasSubstr("(a)")));
  EXPECT_THAT(protocol::HintOf(refused), HasSubstr("forebay jobs --delete job"));
  const uint64_t again = node_.Attach(layout, {.run = "a"});
  EXPECT_TRUE(StatusOf(again).ok()) << "its own run";
  node_.End(again, EndCause::kLost);
  node_.RunTasks();
  EXPECT_TRUE(StatusOf(node_.Attach(layout, {.run = "b", .resume = true})).ok());
  const absl::Status first = StatusOf(node_.Attach(layout, {.run = "a", .resume = true}));
  EXPECT_THAT(first, HasError(ErrorId::kBusy)) << "the job is the second run's now";
}

TEST_F(NodeStateAttach, AnotherRunNeverEvictsALiveSession) {
  const auto layout = MakeLayout({200});
  const uint64_t live = node_.Attach(layout, {.run = "a"});
  for (const bool resume : {false, true}) {
    const absl::Status refused = StatusOf(node_.Attach(layout, {.run = "b", .resume = resume}));
    EXPECT_THAT(refused, HasError(ErrorId::kBusy));
    EXPECT_THAT(std::string(refused.message()), HasSubstr("1 of its processes"));
  }
  EXPECT_EQ(node_.ErrorOf(node_.Fetch(live, 0)), ErrorId::kNone) << "it has noticed nothing";
  const uint64_t restarted = node_.Attach(layout, {.run = "a"});
  EXPECT_TRUE(StatusOf(restarted).ok()) << "a process of the same run replaces its old one";
  EXPECT_TRUE(node_.is_closed(live));
}

TEST_F(NodeStateAttach, AProcessOfTheSameLaunchDoesNotTakeARankThatIsTrained) {
  AttachBoth();
  const absl::Status refused = StatusOf(node_.Attach(layout_, {.rank = 1, .rival_pid = 4711}));
  EXPECT_THAT(refused, HasError(ErrorId::kRank));
  EXPECT_THAT(
      std::string(refused.message()),
      AllOf(HasSubstr("process 4711"), HasSubstr("rank 1 of job job"), HasSubstr("rank 1 of 2")));
  EXPECT_THAT(protocol::HintOf(refused),
              AllOf(HasSubstr("init_process_group()"), HasSubstr("end it first")));
  EXPECT_EQ(node_.ErrorOf(node_.Fetch(second_, 0)), ErrorId::kNone) << "it has noticed nothing";

  // The loss of a rank fences the other rank's session. The next process that attaches as rank 1 gets the rank.
  node_.End(first_, EndCause::kLost);
  const uint64_t again = node_.Attach(layout_, {.rank = 1, .rival_pid = 4711});
  EXPECT_TRUE(StatusOf(again).ok());
  EXPECT_TRUE(node_.is_closed(second_));
}

TEST_F(NodeStateAttach, ASessionThatHasEndedOrHasNoRankIsNoRival) {
  AttachBoth();
  EXPECT_TRUE(StatusOf(node_.Attach(layout_, {.reader = true, .rival_pid = 4711})).ok());
  node_.End(second_, EndCause::kDetached);
  node_.RunTasks();
  EXPECT_TRUE(StatusOf(node_.Attach(layout_, {.rank = 1, .rival_pid = 4711})).ok());
}

TEST_F(NodeStateAttach, ARunTokenIsShortAndPrintable) {
  for (const std::string& run : {std::string(201, 'x'), std::string("a b"), std::string("a\n")}) {
    EXPECT_THAT(StatusOf(node_.Attach(layout_, {.run = run})), HasError(ErrorId::kOption));
  }
}

TEST_F(NodeStateAttach, IsAnsweredWhenTheMemoryIsMade) {
  const uint64_t session = node_.RequestAttach(layout_, {});
  EXPECT_EQ(node_.attached(session), nullptr);
  node_.FinishAll<CreateJobMemory>();
  EXPECT_EQ(node_.attached(session), nullptr);
  node_.FinishAll<CreateSessionMemory>();
  ASSERT_NE(node_.attached(session), nullptr);
  const AnswerAttach& answer = *node_.attached(session);
  EXPECT_TRUE(answer.writes_initial);
  EXPECT_EQ(answer.committed_step, 0U);
  EXPECT_EQ(answer.weights_bytes, layout_->weights_bytes());
  EXPECT_EQ(answer.step_region_offset + answer.step_region_bytes, answer.grad_arena_bytes);
  EXPECT_EQ(node_.Logged<CreateSessionMemory>()[0].grad_bytes, answer.grad_arena_bytes);
}

TEST_F(NodeStateAttach, RankZeroWritesTheInitialParametersWhoeverComesFirst) {
  const uint64_t other = node_.RequestAttach(layout_, {.rank = 1});
  node_.RunTasks();
  EXPECT_EQ(node_.attached(other), nullptr);
  const uint64_t lost = node_.RequestAttach(layout_, {.rank = 0});
  node_.RunTasks();
  ASSERT_NE(node_.attached(lost), nullptr);
  EXPECT_TRUE(node_.attached(lost)->writes_initial);
  node_.End(lost, EndCause::kLost);
  EXPECT_THAT(StatusOf(other), HasError(ErrorId::kRankLost)) << "its own may be others";
  const uint64_t again = node_.RequestAttach(layout_, {.rank = 1});
  node_.RunTasks();
  EXPECT_EQ(node_.attached(again), nullptr);
  const uint64_t writer = node_.Attach(layout_, {.rank = 0});
  EXPECT_TRUE(node_.attached(writer)->writes_initial);
  ASSERT_NE(node_.attached(again), nullptr);
  EXPECT_FALSE(node_.attached(again)->writes_initial);
}

TEST_F(NodeStateAttach, TheNextWriterWaitsForTheCopiesOfTheLast) {
  const uint64_t writer = node_.RequestAttach(layout_, {.rank = 0});
  node_.RunTasks();
  node_.Send(SessionMapped{.session = writer});
  protocol::Command command{};
  command.op = static_cast<uint16_t>(protocol::Op::kWriteInitial);
  command.length_bytes = layout_->partition_bytes(0);
  node_.Command(writer, command);
  ASSERT_EQ(node_.Running<CopyInitial>().size(), 1U);
  node_.End(writer, EndCause::kLost);
  const uint64_t other = node_.RequestAttach(layout_, {.rank = 0});
  node_.FinishAll<CreateSessionMemory>();
  EXPECT_FALSE(node_.is_closed(writer)) << "a copy reads its arena";
  EXPECT_EQ(node_.attached(other), nullptr);
  node_.RunTasks();
  EXPECT_TRUE(node_.is_closed(writer));
  ASSERT_NE(node_.attached(other), nullptr);
  EXPECT_TRUE(node_.attached(other)->writes_initial);
}

TEST_F(NodeStateAttach, IsNotReadyBeforeEveryGroupIsWritten) {
  const uint64_t writer = node_.RequestAttach(layout_, {.rank = 0});
  node_.RunTasks();
  node_.Send(SessionMapped{.session = writer});
  EXPECT_EQ(node_.ErrorOf(node_.Fetch(writer, 0)), ErrorId::kNotReady);
  protocol::Command command{};
  command.op = static_cast<uint16_t>(protocol::Op::kInitialDone);
  const uint64_t early = node_.Command(writer, command);
  EXPECT_EQ(node_.ErrorOf(early), ErrorId::kNotReady);
  EXPECT_THAT(MessageOf(early), HasSubstr("group 0 (g0)"));
}

TEST_F(NodeStateAttach, InitialParametersThatAreNotFiniteAreRefusedByGroup) {
  const uint64_t writer = node_.RequestAttach(layout_, {.rank = 0});
  node_.RunTasks();
  node_.Send(SessionMapped{.session = writer});
  protocol::Command command{};
  command.op = static_cast<uint16_t>(protocol::Op::kWriteInitial);
  command.partition = 1;
  command.length_bytes = layout_->partition_bytes(1);
  const uint64_t tag = node_.Command(writer, command);
  TaskDone done = node_.model().Finish(node_.Running<CopyInitial>()[0].task);
  done.count = 1;
  node_.Send(done);
  EXPECT_EQ(node_.ErrorOf(tag), ErrorId::kNonfinite);
  EXPECT_THAT(MessageOf(tag), HasSubstr("group 1 (g1)"));
  EXPECT_FALSE(node_.FindJob("job")->ready);
}

TEST_F(NodeStateAttach, InitialParametersAreTakenFromTheirWriterAlone) {
  AttachBoth();
  protocol::Command command{};
  command.op = static_cast<uint16_t>(protocol::Op::kWriteInitial);
  command.length_bytes = layout_->partition_bytes(0);
  EXPECT_EQ(node_.ErrorOf(node_.Command(first_, command)), ErrorId::kProtocol);
}

TEST_F(NodeStateAttach, IsRefusedForBadNamesRanksOwnersAndLayouts) {
  AttachBoth();
  const auto refused = [&](const AttachRequest& request, auto layout) {
    const uint64_t session = node_.RequestAttach(layout, request);
    EXPECT_TRUE(node_.is_closed(session));
    return StatusOf(session);
  };
  for (const std::string name : {"", "a b", "x/y", "ä"}) {
    EXPECT_THAT(refused({.job = name}, layout_), HasError(ErrorId::kJobName)) << name;
  }
  EXPECT_THAT(refused({.job = std::string(201, 'a')}, layout_), HasError(ErrorId::kJobName));
  EXPECT_THAT(refused({.rank = 2}, layout_), HasError(ErrorId::kRank));
  EXPECT_THAT(refused({.job = "1000:job", .uid = 1001}, layout_), HasError(ErrorId::kPermission));
  EXPECT_THAT(refused({.job = "1001:job", .uid = 0}, layout_), HasError(ErrorId::kJobName));
  EXPECT_THAT(refused({.job = "1000:", .uid = 0}, layout_), HasError(ErrorId::kJobName));
  EXPECT_THAT(refused({.job = "99999999999:job", .uid = 0}, layout_), HasError(ErrorId::kJobName));
  const absl::Status layout_error = refused({}, MakeLayout({200, 101}));
  EXPECT_THAT(layout_error, HasError(ErrorId::kLayout));
  EXPECT_THAT(std::string(layout_error.message()), AllOf(HasSubstr("[100]"), HasSubstr("[101]")));
  EXPECT_THAT(refused({.grad_arena_bytes = 2 * layout_->largest_gradient_bytes() - 1}, layout_),
              HasError(ErrorId::kRange));
  EXPECT_THAT(refused({.grad_arena_bytes = 5 * layout_->largest_gradient_bytes()}, layout_),
              HasError(ErrorId::kRange))
      << "more than the first session took";
  EXPECT_THAT(refused({.extra_state_bytes = 65}, layout_), HasError(ErrorId::kExtraState));
  EXPECT_THAT(refused({.extra_state_bytes = protocol::kExtraStateBytesMax + 1}, layout_),
              HasError(ErrorId::kExtraState));
}

TEST_F(NodeStateAttach, ANameBelongsToItsUid) {
  first_ = node_.Attach(layout_, {.job = "job"});
  const uint64_t of_another = node_.Attach(layout_, {.job = "job", .uid = 1001});
  const uint64_t of_root = node_.Attach(layout_, {.job = "job", .uid = 0});
  EXPECT_EQ(node_.state().Jobs().size(), 3U);
  for (const uint64_t session : {of_another, of_root}) {
    ASSERT_NE(node_.attached(session), nullptr);
    EXPECT_TRUE(node_.attached(session)->writes_initial);
  }
  EXPECT_FALSE(node_.is_closed(first_));
  EXPECT_EQ(node_.attached(node_.Attach(layout_, {.job = "1000:job", .uid = 0, .rank = 1}))->job,
            node_.attached(first_)->job);
}

TEST_F(NodeStateAttach, AJobWithoutParametersGoesWithItsLastSession) {
  first_ = node_.RequestAttach(layout_, {.rank = 0});
  second_ = node_.RequestAttach(layout_, {.rank = 1});
  node_.RunTasks();
  node_.End(second_, EndCause::kDetached);
  node_.RunTasks();
  EXPECT_EQ(node_.state().Jobs().size(), 1U);
  node_.End(first_, EndCause::kLost);
  node_.RunTasks();
  EXPECT_TRUE(node_.state().Jobs().empty());
  EXPECT_EQ(node_.Logged<FreeJob>().size(), 1U);
}

TEST_F(NodeStateAttach, TheTablesOfALayoutCountInTheLimit) {
  const auto taken = [](size_t name_bytes) {
    protocol::LayoutSpec spec = MakeLayout(std::vector<uint64_t>(16, 64))->spec();
    for (auto& param : spec.params) param.name += std::string(name_bytes, 'x');
    NodeHarness node(RoomyOptions());
    node.Attach(std::make_shared<const protocol::Layout>(*protocol::Layout::Create(spec)), {});
    return node.state().Node().dram_used_bytes;
  };
  EXPECT_GE(taken(1000), taken(0) + 12'000);
}

TEST_F(NodeStateAttach, IsOpenToRootAndToSmallerArenas) {
  first_ = node_.Attach(layout_, {.rank = 0});
  second_ = node_.Attach(layout_, {.job = "1000:job",
                                   .uid = 0,
                                   .rank = 1,
                                   .grad_arena_bytes = 2 * layout_->largest_gradient_bytes()});
  EXPECT_TRUE(StatusOf(second_).ok()) << StatusOf(second_);
}

TEST_F(NodeStateAttach, TellsEveryTermWhenDramIsTooSmall) {
  NodeState::Options options = RoomyOptions();
  options.dram_limit_bytes = 100 << 10;
  NodeHarness node(options);
  const uint64_t session = node.RequestAttach(layout_, {});
  ASSERT_TRUE(node.is_closed(session));
  const absl::Status& status = node.attached(session)->status;
  ASSERT_THAT(status, HasError(ErrorId::kDramLimit));
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("weights"), HasSubstr("gradient sums"), HasSubstr("overflow"),
                    HasSubstr("extra_state"), HasSubstr("2 x (gradient arena"), HasSubstr("ring"),
                    HasSubstr("states"), HasSubstr("102400 bytes"), HasSubstr("other jobs hold")));
  // A job fits in the limit that the hint names, and not in one byte less.
  const std::string hint = protocol::HintOf(status);
  const uint64_t least = std::stoull(hint.substr(hint.find("at least ") + 9));
  for (const uint64_t limit : {least, least - 1}) {
    options.dram_limit_bytes = limit;
    NodeHarness other(options);
    const uint64_t again = other.RequestAttach(layout_, {});
    EXPECT_EQ(other.is_closed(again), limit < least);
  }
}

// Sums in the step arena take two bytes an element if the gradient has 16 bits and nothing is added to it. Otherwise they take
// four.
TEST_F(NodeStateAttach, OneRanksGradientsTakeTheBytesOfTheirType) {
  const struct {
    uint32_t world_size;
    protocol::DType dtype;
    uint64_t sum_bytes;
  } cases[] = {{1, protocol::DType::kBFloat16, 2},
               {1, protocol::DType::kFloat32, 4},
               {2, protocol::DType::kBFloat16, 4},
               {2, protocol::DType::kFloat32, 4}};
  for (const auto& test : cases) {
    protocol::LayoutSpec spec = MakeLayout({70'000, 4096})->spec();
    spec.dtype = test.dtype;
    if (test.dtype == protocol::DType::kBFloat16) spec.format = protocol::Format::kExact;
    const auto layout =
        std::make_shared<const protocol::Layout>(*protocol::Layout::Create(std::move(spec)));
    NodeHarness node(RoomyOptions(), test.world_size);
    node.RequestAttach(layout, {});
    const uint64_t page = protocol::kPageBytes;
    const uint64_t sums = protocol::RoundUp(layout->total_elems() * test.sum_bytes, page);
    const uint64_t overflow =
        protocol::RoundUp(2 * layout->largest_gradient_bytes() * test.world_size, page);
    const uint64_t extra_state = page;  // Two extra_state slots of 64 bytes a rank.
    EXPECT_EQ(node.Logged<CreateJobMemory>()[0].step_bytes, sums + overflow + extra_state);

    // The job takes as many bytes as the sum in the error message.
    NodeState::Options options = RoomyOptions();
    options.dram_limit_bytes = 100 << 10;
    NodeHarness refused(options, test.world_size);
    const uint64_t session = refused.RequestAttach(layout, {});
    EXPECT_THAT(std::string(refused.attached(session)->status.message()),
                HasSubstr(absl::StrCat("gradient sums ", protocol::FormatBytes(sums), " (", sums,
                                       " bytes) + overflow")));
  }
}

TEST_F(NodeStateAttach, ReckonsWithoutOverflowForAbsurdRequests) {
  for (const uint64_t bytes : {UINT64_MAX, UINT64_MAX / 2, uint64_t{1} << 40}) {
    const uint64_t session = node_.RequestAttach(layout_, {.grad_arena_bytes = bytes});
    EXPECT_THAT(StatusOf(session), HasError(ErrorId::kDramLimit)) << bytes;
  }
}

TEST_F(NodeStateAttach, GivesTheSecondJobWhatIsLeftAndAllOfItBackWhenDeleted) {
  const uint64_t before = node_.state().Node().dram_used_bytes;
  node_.Attach(layout_, {.job = "a"});
  const uint64_t of_a = node_.FindJob("a")->dram_bytes;
  EXPECT_EQ(node_.state().Node().dram_used_bytes, before + of_a);

  NodeState::Options options = RoomyOptions();
  options.dram_limit_bytes = options.node_bytes + 2 * of_a - 1;
  NodeHarness node(options);
  const uint64_t a = node.Attach(layout_, {.job = "a"});
  const uint64_t b = node.RequestAttach(layout_, {.job = "b"});
  EXPECT_THAT(node.attached(b)->status, HasError(ErrorId::kDramLimit));
  node.End(a, EndCause::kDetached);
  node.Send(DeleteJobRequested{.request = 1, .uid = 1000, .job = "a"});
  EXPECT_EQ(node.Logged<FreeJob>().size(), 1U);
  EXPECT_EQ(node.state().Node().dram_used_bytes, options.node_bytes);
  const uint64_t again = node.Attach(layout_, {.job = "b"});
  EXPECT_TRUE(node.attached(again)->status.ok());
}

TEST_F(NodeStateAttach, CountsTheWeightsOfADeletedJobWhileAProcessUsesThem) {
  NodeState::Options options = RoomyOptions();
  NodeHarness node(options);
  const uint64_t a = node.Attach(layout_, {.job = "a"});
  const uint64_t weights_bytes = node.attached(a)->weights_bytes;
  const uint64_t job_bytes = node.state().Node().dram_used_bytes - options.node_bytes;
  options.dram_limit_bytes = options.node_bytes + job_bytes + weights_bytes - 1;
  NodeHarness tight(options);
  tight.set_weights_in_use(true);
  tight.End(tight.Attach(layout_, {.job = "a"}), EndCause::kDetached);
  tight.Send(DeleteJobRequested{.request = 1, .uid = 1000, .job = "a"});
  ASSERT_EQ(tight.Logged<AnswerDelete>().size(), 1U);
  EXPECT_TRUE(tight.Logged<AnswerDelete>()[0].status.ok());
  EXPECT_EQ(tight.state().Node().dram_used_bytes, options.node_bytes + weights_bytes);

  const uint64_t refused = tight.RequestAttach(layout_, {.job = "a"});
  EXPECT_THAT(tight.attached(refused)->status, HasError(ErrorId::kDramLimit));
  EXPECT_THAT(std::string(tight.attached(refused)->status.message()),
              HasSubstr("weights of deleted jobs"));
  tight.Send(JobFreed{.job = 1, .weights_in_use = false});
  EXPECT_EQ(tight.state().Node().dram_used_bytes, options.node_bytes);
  EXPECT_TRUE(tight.attached(tight.Attach(layout_, {.job = "a"}))->status.ok());
}

TEST_F(NodeStateAttach, ReportsWhyAJobsMemoryCouldNotBeMade) {
  const uint64_t session = node_.RequestAttach(layout_, {});
  node_.Finish(node_.Running<CreateJobMemory>()[0].task,
               protocol::MakeError(ErrorId::kMemlock, "too little may be locked"));
  EXPECT_THAT(StatusOf(session), HasError(ErrorId::kMemlock));
  EXPECT_TRUE(node_.is_closed(session));
  EXPECT_EQ(node_.Logged<FreeJob>().size(), 1U);
  EXPECT_TRUE(node_.state().Jobs().empty());
  // Both ranks can attach, because the failed attach has left no job or session behind.
  AttachBoth();
}

TEST_F(NodeStateAttach, ReportsWhyASessionsMemoryCouldNotBeMade) {
  first_ = node_.Attach(layout_, {.rank = 0});
  const uint64_t session = node_.RequestAttach(layout_, {.rank = 1});
  node_.Finish(node_.Running<CreateSessionMemory>()[0].task,
               protocol::MakeError(ErrorId::kMemlock, "too little may be locked"));
  EXPECT_THAT(StatusOf(session), HasError(ErrorId::kMemlock));
  EXPECT_TRUE(node_.is_closed(session));
}

TEST_F(NodeStateAttach, ThatEndsBeforeItsAnswerIsForgotten) {
  const uint64_t session = node_.RequestAttach(layout_, {});
  node_.FinishAll<CreateJobMemory>();
  node_.End(session, EndCause::kLost);
  EXPECT_FALSE(node_.is_closed(session)) << "its memory is being made";
  node_.RunTasks();
  EXPECT_TRUE(node_.is_closed(session));
  EXPECT_EQ(node_.attached(session), nullptr);
}

TEST_F(NodeStateAttach, ALostRankFencesTheOthersWhoseEndChangesNothing) {
  AttachBoth();
  const uint64_t generation = node_.FindJob("job")->generation;
  const uint64_t held = node_.Gradient(second_, 0, 1);
  const uint64_t called = node_.Step(second_, 1);
  const uint64_t fetch = node_.Fetch(second_, 0);
  node_.End(first_, EndCause::kLost);
  EXPECT_TRUE(node_.is_closed(first_));
  for (const uint64_t tag : {held, called, fetch}) {
    EXPECT_EQ(node_.ErrorOf(tag), ErrorId::kRankLost);
    EXPECT_THAT(MessageOf(tag),
                AllOf(HasSubstr("rank 0"), HasSubstr("step 1"), HasSubstr("committed step is 0")));
  }
  for (const uint64_t tag :
       {node_.Fetch(second_, 0), node_.Gradient(second_, 1, 1), node_.Step(second_, 1)}) {
    EXPECT_EQ(node_.ErrorOf(tag), ErrorId::kRankLost) << "whatever comes later too";
  }
  EXPECT_EQ(node_.FindJob("job")->generation, generation + 1);
  node_.End(second_, EndCause::kLost);
  EXPECT_EQ(node_.FindJob("job")->generation, generation + 1);
}

TEST_F(NodeStateAttach, ANewGenerationTrainsOnWithoutTheDroppedGradients) {
  AttachBoth();
  node_.Gradient(first_, 0, 1);
  node_.Gradient(second_, 0, 1);
  node_.RunTasks();
  node_.End(first_, EndCause::kLost);
  node_.End(second_, EndCause::kLost);
  AttachBoth();
  node_.Gradient(second_, 1, 1);
  const uint64_t a = node_.Step(first_, 1);
  const uint64_t b = node_.Step(second_, 1);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(a), ErrorId::kNone);
  EXPECT_EQ(node_.ErrorOf(b), ErrorId::kNone);
  EXPECT_EQ(node_.model().committed_gradients(1).size(), 1U) << "group 1 alone";
}

TEST_F(NodeStateAttach, WaitsForTasksOfTheLastGeneration) {
  AttachBoth();
  node_.Gradient(first_, 0, 1);
  node_.Gradient(second_, 0, 1);
  ASSERT_EQ(node_.Running<AddGradients>().size(), 1U);
  node_.End(second_, EndCause::kLost);
  const uint64_t again = node_.RequestAttach(layout_, {.rank = 1});
  node_.FinishAll<CreateSessionMemory>();
  EXPECT_EQ(node_.attached(again), nullptr) << "an old gradient is being added";
  // Ends the addition and closes the old session, whose arena the addition has read.
  node_.FinishAll<AddGradients>();
  node_.RunTasks();
  EXPECT_NE(node_.attached(again), nullptr);
}

TEST_F(NodeStateAttach, OfARankWhoseSessionLivesFencesTheOldOne) {
  AttachBoth();
  const uint64_t waiting = node_.Gradient(second_, 0, 1);
  const uint64_t newer = node_.RequestAttach(layout_, {.rank = 1});
  EXPECT_EQ(node_.ErrorOf(waiting), ErrorId::kFenced);
  EXPECT_TRUE(node_.is_closed(second_));
  EXPECT_THAT(node_.close_reason(second_), HasError(ErrorId::kFenced));
  EXPECT_EQ(node_.ErrorOf(node_.Fetch(first_, 0)), ErrorId::kRankLost) << "it was current";
  node_.RunTasks();
  EXPECT_TRUE(StatusOf(newer).ok());
  // The fenced session's connection closes at last. The new session is unaffected.
  node_.End(second_, EndCause::kLost);
  EXPECT_FALSE(node_.is_closed(newer));
}

TEST_F(NodeStateAttach, ADetachWithNothingInTheStepRefusesTheOthersStepUntilItIsBack) {
  AttachBoth();
  node_.Gradient(first_, 0, 1);
  node_.RunTasks();
  node_.End(second_, EndCause::kDetached);
  const uint64_t tag = node_.Step(first_, 1);
  EXPECT_EQ(node_.ErrorOf(tag), ErrorId::kRankLost) << "instead of waiting permanently";
  EXPECT_THAT(MessageOf(tag), HasSubstr("rank 1"));
  second_ = node_.Attach(layout_, {.rank = 1});
  const uint64_t a = node_.Step(first_, 1);
  const uint64_t b = node_.Step(second_, 1);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(a), ErrorId::kNone);
  EXPECT_EQ(node_.ErrorOf(b), ErrorId::kNone);
  EXPECT_EQ(node_.model().committed_gradients(1).size(), 1U) << "the gradient was kept";
}

TEST_F(NodeStateAttach, ADetachRefusesAStepThatWaits) {
  AttachBoth();
  const uint64_t tag = node_.Step(first_, 1);
  EXPECT_EQ(node_.answer(tag), nullptr);
  node_.End(second_, EndCause::kDetached);
  EXPECT_EQ(node_.ErrorOf(tag), ErrorId::kRankLost);
}

TEST_F(NodeStateAttach, ADetachWithAGradientInTheStepIsALoss) {
  AttachBoth();
  node_.Gradient(second_, 0, 1);
  node_.End(second_, EndCause::kDetached);
  EXPECT_EQ(node_.ErrorOf(node_.Fetch(first_, 0)), ErrorId::kRankLost);
}

TEST_F(NodeStateAttach, RanksThatNeverAttachedAreWaitedFor) {
  first_ = node_.Attach(layout_, {.rank = 0});
  const uint64_t a = node_.Step(first_, 1);
  node_.RunTasks();
  EXPECT_EQ(node_.answer(a), nullptr);
  second_ = node_.Attach(layout_, {.rank = 1});
  const uint64_t b = node_.Step(second_, 1);
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(a), ErrorId::kNone);
  EXPECT_EQ(node_.ErrorOf(b), ErrorId::kNone);
}

TEST_F(NodeStateAttach, ARunThatAllRanksHaveLeftIsWaitedForAgain) {
  AttachBoth();
  node_.End(first_, EndCause::kDetached);
  node_.End(second_, EndCause::kDetached);
  first_ = node_.Attach(layout_, {.rank = 0});
  const uint64_t a = node_.Step(first_, 1);
  EXPECT_EQ(node_.answer(a), nullptr) << "rank 1 of the new run is on its way";
}

TEST_F(NodeStateAttach, ALossAfterTheLastStepCallDoesNotStopTheStep) {
  AttachBoth();
  node_.Gradient(first_, 0, 1);
  node_.Gradient(second_, 0, 1);
  const uint64_t a = node_.Step(first_, 1);
  node_.Step(second_, 1);
  node_.End(second_, EndCause::kLost);
  EXPECT_FALSE(node_.is_closed(second_)) << "its gradient is still needed";
  const uint64_t again = node_.RequestAttach(layout_, {.rank = 1});
  node_.RunTasks();
  EXPECT_EQ(node_.ErrorOf(a), ErrorId::kNone);
  EXPECT_EQ(node_.model().committed_gradients(1).at(0).size(), 2U);
  EXPECT_TRUE(node_.is_closed(second_));
  EXPECT_EQ(node_.ErrorOf(node_.Fetch(first_, 0)), ErrorId::kRankLost) << "its next command";
  ASSERT_NE(node_.attached(again), nullptr);
  EXPECT_EQ(node_.attached(again)->committed_step, 1U) << "attach waited for the step";
}

TEST_F(NodeStateAttach, ADeleteIsTheOwnersAndNeedsAnEmptyJob) {
  AttachBoth();
  EXPECT_THAT(Delete("nobody", 0), HasError(ErrorId::kJobName));
  EXPECT_THAT(Delete("job", 1001), HasError(ErrorId::kJobName));
  EXPECT_THAT(Delete("1000:job", 1001), HasError(ErrorId::kPermission));
  EXPECT_THAT(Delete("job", 1000), HasError(ErrorId::kBusy));
  node_.End(first_, EndCause::kDetached);
  EXPECT_EQ(Delete("job", 1000).message(), "job job has 1 session");
  node_.End(second_, EndCause::kDetached);
  EXPECT_TRUE(Delete("job", 1000).ok());
  EXPECT_TRUE(node_.state().Jobs().empty());
  EXPECT_EQ(node_.Logged<FreeJob>().size(), 1U);
}

TEST_F(NodeStateAttach, CommandsBeforeMappedAreIgnored) {
  AttachBoth();
  const uint64_t third = node_.RequestAttach(layout_, {.rank = 1});
  node_.RunTasks();
  const uint64_t tag = node_.Fetch(third, 0);
  EXPECT_EQ(node_.answer(tag), nullptr);
}

}  // namespace
}  // namespace forebay::daemon::node_state_attach_test
