// SPDX-License-Identifier: Apache-2.0
// Goal    A daemon that is asked to stop makes each job quiescent between two steps and records it, at whatever point the request
//         arrives. The next daemon continues with the same arenas and slots: no step is lost, and no bytes are read back or
//         written again.
// Method  The harness. The next daemon reads the records. The model retains the memory, and reports a fault if a job stops in the
//         middle of a step, or if a record has other slots or blocks than the job. The request arrives after each turn of some
//         steps in turn; ranks send unanswered commands again.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <utility>
#include <variant>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/durability.h"
#include "tests/support/job_cases.h"
#include "tests/support/node_harness.h"
#include "tests/support/points.h"
#include "tests/support/status_test.h"
#include "tests/support/turned_training.h"

namespace forebay::daemon::node_state_stop_test {
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

class NodeStateStop : public ::testing::TestWithParam<JobCase> {};

TEST_P(NodeStateStop, AtAnyPointTheNextDaemonGoesOnWithTheNewestStep) {
  const NodeState::Options options = OptionsOf(GetParam(), /*keeps_jobs=*/true);
  std::set<uint64_t> steps;
  const auto stop_twice = [&](Training& run, uint64_t /*point*/) {
    const uint64_t swap_bytes = run.View().swap_bytes;
    const uint32_t resident = run.View().resident_blocks;
    run.Stop();
    ASSERT_FALSE(::testing::Test::HasFailure());
    steps.insert(run.answered_);
    run.AttachAll(/*reattach=*/true);
    ASSERT_FALSE(::testing::Test::HasFailure());
    EXPECT_EQ(run.View().swap_bytes, swap_bytes);
    EXPECT_EQ(run.View().resident_blocks, resident);
    ASSERT_THAT(run.node_->Logged<RestorePart>(), IsEmpty());
    ASSERT_THAT(run.node_->Logged<CreateJobSwap>(), IsEmpty());
    run.TrainTo(run.answered_ + 2);
    ASSERT_EQ(run.node_->fault(), "");
    // Stops the next daemon too.
    run.Stop();
    run.AttachAll(/*reattach=*/true);
    run.TrainTo(run.answered_ + 1);
    ASSERT_EQ(run.node_->fault(), "");
  };
  EXPECT_GE(testing::AtEachPoint<Training>(GetParam(), options, stop_twice), 20U);
  EXPECT_GE(steps.size(), 2U);
}

// After a failed flush the stop waits until the doubtful data is written again.
TEST(NodeStateStopOfDurableSteps, AFailedFlushDelaysIt) {
  for (const JobCase& with :
       {JobCase{kStep, Place::kDram}, JobCase{kStep, Place::kSwap}, JobCase{kEpoch, Place::kSwap},
        JobCase{kEpoch, Place::kHalf}, JobCase{kEpoch, Place::kWeightsOnSwap, true}}) {
    const NodeState::Options options = OptionsOf(with, /*keeps_jobs=*/true);
    uint64_t failed = 0;
    for (uint64_t point = 0;; point += 3) {
      Training run(with, options);
      run.AttachAll();
      for (uint64_t turns = 0; turns < point && run.answered_ < 3; ++turns) run.Turn();
      if (run.answered_ >= 3) break;
      run.FailFlushes(2);
      run.Stop();
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

INSTANTIATE_TEST_SUITE_P(Places, NodeStateStop, ::testing::ValuesIn(kCasesThatGoOn));

class NodeStateStopJob : public ::testing::Test {
 protected:
  explicit NodeStateStopJob(const JobCase& with = {kMemory, Place::kHalf})
      : run_(with, OptionsOf(with, /*keeps_jobs=*/true)) {
    run_.AttachAll();
    run_.TrainTo(1);
    run_.node_->RunTasks();
  }
  void TearDown() override { EXPECT_EQ(run_.node_->fault(), ""); }
  NodeHarness& node() { return *run_.node_; }
  void Ask() {
    node().Send(StopRequested{});
    node().RunTasks();
  }

  Training run_;
};

class NodeStateStopInDram : public NodeStateStopJob {
 protected:
  NodeStateStopInDram() : NodeStateStopJob({kMemory, Place::kDram}) {}
};

TEST_F(NodeStateStopJob, NobodyAttachesAndNothingIsDeletedMeanwhile) {
  Ask();
  ASSERT_TRUE(run_.has_stopped());
  const uint64_t session = node().Attach(run_.layout_, RequestOf(0, run_.with_, true));
  EXPECT_EQ(protocol::IdOf(node().attached(session)->status), ErrorId::kDaemonGone);
  node().Send(DeleteJobRequested{.request = 1, .uid = 1000, .job = "job"});
  EXPECT_EQ(protocol::IdOf(node().Logged<AnswerDelete>().at(0).status), ErrorId::kDaemonGone);
}

TEST_F(NodeStateStopJob, SessionsEndWithTheDaemonWithoutAnAnswer) {
  const uint64_t fetch = node().Fetch(run_.sessions_[0], 0);
  Ask();
  ASSERT_TRUE(run_.has_stopped());
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

TEST_F(NodeStateStopJob, AStepThatGoesOnIsWaitedForUntilTheLimit) {
  node().Gradient(run_.sessions_[0], 0, 2);
  Ask();
  EXPECT_FALSE(run_.has_stopped());
  node().Send(StopDue{});
  node().RunTasks();
  ASSERT_TRUE(run_.has_stopped());
  EXPECT_THAT(run_.stopped().jobs, IsEmpty());
  EXPECT_THAT(run_.stopped().sessions, IsEmpty());
}

TEST_F(NodeStateStopJob, SessionsOfAnOlderGenerationDoNotGoOn) {
  node().End(run_.sessions_[0], EndCause::kLost);
  Ask();
  ASSERT_TRUE(run_.has_stopped());
  EXPECT_THAT(run_.stopped().jobs, SizeIs(1));
  EXPECT_THAT(run_.stopped().sessions, IsEmpty());
}

TEST_F(NodeStateStopInDram, AReaderDoesNotGoOn) {
  ASSERT_OK(node().attached(node().AttachReader(run_.layout_))->status);
  Ask();
  ASSERT_TRUE(run_.has_stopped());
  EXPECT_THAT(run_.stopped().sessions, SizeIs(kRanks));
}

TEST_F(NodeStateStopJob, AnAttemptThatIsOverStaysOver) {
  const uint64_t bad = node().Gradient(run_.sessions_[0], 0, 2, /*finite=*/false);
  node().RunTasks();
  ASSERT_NE(node().ErrorOf(bad), kUnanswered);
  run_.Stop();
  run_.AttachAll(/*reattach=*/true);
  EXPECT_EQ(node().attached(run_.sessions_[1])->attempt, 1U);
  node().SetAttempt(run_.sessions_[1], 0);
  const uint64_t call = node().Step(run_.sessions_[1], 2);
  node().RunTasks();
  EXPECT_EQ(node().ErrorOf(call), ErrorId::kGradDropped);
}

TEST_F(NodeStateStopJob, AJobThatNobodyComesBackToIsDeleted) {
  const uint64_t swap_before = node().state().Node().swap_used_bytes;
  const uint64_t dram_before = node().state().Node().dram_used_bytes;
  run_.Stop();
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

TEST_F(NodeStateStopJob, AnotherProcessOfTheRankGetsAnArenaOfItsOwn) {
  run_.Stop();
  AttachRequest request = RequestOf(0, run_.with_, false);
  request.resume = true;
  ASSERT_OK(node().attached(node().Attach(run_.layout_, request))->status);
  EXPECT_TRUE(node().Logged<CreateJobMemory>().at(0).is_kept);
  EXPECT_FALSE(node().Logged<CreateJobMemory>().at(0).keeps_gradients);
}

TEST_F(NodeStateStopJob, AJobWhoseMemoryCannotBeCompletedIsKeptOn) {
  run_.Stop();
  node().RequestAttach(run_.layout_, RequestOf(0, run_.with_, true));
  const CreateJobMemory made = node().FinishUntil<CreateJobMemory>();
  node().Finish(made.task, protocol::MakeError(ErrorId::kDramLimit, "simulated"));
  node().RunTasks();
  ASSERT_THAT(node().Logged<FreeJob>(), SizeIs(1));
  EXPECT_TRUE(node().Logged<FreeJob>()[0].keeps_arenas);
  run_.AttachAll(/*reattach=*/true);
  run_.TrainTo(2);
}

TEST_F(NodeStateStopJob, AJobThatWasNotRecordedIsNotMadeAnew) {
  NodeHarness empty(run_.options_, kRanks);
  const uint64_t session = empty.Attach(run_.layout_, RequestOf(0, run_.with_, true));
  EXPECT_EQ(protocol::IdOf(empty.attached(session)->status), ErrorId::kJobName);
  EXPECT_FALSE(empty.FindJob("job"));
}

TEST_F(NodeStateStopJob, ALowerLimitIsSaidAndNothingIsLost) {
  NodeState::Options less = run_.options_;
  node().Send(StopRequested{});
  node().RunTasks();
  ASSERT_TRUE(run_.has_stopped());
  less.dram_limit_bytes = less.node_bytes + (64 << 10);
  const auto next = NodeHarness::AfterStop(node(), less);
  const uint64_t session = next->Attach(run_.layout_, RequestOf(0, run_.with_, true));
  EXPECT_EQ(protocol::IdOf(next->attached(session)->status), ErrorId::kDramLimit);
  EXPECT_EQ(next->FindJob("job")->committed_step, 1U);
}

// A daemon of another release may have counted smaller tables, and the job may fill its limit.
TEST_F(NodeStateStopJob, ItGoesOnIfTheNextDaemonCountsLargerTables) {
  const uint64_t used = node().state().Node().dram_used_bytes;
  NodeState::Options less = run_.options_;
  node().Send(StopRequested{});
  node().RunTasks();
  ASSERT_TRUE(run_.has_stopped());
  less.dram_limit_bytes = used - protocol::kPageBytes - 32;
  less.job_percent = 99;  // the share of the job, too, is less than the job has
  run_.node_ = NodeHarness::AfterStop(node(), less);
  run_.AttachAll(/*reattach=*/true);
  ASSERT_FALSE(HasFailure());
  EXPECT_LE(node().state().Node().dram_used_bytes, less.dram_limit_bytes);
  run_.TrainTo(3);
}

void ExpectStopsWithoutJobs(NodeHarness& node) {
  node.Send(StopRequested{});
  node.RunTasks();
  ASSERT_THAT(node.Logged<JobsStopped>(), SizeIs(1));
  EXPECT_THAT(node.Logged<JobsStopped>()[0].jobs, IsEmpty());
  EXPECT_THAT(node.Logged<CommitLedger>(), IsEmpty());
}

TEST_F(NodeStateStopJob, SwapThatIsLostWithTheDaemonKeepsItsJobs) {
  NodeState::Options options = run_.options_;
  options.loses_swap = true;
  NodeHarness half(options, kRanks);
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    half.Attach(run_.layout_, RequestOf(rank, run_.with_, false));
  }
  ExpectStopsWithoutJobs(half);
}

TEST_F(NodeStateStopJob, WithoutAJobNothingIsWritten) {
  NodeHarness empty(run_.options_, kRanks);
  ExpectStopsWithoutJobs(empty);
}

TEST_F(NodeStateStopInDram, NumbersOfLeasesAndJobsGoOn) {
  const uint64_t fetch = node().Fetch(run_.sessions_[0], 0);
  const uint64_t lease = node().answer(fetch)->completion.lease_id;
  run_.Stop();
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
}  // namespace forebay::daemon::node_state_stop_test
