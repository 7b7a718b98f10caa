// Goal    A daemon that is killed loses no committed step: the next one goes on from the record that is in shared memory,
//         with the same arenas and slots, wherever it was between two updates.
// Method  The harness, with the records that the daemon makes, read after each turn of some steps as the next daemon reads
//         them; its model keeps the arenas, and faults where a job goes on with other blocks than were published, or out of
//         the middle of an update. Ranks attach again and repeat the step that nobody has answered.

#include <cstdint>
#include <set>

#include "daemon/core/limits.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/job_cases.h"
#include "tests/support/turned_training.h"

namespace forebay::daemon {
namespace {

using ::forebay::testing::JobCase;
using ::forebay::testing::kEpoch;
using ::forebay::testing::kMemory;
using ::forebay::testing::kStep;
using ::forebay::testing::OptionsOf;
using ::forebay::testing::Place;
using ::forebay::testing::Training;
using ::testing::IsEmpty;

NodeState::Options KeepingOptionsOf(const JobCase& with) {
  NodeState::Options options = OptionsOf(with);
  options.keeps_jobs = true;
  return options;
}

class NodeStateKill : public ::testing::TestWithParam<JobCase> {};

TEST_P(NodeStateKill, AtAnyPointTheNextDaemonGoesOnWithTheNewestStep) {
  const NodeState::Options options = KeepingOptionsOf(GetParam());
  constexpr uint64_t kSteps = 3;
  std::set<uint64_t> steps;
  uint64_t points = 0;
  uint64_t in_update = 0;
  for (uint64_t point = 0;; ++point) {
    Training run(GetParam(), options);
    run.AttachAll();
    uint64_t turns = 0;
    for (; turns < point && run.answered_ < kSteps; ++turns) run.Turn();
    if (run.answered_ >= kSteps) break;
    ++points;
    const uint32_t resident = run.View().resident_blocks;
    if (!run.Kill()) {
      ++in_update;
      continue;
    }
    ASSERT_FALSE(::testing::Test::HasFailure()) << "point " << point;
    run.AttachAll(/*reattach=*/true);
    steps.insert(run.answered_);
    ASSERT_FALSE(::testing::Test::HasFailure()) << "point " << point;
    EXPECT_EQ(run.View().resident_blocks, resident);
    ASSERT_THAT(run.node_->Logged<RestorePart>(), IsEmpty());
    run.TrainTo(run.answered_ + 2);
    ASSERT_EQ(run.node_->fault(), "") << "point " << point;
    // And once more.
    if (!run.Kill()) continue;
    run.AttachAll(/*reattach=*/true);
    run.TrainTo(run.answered_ + 1);
    ASSERT_EQ(run.node_->fault(), "") << "point " << point;
    ASSERT_FALSE(::testing::Test::HasFailure()) << "point " << point;
  }
  EXPECT_GT(points, 40U);
  EXPECT_LT(in_update, points / 2);
  EXPECT_GE(steps.size(), 3U);
}

INSTANTIATE_TEST_SUITE_P(
    Places, NodeStateKill,
    ::testing::Values(JobCase{kMemory, Place::kDram}, JobCase{kMemory, Place::kSwap},
                      JobCase{kMemory, Place::kHalf}, JobCase{kMemory, Place::kWeightsOnSwap},
                      JobCase{kMemory, Place::kHalf, true},
                      JobCase{kMemory, Place::kWeightsOnSwap, true},
                      JobCase{kMemory, Place::kDram, false, true},
                      JobCase{kMemory, Place::kHalf, false, true}, JobCase{kStep, Place::kDram},
                      JobCase{kStep, Place::kHalf}, JobCase{kEpoch, Place::kDram},
                      JobCase{kEpoch, Place::kHalf, true}, JobCase{kEpoch, Place::kWeightsOnSwap}));

}  // namespace
}  // namespace forebay::daemon
