// SPDX-License-Identifier: Apache-2.0
// Goal    Work in parts runs every part once, on workers. Its outcome is reported once, on the loop thread and after the last
//         part, and sees the writes of all parts.
// Method  Real workers. The test acts as the loop, and waits for the wake-up descriptor.

#include "daemon/exec/task_runner.h"

#include <poll.h>

#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/support/status_test.h"

namespace forebay::daemon::task_runner_test {
namespace {

constexpr int kLimitMs = 60'000;

class TaskRunnerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto runner = TaskRunner::Create({.update = {.threads = 2, .queue_tasks = 4}});
    ASSERT_OK(runner);
    runner_ = *std::move(runner);
  }

  // Runs the loop until no task is in flight. Returns false if that takes too long.
  bool RunUntilIdle() {
    while (runner_->in_flight() > 0) {
      pollfd wake{.fd = runner_->wake_fd(), .events = POLLIN, .revents = 0};
      if (::poll(&wake, 1, kLimitMs) <= 0) return false;
      runner_->RunFinished();
    }
    return true;
  }

  std::unique_ptr<TaskRunner> runner_;
};

TEST_F(TaskRunnerTest, EveryPartRunsOnceBeforeTheOutcome) {
  // 100 parts are more than the queue of four holds.
  for (const size_t parts : {1U, 2U, 3U, 100U}) {
    std::vector<int> runs(parts, 0);
    int outcomes = 0;
    const auto loop = std::this_thread::get_id();
    runner_->PostParts(
        PoolId::kUpdate, parts,
        [&](size_t part) {
          EXPECT_NE(std::this_thread::get_id(), loop);
          ++runs[part];
        },
        [&] {
          EXPECT_EQ(std::this_thread::get_id(), loop);
          EXPECT_EQ(runs, std::vector<int>(parts, 1));
          ++outcomes;
        });
    EXPECT_EQ(runner_->in_flight(), 1U);
    ASSERT_TRUE(RunUntilIdle());
    EXPECT_EQ(outcomes, 1);
  }
}

TEST_F(TaskRunnerTest, WhatTheWorkHoldsIsLetGoBeforeItsOutcome) {
  const auto held = std::make_shared<int>(0);
  long users = 0;
  runner_->PostParts(
      PoolId::kUpdate, 8, [held](size_t) {},
      [&, watched = held.get()] {
        EXPECT_EQ(watched, held.get());
        users = held.use_count();
      });
  ASSERT_TRUE(RunUntilIdle());
  EXPECT_EQ(users, 1);
}

TEST_F(TaskRunnerTest, PartsOfManyTasksMixWithWholeOnes) {
  std::vector<uint64_t> sums(50, 0);
  uint64_t whole = 0;
  for (uint64_t& sum : sums) {
    const auto found = std::make_shared<std::vector<uint64_t>>(3);
    runner_->PostParts(
        PoolId::kUpdate, 3, [found](size_t part) { (*found)[part] = part + 1; },
        [&sum, found] { sum = std::accumulate(found->begin(), found->end(), uint64_t{0}); });
    runner_->Post(PoolId::kUpdate,
                  [&whole]() -> TaskRunner::Then { return [&whole] { ++whole; }; });
  }
  ASSERT_TRUE(RunUntilIdle());
  EXPECT_EQ(sums, std::vector<uint64_t>(50, 6));
  EXPECT_EQ(whole, 50U);
}

}  // namespace
}  // namespace forebay::daemon::task_runner_test
