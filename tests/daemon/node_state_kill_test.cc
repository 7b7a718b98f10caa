// SPDX-License-Identifier: Apache-2.0
// Goal    A killed daemon loses no committed step. The next daemon continues from the record in shared memory, with the same
//         arenas and slots, at whatever point the kill happened.
// Method  The harness makes the daemon's records, and the next daemon reads them after each turn of some steps. The model
//         retains the arenas. The model reports a fault if a job continues with blocks other than the published ones, or if it
//         updates a block twice or from other sums. Ranks attach again and repeat the unanswered step.

#include <cstdint>
#include <memory>
#include <set>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "protocol/wire.h"
#include "tests/support/job_cases.h"
#include "tests/support/points.h"
#include "tests/support/status_test.h"
#include "tests/support/turned_training.h"

namespace forebay::daemon::node_state_kill_test {
namespace {

using ::forebay::testing::AttachRequest;
using ::forebay::testing::JobCase;
using ::forebay::testing::kCasesThatGoOn;
using ::forebay::testing::kMemory;
using ::forebay::testing::kStep;
using ::forebay::testing::NodeHarness;
using ::forebay::testing::OptionsOf;
using ::forebay::testing::Place;
using ::forebay::testing::RequestOf;
using ::forebay::testing::Training;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class NodeStateKill : public ::testing::TestWithParam<JobCase> {};

TEST_P(NodeStateKill, AtAnyPointTheNextDaemonGoesOnWithTheNewestStep) {
  const NodeState::Options options = OptionsOf(GetParam(), /*keeps_jobs=*/true);
  std::set<uint64_t> steps;
  uint64_t in_update = 0;
  const auto kill_twice = [&](Training& run, uint64_t /*point*/) {
    const uint32_t resident = run.View().resident_blocks;
    ASSERT_EQ(run.View().sums_on_swap_bytes > 0, GetParam().place == Place::kSumsOnSwap);
    ASSERT_EQ(run.View().weights_on_swap_bytes > 0, GetParam().place >= Place::kWeightsOnSwap);
    const bool is_updating = run.node_->model().is_updating(run.View().id);
    ASSERT_TRUE(run.Kill());
    in_update += is_updating ? 1 : 0;
    run.Resume();
    ASSERT_FALSE(::testing::Test::HasFailure());
    run.AttachAll(/*reattach=*/true);
    steps.insert(run.answered_);
    ASSERT_FALSE(::testing::Test::HasFailure());
    EXPECT_EQ(run.View().resident_blocks, resident);
    ASSERT_THAT(run.node_->Logged<RestorePart>(), IsEmpty());
    run.TrainTo(run.answered_ + 2);
    ASSERT_EQ(run.node_->fault(), "");
    // Kills the next daemon too.
    ASSERT_TRUE(run.Kill());
    run.Resume();
    run.AttachAll(/*reattach=*/true);
    run.TrainTo(run.answered_ + 1);
    ASSERT_EQ(run.node_->fault(), "");
  };
  EXPECT_GE(testing::AtEachPoint<Training>(GetParam(), options, kill_twice), 20U);
  EXPECT_GT(in_update, 0U);
  EXPECT_GE(steps.size(), 3U);
}

// The number of updates of a parameter is only in the daemon's tables and in the record.
TEST_P(NodeStateKill, StatesThatWereWrittenBetweenStepsAreThere) {
  const NodeState::Options options = OptionsOf(GetParam(), /*keeps_jobs=*/true);
  Training run(GetParam(), options);
  run.AttachAll();
  run.TrainTo(2);
  run.node_->RunTasks();
  const auto owner = [&](uint32_t partition) {
    return run.sessions_[run.layout_->is_shared() ? 0 : run.layout_->partitions()[partition].owner];
  };
  for (const protocol::BoxPlace& place : run.layout_->boxes()) {
    if (!run.layout_->params()[place.box.param].trainable) continue;
    const uint64_t tag =
        run.node_->WriteState(owner(place.partition), place.partition, place.partition_elem,
                              place.partition_elem + place.box.elems(), /*state=*/1);
    run.node_->RunTasks();
    // A write is refused if swap is full because durable steps retain its slots. The block then stays unchanged.
    const protocol::ErrorId met = run.node_->ErrorOf(tag);
    const bool may_be_full = GetParam().place == Place::kSumsOnSwap &&
                             GetParam().durability.level != protocol::DurabilityLevel::kMemory;
    ASSERT_TRUE(met == protocol::ErrorId::kNone ||
                (may_be_full && met == protocol::ErrorId::kSwapNospc))
        << static_cast<int>(met);
  }
  const uint64_t tag = run.node_->WriteUpdates(run.sessions_[1], 0, 41);
  run.node_->RunTasks();
  ASSERT_EQ(run.node_->ErrorOf(tag), protocol::ErrorId::kNone);
  const auto updates = [&] {
    const uint64_t read = run.node_->ReadState(run.sessions_[0], 0, 0, 1);
    run.node_->RunTasks();
    EXPECT_EQ(run.node_->ErrorOf(read), protocol::ErrorId::kNone);
    return run.node_->answer(read)->completion.offset_bytes;
  };
  ASSERT_TRUE(run.Kill());
  run.Resume();
  run.AttachAll(/*reattach=*/true);
  EXPECT_EQ(updates(), 41U);
  run.TrainTo(run.answered_ + 1);
  run.node_->RunTasks();
  EXPECT_EQ(updates(), 42U);
  ASSERT_EQ(run.node_->fault(), "");
}

// Each daemon that continues the update is killed too, some tasks later than the daemon before.
TEST_P(NodeStateKill, AnUpdateSurvivesOneKillAfterTheOther) {
  const NodeState::Options options = OptionsOf(GetParam(), /*keeps_jobs=*/true);
  for (size_t tasks = 1; tasks <= 4; ++tasks) {
    Training run(GetParam(), options);
    run.AttachAll();
    run.TrainTo(1);
    while (!run.node_->model().is_updating(run.View().id)) run.Turn();
    for (int kills = 0; kills < 100; ++kills) {
      ASSERT_TRUE(run.Kill());
      ASSERT_EQ(run.node_->fault(), "");
      if (!run.node_->model().is_updating(run.View().id)) break;
      run.Resume(tasks + (kills >= 6 ? 3 : 0));
    }
    run.Resume();
    ASSERT_FALSE(run.node_->model().is_updating(run.View().id));
    run.AttachAll(/*reattach=*/true);
    run.TrainTo(run.answered_ + 2);
    ASSERT_EQ(run.node_->fault(), "");
  }
}

// Memory that earlier sessions have mapped is lost, so no session can reattach to a job from the disk. Nothing is read for it.
TEST(NodeStateKillOfDurableJobs, ASessionIsNotGivenAJobOfTheDisk) {
  const JobCase with{kStep, Place::kSwap};
  Training run(with, OptionsOf(with, /*keeps_jobs=*/true));
  run.AttachAll();
  run.TrainTo(2);
  const auto next = NodeHarness::Restart(*run.node_, run.options_);
  const uint64_t session = next->Attach(run.layout_, RequestOf(0, with, /*reattach=*/true));
  EXPECT_EQ(protocol::IdOf(next->attached(session)->status), protocol::ErrorId::kJobName);
  EXPECT_THAT(next->Logged<CreateJobMemory>(), IsEmpty());
  AttachRequest anew = RequestOf(0, with, /*reattach=*/false);
  anew.resume = true;
  EXPECT_OK(next->attached(next->Attach(run.layout_, anew))->status);
}

// A retained job has places for the ranks of its own world only, so that a session of another world is refused.
TEST(NodeStateKillOfAWorld, ASessionOfAnotherWorldIsRefused) {
  const JobCase with{kMemory, Place::kDram};
  for (const bool is_killed : {true, false}) {
    Training run(with, OptionsOf(with, /*keeps_jobs=*/true));
    run.AttachAll();
    run.TrainTo(2);
    if (is_killed) {
      ASSERT_TRUE(run.Kill());
    } else {
      run.Stop();
    }
    AttachRequest request = RequestOf(0, with, /*reattach=*/true);
    request.world_size = 4;
    request.rank = 3;
    const uint64_t session = run.node_->Attach(run.layout_, request);
    EXPECT_EQ(protocol::IdOf(run.node_->attached(session)->status), protocol::ErrorId::kRank);
    run.AttachAll(/*reattach=*/true);
    run.TrainTo(run.answered_ + 1);
    EXPECT_EQ(run.node_->fault(), "");
  }
}

// Rank 1 ends before it reattaches to the next daemon. Rank 0 must not wait for it.
class NodeStateRankEnds : public ::testing::TestWithParam<bool> {
 protected:
  NodeStateRankEnds() : run_(kWith, OptionsOf(kWith, /*keeps_jobs=*/true)) {
    run_.AttachAll();
    run_.TrainTo(2);
    if (GetParam()) {
      EXPECT_TRUE(run_.Kill());
    } else {
      run_.Stop();
    }
  }
  ~NodeStateRankEnds() override { EXPECT_EQ(node().fault(), ""); }

  NodeHarness& node() { return *run_.node_; }
  RankEnded Ended(bool has_detached) {
    return {.job = run_.View().id, .rank = 1, .has_detached = has_detached};
  }
  uint64_t Request(uint32_t rank, bool reattach) {
    return node().Attach(run_.layout_, RequestOf(rank, kWith, reattach));
  }
  uint64_t Attach(uint32_t rank, bool reattach) {
    const uint64_t session = Request(rank, reattach);
    EXPECT_OK(node().attached(session)->status);
    node().SetAttempt(session, node().attached(session)->attempt);
    return session;
  }
  protocol::ErrorId ErrorOfAttach(uint64_t session) {
    return protocol::IdOf(node().attached(session)->status);
  }
  void Deliver(uint64_t session, uint32_t rank) {
    for (uint32_t i = 0; i < run_.layout_->partitions().size(); ++i) {
      if (run_.layout_->partitions()[i].owner == rank) node().Gradient(session, i, 3);
    }
  }
  uint64_t Step(uint64_t session) {
    const uint64_t tag = node().Step(session, 3);
    node().RunTasks();
    return tag;
  }
  // Delivers step 3 from sessions `first` (rank 0) and `second` (rank 1), and expects both calls to succeed.
  void ExpectAStepOf(uint64_t first, uint64_t second) {
    Deliver(second, 1);
    const uint64_t call = Step(second);
    Deliver(first, 0);
    EXPECT_EQ(node().ErrorOf(Step(first)), protocol::ErrorId::kNone);
    EXPECT_EQ(node().ErrorOf(call), protocol::ErrorId::kNone);
  }

  static constexpr JobCase kWith{kMemory, Place::kDram};
  Training run_;
};

TEST_P(NodeStateRankEnds, ANewGenerationBegins) {
  node().Send(Ended(false));  // No rank has reattached yet.
  const uint64_t before = Attach(0, /*reattach=*/true);
  Deliver(before, 0);
  const uint64_t waiting = Step(before);
  EXPECT_EQ(node().ErrorOf(waiting), testing::kUnanswered);
  for (int look = 0; look < 2; ++look) node().Send(Ended(false));
  EXPECT_EQ(node().ErrorOf(waiting), protocol::ErrorId::kRankLost);
  EXPECT_EQ(node().ErrorOf(Step(before)), protocol::ErrorId::kRankLost);
  // Rank 1's new process attaches first.
  const uint64_t second = Attach(1, /*reattach=*/false);
  node().Send(Ended(false));  // A late report of an earlier check.
  const uint64_t first = Attach(0, /*reattach=*/false);
  ExpectAStepOf(first, second);
}

TEST_P(NodeStateRankEnds, WhoComesBackAfterOthersHaveAttachedAnewIsRefused) {
  const uint64_t second = Attach(1, /*reattach=*/false);
  for (const uint32_t rank : {0U, 1U}) {
    EXPECT_EQ(ErrorOfAttach(Request(rank, /*reattach=*/true)), protocol::ErrorId::kRankLost);
  }
  const uint64_t first = Attach(0, /*reattach=*/false);
  ExpectAStepOf(first, second);
}

TEST_P(NodeStateRankEnds, WhoseArenaIsAnotherOnesIsRefused) {
  const auto error_of = [&](bool is_left_behind) {
    AttachRequest request = RequestOf(0, kWith, /*reattach=*/true);
    request.is_left_behind = is_left_behind;
    return ErrorOfAttach(node().Attach(run_.layout_, request));
  };
  for (int time = 0; time < 2; ++time) {  // First the job has no session, then it has one.
    EXPECT_EQ(error_of(true), protocol::ErrorId::kRankLost);
    EXPECT_EQ(error_of(false), protocol::ErrorId::kNone);
  }
}

TEST_P(NodeStateRankEnds, WhoComesBackAfterARankWasLostIsRefused) {
  node().End(Attach(1, /*reattach=*/true), EndCause::kLost);
  node().RunTasks();
  EXPECT_EQ(ErrorOfAttach(Request(0, /*reattach=*/true)), protocol::ErrorId::kRankLost);
}

TEST_P(NodeStateRankEnds, OnesOfAGenerationThatIsOverConcernNobody) {
  const uint64_t before = Attach(0, /*reattach=*/true);
  node().Send(Ended(false));
  const uint64_t second = Attach(1, /*reattach=*/false);
  node().End(before, EndCause::kLost);
  node().RunTasks();
  EXPECT_TRUE(node().Logged<CloseSession>().back().is_of_old_generation);
  node().Send(RankEnded{.job = run_.View().id, .rank = 0});
  const uint64_t first = Attach(0, /*reattach=*/false);
  ExpectAStepOf(first, second);
  node().End(second, EndCause::kLost);
  node().RunTasks();
  EXPECT_FALSE(node().Logged<CloseSession>().back().is_of_old_generation);
}

// Rank 1 has ended and is to attach again. A daemon that is asked to stop does not wait for rank 1, which can attach to the
// next daemon.
TEST_P(NodeStateRankEnds, ADaemonThatIsAskedToStopDoesNotWaitForOneThatIsToAttachAnew) {
  const uint64_t before = Attach(0, /*reattach=*/true);
  node().Send(Ended(false));
  node().End(before, EndCause::kDetached);
  node().RunTasks();
  const uint64_t first = Attach(0, /*reattach=*/false);
  Deliver(first, 0);
  node().RunTasks();
  node().Send(StopRequested{});
  node().RunTasks();
  ASSERT_TRUE(run_.has_stopped());
  EXPECT_THAT(run_.stopped().jobs, SizeIs(1));
}

TEST_P(NodeStateRankEnds, AnotherRunHasTheJob) {
  AttachRequest request = RequestOf(0, kWith, /*reattach=*/true);
  request.run = "another";
  EXPECT_EQ(ErrorOfAttach(node().Attach(run_.layout_, request)), protocol::ErrorId::kJobExists);
  Attach(0, /*reattach=*/true);
  EXPECT_EQ(ErrorOfAttach(node().Attach(run_.layout_, request)), protocol::ErrorId::kJobExists);
}

TEST_P(NodeStateRankEnds, ADetachStaysOne) {
  const uint64_t first = Attach(0, /*reattach=*/true);
  Deliver(first, 0);
  const uint64_t waiting = Step(first);
  for (int look = 0; look < 2; ++look) node().Send(Ended(true));
  EXPECT_EQ(node().ErrorOf(waiting), protocol::ErrorId::kRankLost);
  const uint64_t second = Attach(1, /*reattach=*/false);
  Deliver(second, 1);
  const uint64_t call = Step(second);
  EXPECT_EQ(node().ErrorOf(Step(first)), protocol::ErrorId::kNone);
  EXPECT_EQ(node().ErrorOf(call), protocol::ErrorId::kNone);
}

TEST_P(NodeStateRankEnds, ADetachIsKnownToWhoComesBackLaterAndNotToANewRun) {
  node().End(Attach(1, /*reattach=*/true), EndCause::kDetached);
  node().RunTasks();
  const uint64_t before = Attach(0, /*reattach=*/true);
  Deliver(before, 0);
  EXPECT_EQ(node().ErrorOf(Step(before)), protocol::ErrorId::kRankLost);
  node().End(before, EndCause::kDetached);
  node().RunTasks();
  const uint64_t first = Attach(0, /*reattach=*/false);
  Deliver(first, 0);
  const uint64_t call = Step(first);
  EXPECT_EQ(node().ErrorOf(call), testing::kUnanswered);
  const uint64_t second = Attach(1, /*reattach=*/false);
  Deliver(second, 1);
  EXPECT_EQ(node().ErrorOf(Step(second)), protocol::ErrorId::kNone);
  EXPECT_EQ(node().ErrorOf(call), protocol::ErrorId::kNone);
}

// Rank 1 has detached, so that rank 0's gradients are discarded. The stop does not wait for a step.
TEST_P(NodeStateRankEnds, ADaemonThatIsAskedToStopDoesNotWaitForOneThatHasDetached) {
  const uint64_t first = Attach(0, /*reattach=*/true);
  Deliver(first, 0);
  node().Send(Ended(true));
  node().RunTasks();
  node().Send(StopRequested{});
  node().RunTasks();
  ASSERT_TRUE(run_.has_stopped());
  ASSERT_THAT(run_.stopped().jobs, SizeIs(1));
  run_.NextDaemon();
  const uint64_t next = Request(0, /*reattach=*/true);
  EXPECT_GT(node().attached(next)->attempt, 0U);
}

INSTANTIATE_TEST_SUITE_P(KilledOrNot, NodeStateRankEnds, ::testing::Bool());

// The leases of a killed daemon remain valid until their rank reattaches. The rank may read the leased weights until then, so
// the next daemon must not overwrite them.
TEST(NodeStateKillOfWeightsOnSwap, LeasesKeepTheirPlaces) {
  const JobCase with{kMemory, Place::kWeightsOnSwap};
  for (const bool comes_back : {true, false}) {
    Training run(with, OptionsOf(with, /*keeps_jobs=*/true));
    run.AttachAll();
    run.TrainTo(2);
    ASSERT_GT(run.View().weights_on_swap_bytes, 0U);
    const auto fetch = [&](NodeHarness& node, uint64_t session, uint32_t partition) {
      const uint64_t tag = node.Fetch(session, partition);
      node.RunTasks();
      EXPECT_EQ(node.ErrorOf(tag), protocol::ErrorId::kNone);
      return node.answer(tag)->completion;
    };
    std::vector<uint32_t> of_rank[2];
    for (uint32_t i = 0; i < run.layout_->partitions().size(); ++i) {
      of_rank[run.layout_->partitions()[i].owner].push_back(i);
    }
    const protocol::Completion held = fetch(*run.node_, run.sessions_[0], of_rank[0].front());
    run.node_->model().HoldWeights(run.sessions_[0], held);
    const protocol::Completion other = fetch(*run.node_, run.sessions_[0], of_rank[0].back());
    ASSERT_TRUE(run.Kill());
    NodeHarness& next = *run.node_;
    const auto attach = [&](uint32_t rank, std::vector<uint64_t> leases) {
      AttachRequest request = RequestOf(rank, with, /*reattach=*/true);
      request.held_leases = std::move(leases);
      return next.Attach(run.layout_, request);
    };
    // Rank 1 reattaches first and fetches each of its partitions twice.
    const uint64_t second = attach(1, {});
    for (int round = 0; round < 2; ++round) {
      for (const uint32_t partition : of_rank[1]) {
        next.Release(second, fetch(next, second, partition).lease_id);
        next.RunTasks();
      }
    }
    EXPECT_EQ(next.fault(), "");
    EXPECT_EQ(run.View().leases, 2U);
    // Leases that rank 0 does not name when it reattaches have ended.
    const uint64_t first =
        attach(0, comes_back ? std::vector<uint64_t>{held.lease_id} : std::vector<uint64_t>{});
    EXPECT_EQ(next.attached(first)->leases, comes_back ? 1U : 0U);
    EXPECT_EQ(run.View().leases, comes_back ? 1U : 0U);
    const uint64_t late = next.Release(first, other.lease_id);
    next.RunTasks();
    EXPECT_EQ(next.ErrorOf(late), protocol::ErrorId::kLease);
    if (comes_back) {
      // The held weights stay at their place for a further fetch.
      EXPECT_EQ(fetch(next, first, of_rank[0].front()).offset_bytes, held.offset_bytes);
      const uint64_t released = next.Release(first, held.lease_id);
      next.RunTasks();
      EXPECT_EQ(next.ErrorOf(released), protocol::ErrorId::kNone);
    }
    next.model().ReleaseWeights(run.sessions_[0], held.lease_id);
    EXPECT_EQ(next.fault(), "");
  }
}

// A rank can release its leases only after the update has ended. So leases of a rank that has not reattached must not hold up
// the update.
TEST(NodeStateKillOfWeightsOnSwap, NobodysLeasesHoldNoUpdateUp) {
  const JobCase with{kMemory, Place::kSumsOnSwap};  // A larger job than in the other tests.
  NodeState::Options options = OptionsOf(with, /*keeps_jobs=*/true);
  const uint64_t all_on_swap = Training(with, options).WeightsOnSwapBytes();
  do {  // Raises the DRAM limit until the first group's weights are in DRAM.
    options.dram_limit_bytes += protocol::kPageBytes;
  } while (Training(with, options).WeightsOnSwapBytes() + (32 << 10) > all_on_swap);
  uint64_t held = 0;
  for (uint64_t point = 0;; ++point) {
    Training run(with, options);
    ASSERT_LT(run.WeightsOnSwapBytes(), all_on_swap);
    ASSERT_GT(run.WeightsOnSwapBytes(), 0U);
    run.HoldFirstGroup();
    run.node_->set_answered_when(protocol::StepAnswer::kCommitted);
    for (uint64_t turn = 0; turn < point && run.answered_ < 3; ++turn) run.Turn();
    if (run.answered_ >= 3) break;
    const bool is_updating = run.node_->model().is_updating(run.View().id);
    held += is_updating && run.holds_leases() ? 1 : 0;
    ASSERT_TRUE(run.Kill()) << "point " << point;
    run.Resume();
    ASSERT_FALSE(run.node_->model().is_updating(run.View().id)) << "point " << point;
    run.AttachAll(/*reattach=*/true);
    run.TrainTo(run.answered_ + 2);
    ASSERT_EQ(run.node_->fault(), "") << "point " << point;
  }
  EXPECT_GT(held, 3U);
}

// A rank died with the daemon and does not reattach. Its leases end when a fetch needs their DRAM and the lease timer expires.
TEST(NodeStateKillOfWeightsOnSwap, NobodysLeasesEndWhereAFetchWaitsForTheirRoom) {
  const JobCase with{kMemory, Place::kWeightsOnSwap};
  // Fetches all partitions that `rank` owns.
  const auto fetch_own = [layout = LayoutOf(with)](NodeHarness& node, uint64_t session,
                                                   uint32_t rank) {
    std::vector<uint64_t> tags;
    for (uint32_t i = 0; i < layout->partitions().size(); ++i) {
      if (layout->partitions()[i].owner == rank) tags.push_back(node.Fetch(session, i));
    }
    node.RunTasks();
    return tags;
  };
  NodeState::Options options = OptionsOf(with, /*keeps_jobs=*/true);
  std::unique_ptr<Training> training;
  AttachRequest gone = RequestOf(0, with, /*reattach=*/true);
  const auto leases_all = [&] {
    gone.held_leases.clear();
    for (const uint64_t tag : fetch_own(*training->node_, training->sessions_[0], 0)) {
      if (training->node_->ErrorOf(tag) != protocol::ErrorId::kNone) return false;
      gone.held_leases.push_back(training->node_->answer(tag)->completion.lease_id);
    }
    return true;
  };
  do {  // Raises the DRAM limit until one rank can lease all of its weights.
    training = std::make_unique<Training>(with, options);
    training->AttachAll();
    training->TrainTo(2);
    options.dram_limit_bytes += protocol::kPageBytes;
  } while (!leases_all());
  Training& run = *training;
  ASSERT_TRUE(run.Kill());
  NodeHarness& next = *run.node_;
  const uint64_t second = next.Attach(run.layout_, RequestOf(1, with, /*reattach=*/true));
  const std::vector<uint64_t> tags = fetch_own(next, second, 1);
  const auto waits = [&next](uint64_t tag) { return next.answer(tag) == nullptr; };
  ASSERT_TRUE(std::ranges::any_of(tags, waits));
  ASSERT_THAT(next.Logged<StartLeaseTimer>(), SizeIs(1)) << "one for all of them";
  EXPECT_EQ(next.Logged<StartLeaseTimer>()[0].step, 0U);
  EXPECT_EQ(run.View().leases, gone.held_leases.size() + tags.size() -
                                   static_cast<uint64_t>(std::ranges::count_if(tags, waits)));
  next.Send(LeaseTimeExpired{.job = run.View().id, .step = 0});
  next.RunTasks();
  for (const uint64_t tag : tags) EXPECT_EQ(next.ErrorOf(tag), protocol::ErrorId::kNone);
  // Rank 0 attaches too late: none of its leases is valid.
  EXPECT_EQ(next.attached(next.Attach(run.layout_, gone))->leases, 0U);
  EXPECT_EQ(run.View().leases, tags.size());
  EXPECT_EQ(next.fault(), "");
}

// A planned restart does not wait for a rank that can no longer attach. The next daemon retains the leases of that rank too.
TEST(NodeStateKillOfWeightsOnSwap, NobodysLeasesOutliveAStop) {
  const JobCase with{kMemory, Place::kWeightsOnSwap};
  Training run(with, OptionsOf(with, /*keeps_jobs=*/true));
  run.AttachAll();
  run.TrainTo(2);
  const uint64_t tag = run.node_->Fetch(run.sessions_[0], 0);
  run.node_->RunTasks();
  const protocol::Completion held = run.node_->answer(tag)->completion;
  run.node_->model().HoldWeights(run.sessions_[0], held);
  ASSERT_TRUE(run.Kill());
  run.node_->Attach(run.layout_, RequestOf(1, with, /*reattach=*/true));
  run.node_->Send(StopRequested{});
  run.node_->RunTasks();
  ASSERT_TRUE(run.has_stopped());
  run.NextDaemon();
  run.node_->Attach(run.layout_, RequestOf(1, with, /*reattach=*/true));
  AttachRequest request = RequestOf(0, with, /*reattach=*/true);
  request.held_leases = {held.lease_id};
  const uint64_t session = run.node_->Attach(run.layout_, request);
  EXPECT_EQ(run.node_->attached(session)->leases, 1U);
  const uint64_t released = run.node_->Release(session, held.lease_id);
  run.node_->RunTasks();
  EXPECT_EQ(run.node_->ErrorOf(released), protocol::ErrorId::kNone);
  EXPECT_EQ(run.node_->fault(), "");
}

// The next daemon still reports the error of an overflow.
TEST(NodeStateKillOfAnOverflow, IsReportedByTheNextDaemon) {
  const JobCase with{kMemory, Place::kDram};
  Training run(with, OptionsOf(with, /*keeps_jobs=*/true));
  run.AttachAll();
  run.TrainTo(1);
  run.node_->model().set_masters_overflow(1);
  for (const uint64_t session : run.sessions_) {
    for (uint32_t i = 0; i < run.layout_->partitions().size(); ++i) {
      if (run.layout_->partitions()[i].owner == (session == run.sessions_[0] ? 0U : 1U)) {
        run.node_->Gradient(session, i, 2);
      }
    }
  }
  run.node_->set_answered_when(protocol::StepAnswer::kCommitted);
  EXPECT_EQ(run.node_->StepAll(run.sessions_, 2)[0], protocol::ErrorId::kNone);
  auto next = NodeHarness::AfterKill(*run.node_, run.options_);
  ASSERT_NE(next, nullptr);
  std::vector<uint64_t> sessions;
  for (uint32_t rank = 0; rank < 2; ++rank) {
    sessions.push_back(next->Attach(run.layout_, RequestOf(rank, with, /*reattach=*/true)));
  }
  EXPECT_EQ(next->StepAll(sessions, 3)[0], protocol::ErrorId::kOverflow);
}

// The next daemon has a smaller DRAM limit, and cannot continue the update. It logs the reason and recovers the job's last
// durable step. A job without durable steps is lost.
TEST(NodeStateKillInAnUpdate, ThatCannotGoOnLeavesWhatIsDurable) {
  for (const protocol::Durability& level : {kMemory, kStep}) {
    for (const Place place : {Place::kDram, Place::kSwap}) {
      const JobCase with{level, place};
      Training run(with, OptionsOf(with, /*keeps_jobs=*/true));
      run.AttachAll();
      run.TrainTo(2);
      while (!run.node_->model().is_updating(run.View().id)) run.Turn();
      NodeState::Options less = run.options_;
      less.dram_limit_bytes = less.node_bytes + (64 << 10);
      const auto next = NodeHarness::AfterKill(*run.node_, less);
      ASSERT_NE(next, nullptr);
      const auto given_up = next->Logged<UpdateNotResumed>();
      ASSERT_THAT(given_up, SizeIs(1));
      EXPECT_EQ(given_up[0].job, "1000:job");
      EXPECT_EQ(given_up[0].step, 3U);
      EXPECT_EQ(protocol::IdOf(given_up[0].reason), protocol::ErrorId::kDramLimit);
      EXPECT_THAT(next->Logged<FreeJob>(), SizeIs(1));
      const auto left = next->FindJob("job");
      EXPECT_EQ(left.has_value(), level == kStep);
      if (left) {
        EXPECT_EQ(left->committed_step, 2U);
      } else {
        EXPECT_EQ(next->state().Node().swap_used_bytes, 0U);
      }
      EXPECT_EQ(next->fault(), "");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Places, NodeStateKill, ::testing::ValuesIn(kCasesThatGoOn));

}  // namespace
}  // namespace forebay::daemon::node_state_kill_test
