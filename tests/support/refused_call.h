// SPDX-License-Identifier: Apache-2.0
// What a refusal must be, and a daemon in which it must harm nothing.
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

// A whole answer: the id, every one of `words` in the message, and a hint.
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

  // Nothing was lost, and the daemon, the sessions and the job go on.
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
