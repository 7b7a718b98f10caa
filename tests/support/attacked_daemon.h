// SPDX-License-Identifier: Apache-2.0
// A daemon and a well-behaved job, while a test misbehaves as another client of the daemon.
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

// Fixture that starts a daemon and a healthy job. TearDown() expects that the daemon is alive, that the healthy job and the
// jobs of ready_jobs_ train one more step to the expected bits, and that the daemon exits with status 0.
class AttackedDaemon : public ::testing::Test {
 protected:
  // `prepare` runs in the daemon's process: see DaemonProcess::Start.
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
  // Names of jobs of shape kShape, with HealthyJob's parameters.
  std::vector<std::string> ready_jobs_;
  std::vector<std::string> logged_;  // texts that the daemon's log must contain
  std::string log_;                  // the daemon's log, set by TearDown()
};

}  // namespace forebay::testing
