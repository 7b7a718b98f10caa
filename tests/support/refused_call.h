// SPDX-License-Identifier: Apache-2.0
// Checks of a refused call: its error is complete, and the daemon and its job continue undamaged.
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

namespace forebay::testing {

// Expects an error with the id, all `words` in its message, and a hint.
inline void ExpectRefusal(const absl::Status& status, protocol::ErrorId id,
                          const std::vector<std::string>& words) {
  EXPECT_THAT(status, HasError(id));
  for (const std::string& word : words) {
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(word));
  }
  EXPECT_NE(protocol::HintOf(status), "") << status;
}

class RefusedCall : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_OK_AND_ASSIGN(daemon_, DaemonProcess::Start(socket_, settings_)); }

  std::unique_ptr<HealthyJob> Trained(const HealthyJobOptions& options) {
    auto job = HealthyJob::Attach(options);
    EXPECT_OK(job);
    if (!job.ok()) return nullptr;
    EXPECT_OK((*job)->TrainOneMoreStep());
    return *std::move(job);
  }

  // Expects that the daemon lives, that the job still holds its bytes and that it can train.
  void ExpectGoesOn(HealthyJob& job) {
    EXPECT_TRUE(daemon_->IsAlive());
    EXPECT_OK(job.HoldsItsBytes());
    EXPECT_OK(job.TrainOneMoreStep());
  }

  const TempDir dir_;
  const std::string socket_ = dir_.path() + "/s";
  std::vector<std::string> settings_;
  std::unique_ptr<DaemonProcess> daemon_;
};

}  // namespace forebay::testing
