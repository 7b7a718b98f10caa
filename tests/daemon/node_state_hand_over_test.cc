// SPDX-License-Identifier: Apache-2.0
// Goal    A daemon that is asked to hand over its jobs makes each job quiescent between two steps, at whatever point the
//         request arrives. The next daemon continues with the same arenas and slots: no step is lost, and no bytes are read
//         back or written again.
// Method  The harness. Its model retains the memory that a daemon hands over. The model reports a fault if a job is handed over
//         in the middle of a step, with slots or blocks that are not its own, or with memory that was not retained. The request
//         arrives after each turn of some steps in turn; ranks send unanswered commands again.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <utility>
#include <variant>
#include <vector>

#include "daemon/core/base/limits.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/durability.h"
#include "tests/support/job_cases.h"
#include "tests/support/node_harness.h"
#include "tests/support/points.h"
#include "tests/support/status_test.h"
#include "tests/support/turned_training.h"

namespace forebay::daemon::node_state_hand_over_test {
namespace {

using ::forebay::testing::AttachRequest;
using ::forebay::testing::JobCase;
using ::forebay::testing::LayoutOf;
using ::forebay::testing::NodeHarness;
using ::forebay::testing::OptionsOf;
using ::forebay::testing::Place;
using protocol::ErrorId;
using ::testing::IsEmpty;
using ::testing::SizeIs;

using ::forebay::testing::kCasesThatGoOn;
using ::forebay::testing::kEpoch;
using ::forebay::testing::kMemory;
using ::forebay::testing::kStep;
using ::forebay::testing::kUnanswered;
using ::forebay::testing::RequestOf;
using ::forebay::testing::Training;

constexpr uint32_t kRanks = testing::kCaseRanks;

class NodeStateHandOver : public ::testing::TestWithParam<JobCase> {};

TEST_P(NodeStateHandOver, AtAnyPointTheNextDaemonGoesOnWithTheNewestStep) {
  const NodeState::Options options = OptionsOf(GetParam());
  constexpr uint64_t kSteps = 3;
  std::set<uint64_t> steps;
  const uint64_t stride = GetParam().place == Place::kSumsOnSwap ? 9 : 1;
  const std::vector<uint64_t> points =
      testing::PointsOf<Training>(GetParam(), options, kSteps, stride);
  for (const uint64_t point : points) {
    Training run(GetParam(), options);
    run.AttachAll();
    for (uint64_t turns = 0; turns < point; ++turns) run.Turn();
    const uint64_t swap_bytes = run.View().swap_bytes;
    const uint32_t resident = run.View().resident_blocks;
    run.HandOver();
    ASSERT_FALSE(::testing::Test::HasFailure()) << "point " << point;
    steps.insert(run.answered_);
    run.AttachAll(/*reattach=*/true);
    ASSERT_FALSE(::testing::Test::HasFailure()) << "point " << point;
    EXPECT_EQ(run.View().swap_bytes, swap_bytes);
    EXPECT_EQ(run.View().resident_blocks, resident);
    ASSERT_THAT(run.node_->Logged<RestorePart>(), IsEmpty());
    ASSERT_THAT(run.node_->Logged<CreateJobSwap>(), IsEmpty());
    run.TrainTo(run.answered_ + 2);
    ASSERT_EQ(run.node_->fault(), "") << "point " << point;
    // Hands the job over again, to a third daemon.
    run.HandOver();
    run.AttachAll(/*reattach=*/true);
    run.TrainTo(run.answered_ + 1);
    ASSERT_EQ(run.node_->fault(), "") << "point " << point;
    ASSERT_FALSE(::testing::Test::HasFailure()) << "point " << point;
  }
  EXPECT_GE(points.size(), 20U);
  EXPECT_GE(steps.size(), 2U);
}

// After a failed flush the hand-over waits until the doubtful data is written again.
TEST(NodeStateHandOverOfDurableSteps, AFailedFlushDelaysIt) {
  for (const JobCase& with :
       {JobCase{kStep, Place::kDram}, JobCase{kStep, Place::kSwap}, JobCase{kEpoch, Place::kSwap},
        JobCase{kEpoch, Place::kHalf}, JobCase{kEpoch, Place::kWeightsOnSwap, true}}) {
    const NodeState::Options options = OptionsOf(with);
    uint64_t failed = 0;
    for (uint64_t point = 0;; point += 3) {
      Training run(with, options);
      run.AttachAll();
      for (uint64_t turns = 0; turns < point && run.answered_ < 3; ++turns) run.Turn();
      if (run.answered_ >= 3) break;
      run.FailFlushes(2);
      run.HandOver();
      ASSERT_FALSE(::testing::Test::HasFailure()) << "point " << point;
      failed += 2 - static_cast<uint64_t>(run.failing());
      run.FailFlushes(0);
      run.AttachAll(/*reattach=*/true);
      run.TrainTo(run.answered_ + 2);
      ASSERT_FALSE(::testing::Test::HasFailure()) << "point " << point;
      ASSERT_EQ(run.node_->fault(), "") << "point " << point;
    }
    EXPECT_GT(failed, 20U);
  }
}

INSTANTIATE_TEST_SUITE_P(Places, NodeStateHandOver, ::testing::ValuesIn(kCasesThatGoOn));

class NodeStateHandOverJob : public ::testing::Test {
 protected:
  explicit NodeStateHandOverJob(const JobCase& with = {kMemory, Place::kHalf})
      : run_(with, OptionsOf(with)) {
    run_.AttachAll();
    run_.TrainTo(1);
    run_.node_->RunTasks();
  }
  void TearDown() override { EXPECT_EQ(run_.node_->fault(), ""); }
  NodeHarness& node() { return *run_.node_; }
  void Ask() {
    node().Send(HandOverRequested{});
    node().RunTasks();
  }

  Training run_;
};

class NodeStateHandOverInDram : public NodeStateHandOverJob {
 protected:
  NodeStateHandOverInDram() : NodeStateHandOverJob({kMemory, Place::kDram}) {}
};

TEST_F(NodeStateHandOverJob, NobodyAttachesAndNothingIsDeletedMeanwhile) {
  Ask();
  ASSERT_TRUE(run_.is_handed_over());
  const uint64_t session = node().Attach(run_.layout_, RequestOf(0, run_.with_, true));
  EXPECT_EQ(protocol::IdOf(node().attached(session)->status), ErrorId::kDaemonGone);
  node().Send(DeleteJobRequested{.request = 1, .uid = 1000, .job = "job"});
  EXPECT_EQ(protocol::IdOf(node().Logged<AnswerDelete>().at(0).status), ErrorId::kDaemonGone);
}

TEST_F(NodeStateHandOverJob, SessionsEndWithTheDaemonWithoutAnAnswer) {
  const uint64_t fetch = node().Fetch(run_.sessions_[0], 0);
  Ask();
  ASSERT_TRUE(run_.is_handed_over());
  const uint64_t late = node().Fetch(run_.sessions_[1], 1);
  EXPECT_EQ(node().ErrorOf(fetch), ErrorId::kNone);
  EXPECT_EQ(node().ErrorOf(late), kUnanswered);
  for (const uint64_t session : run_.sessions_) {
    node().End(session, EndCause::kLost);
    node().RunTasks();
    EXPECT_TRUE(node().is_closed(session));
  }
  EXPECT_EQ(node().ErrorOf(late), kUnanswered);
  EXPECT_TRUE(node().model().has_job(1));
}

TEST_F(NodeStateHandOverJob, AStepThatGoesOnIsWaitedForUntilTheLimit) {
  node().Gradient(run_.sessions_[0], 0, 2);
  Ask();
  EXPECT_FALSE(run_.is_handed_over());
  node().Send(HandOverDue{});
  node().RunTasks();
  ASSERT_TRUE(run_.is_handed_over());
  EXPECT_THAT(run_.handed_over().node->jobs, IsEmpty());
  EXPECT_THAT(run_.handed_over().sessions, IsEmpty());
}

TEST_F(NodeStateHandOverJob, SessionsOfAnOlderGenerationAreNotHandedOver) {
  node().End(run_.sessions_[0], EndCause::kLost);
  Ask();
  ASSERT_TRUE(run_.is_handed_over());
  EXPECT_THAT(run_.handed_over().node->jobs, SizeIs(1));
  EXPECT_THAT(run_.handed_over().sessions, IsEmpty());
}

TEST_F(NodeStateHandOverInDram, AReaderIsNotHandedOver) {
  ASSERT_OK(node().attached(node().AttachReader(run_.layout_))->status);
  Ask();
  ASSERT_TRUE(run_.is_handed_over());
  EXPECT_THAT(run_.handed_over().sessions, SizeIs(kRanks));
}

TEST_F(NodeStateHandOverJob, AnAttemptThatIsOverStaysOver) {
  const uint64_t bad = node().Gradient(run_.sessions_[0], 0, 2, /*finite=*/false);
  node().RunTasks();
  ASSERT_NE(node().ErrorOf(bad), kUnanswered);
  run_.HandOver();
  run_.AttachAll(/*reattach=*/true);
  EXPECT_EQ(node().attached(run_.sessions_[1])->attempt, 1U);
  node().SetAttempt(run_.sessions_[1], 0);
  const uint64_t call = node().Step(run_.sessions_[1], 2);
  node().RunTasks();
  EXPECT_EQ(node().ErrorOf(call), ErrorId::kGradDropped);
}

TEST_F(NodeStateHandOverJob, AJobThatNobodyComesBackToIsDeleted) {
  const uint64_t swap_before = node().state().Node().swap_used_bytes;
  const uint64_t dram_before = node().state().Node().dram_used_bytes;
  run_.HandOver();
  EXPECT_EQ(node().state().Node().swap_used_bytes, swap_before);
  EXPECT_EQ(node().state().Node().dram_used_bytes, dram_before);
  EXPECT_EQ(run_.View().committed_step, 1U);
  node().Send(DeleteJobRequested{.request = 1, .uid = 1000, .job = "job"});
  node().RunTasks();
  EXPECT_OK(node().Logged<AnswerDelete>().at(0).status);
  EXPECT_EQ(node().state().Node().swap_used_bytes, 0U);
  EXPECT_LT(node().state().Node().dram_used_bytes, dram_before);
  EXPECT_THAT(node().Logged<FreeJob>(), SizeIs(1));
  EXPECT_FALSE(node().model().has_job(1));
}

TEST_F(NodeStateHandOverJob, AnotherProcessOfTheRankGetsAnArenaOfItsOwn) {
  run_.HandOver();
  AttachRequest request = RequestOf(0, run_.with_, false);
  request.resume = true;
  ASSERT_OK(node().attached(node().Attach(run_.layout_, request))->status);
  EXPECT_TRUE(node().Logged<CreateJobMemory>().at(0).is_kept);
  EXPECT_FALSE(node().Logged<CreateJobMemory>().at(0).keeps_gradients);
}

TEST_F(NodeStateHandOverJob, AJobWhoseMemoryCannotBeCompletedIsKeptOn) {
  run_.HandOver();
  node().RequestAttach(run_.layout_, RequestOf(0, run_.with_, true));
  const CreateJobMemory made = node().FinishUntil<CreateJobMemory>();
  node().Finish(made.task, protocol::MakeError(ErrorId::kDramLimit, "simulated"));
  node().RunTasks();
  ASSERT_THAT(node().Logged<FreeJob>(), SizeIs(1));
  EXPECT_TRUE(node().Logged<FreeJob>()[0].keeps_arenas);
  run_.AttachAll(/*reattach=*/true);
  run_.TrainTo(2);
}

TEST_F(NodeStateHandOverJob, AJobThatWasNotHandedOverIsNotMadeAnew) {
  NodeHarness empty(run_.options_, kRanks);
  const uint64_t session = empty.Attach(run_.layout_, RequestOf(0, run_.with_, true));
  EXPECT_EQ(protocol::IdOf(empty.attached(session)->status), ErrorId::kJobName);
  EXPECT_FALSE(empty.FindJob("job"));
}

TEST_F(NodeStateHandOverJob, ALowerLimitIsSaidAndNothingIsLost) {
  const uint64_t used = node().state().Node().dram_used_bytes;
  NodeState::Options less = run_.options_;
  node().Send(HandOverRequested{});
  node().RunTasks();
  ASSERT_TRUE(run_.is_handed_over());
  less.dram_limit_bytes = used - 4096;
  const auto next = NodeHarness::GoOn(node(), less);
  const uint64_t session = next->Attach(run_.layout_, RequestOf(0, run_.with_, true));
  EXPECT_EQ(protocol::IdOf(next->attached(session)->status), ErrorId::kDramLimit);
  EXPECT_EQ(next->FindJob("job")->committed_step, 1U);
}

// A daemon of the previous release did not count the memory for a hand-over of extra_state. Its job is accepted even if the job
// exceeds the limit with that memory; a job of this release is refused.
TEST(NodeStateHandOverOfTheReleaseBefore, AJobThatFilledTheLimitFits) {
  const JobCase with{kMemory, Place::kDram};
  const auto request_of = [&](uint32_t rank, bool reattach) {
    AttachRequest request = RequestOf(rank, with);
    request.reattach = reattach;
    request.extra_state_bytes = 256 << 10;
    return request;
  };
  for (const bool is_of_this_release : {true, false}) {
    NodeState::Options options = OptionsOf(with, /*keeps_jobs=*/true);
    NodeHarness before(options, kRanks);
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      before.Attach(LayoutOf(with), request_of(rank, false));
    }
    options.dram_limit_bytes = before.state().Node().dram_used_bytes - 2 * kRanks * (192 << 10);
    before.Send(HandOverRequested{});
    before.RunTasks();
    const auto next = NodeHarness::GoOn(before, options, [&](DurableJob& job) {
      job.kept->session.counts_handed_over = is_of_this_release;
    });
    const uint64_t session = next->Attach(LayoutOf(with), request_of(0, true));
    EXPECT_EQ(protocol::IdOf(next->attached(session)->status),
              is_of_this_release ? ErrorId::kDramLimit : ErrorId::kNone);
  }
}

TEST_F(NodeStateHandOverJob, SwapThatIsLostWithTheDaemonKeepsItsJobs) {
  NodeState::Options options = run_.options_;
  options.loses_swap = true;
  NodeHarness half(options, kRanks);
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    half.Attach(run_.layout_, RequestOf(rank, run_.with_, false));
  }
  half.Send(HandOverRequested{});
  half.RunTasks();
  ASSERT_THAT(half.Logged<HandedOver>(), SizeIs(1));
  EXPECT_THAT(half.Logged<HandedOver>()[0].node->jobs, IsEmpty());
  EXPECT_THAT(half.Logged<CommitLedger>(), IsEmpty());
}

TEST_F(NodeStateHandOverJob, WithoutAJobToHandOverNothingIsWritten) {
  NodeHarness empty(run_.options_, kRanks);
  empty.Send(HandOverRequested{});
  empty.RunTasks();
  ASSERT_THAT(empty.Logged<HandedOver>(), SizeIs(1));
  EXPECT_THAT(empty.Logged<HandedOver>()[0].node->jobs, IsEmpty());
  EXPECT_THAT(empty.Logged<CommitLedger>(), IsEmpty());
}

TEST_F(NodeStateHandOverInDram, NumbersOfLeasesAndJobsGoOn) {
  const uint64_t fetch = node().Fetch(run_.sessions_[0], 0);
  const uint64_t lease = node().answer(fetch)->completion.lease_id;
  run_.HandOver();
  run_.AttachAll(/*reattach=*/true);
  const uint64_t next = node().Fetch(run_.sessions_[0], 0);
  EXPECT_GT(node().answer(next)->completion.lease_id, lease);
  AttachRequest other = RequestOf(0, run_.with_, false);
  other.job = "other";
  node().RequestAttach(run_.layout_, other);
  node().RunTasks();
  EXPECT_EQ(node().FindJob("other")->id, run_.View().id + 1);
}

}  // namespace
}  // namespace forebay::daemon::node_state_hand_over_test
