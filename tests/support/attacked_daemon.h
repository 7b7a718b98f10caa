// SPDX-License-Identifier: Apache-2.0
// A daemon with a job that does everything right, beside which a test does something wrong.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/daemon_process.h"
#include "tests/support/healthy_job.h"
#include "tests/support/status_test.h"
#include "tests/support/training.h"

namespace forebay::testing {

// In the end the daemon lives, its jobs train on to the bits that are expected, and it stops in good
// order.
class AttackedDaemon : public ::testing::Test {
 protected:
  // `prepare`: see DaemonProcess::Start.
  explicit AttackedDaemon(Prepare prepare = {}) : prepare_(std::move(prepare)) {}

  static constexpr JobShape kShape = {.world_size = 1, .groups = 2, .group_elems = 1000};

  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(daemon_, DaemonProcess::Start(socket_, {}, prepare_));
    ASSERT_OK_AND_ASSIGN(healthy_, HealthyJob::Attach({.socket = socket_}));
    ASSERT_OK(healthy_->TrainOneMoreStep());
  }

  void TearDown() override {
    ASSERT_TRUE(daemon_->IsAlive());
    EXPECT_OK(healthy_->TrainOneMoreStep());
    for (const std::string& job : ready_jobs_) {
      SCOPED_TRACE(job);
      EXPECT_OK(TrainsOneMoreStep({.socket = socket_, .job = job, .shape = kShape}));
    }
    const Ended ended = daemon_->Stop();
    EXPECT_EQ(ended.exit_code, 0);
    for (const std::string& line : logged_) EXPECT_THAT(ended.errors, ::testing::HasSubstr(line));
    log_ = ended.errors;
  }

  const Prepare prepare_;
  const TempDir dir_;
  const std::string socket_ = dir_.path() + "/s";
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<HealthyJob> healthy_;
  std::vector<std::string> ready_jobs_;  // of kShape, with the parameters of HealthyJob
  std::vector<std::string> logged_;      // must be in the daemon's log
  std::string log_;                      // after TearDown()
};

}  // namespace forebay::testing
