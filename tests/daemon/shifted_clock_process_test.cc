// SPDX-License-Identifier: Apache-2.0
// Goal    A wall clock that jumps by years, forward or back, while the daemon runs or between two runs, changes nothing. Steps
//         become durable, sessions remain, the newest step is recovered, and the count of written bytes continues.
// Method  A real daemon trains a durable job with swap, while tests/support/shifted_clock.cc shifts only the daemon's wall
//         clock. Every weight and state is compared after each step. Between two runs the swap files get false timestamps.

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "client/admin.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/daemon_process.h"
#include "tests/support/healthy_job.h"
#include "tests/support/status_test.h"

namespace forebay::daemon::shifted_clock_process_test {
namespace {

using ::testing::HasSubstr;
using testing::HealthyJob;
using testing::RunningProgram;

constexpr int64_t kYear = 365 * 24 * 3600;  // seconds
constexpr uint64_t kSteps = 2;              // Steps after each jump.

class ShiftedClock : public ::testing::Test {
 protected:
  // Clients before and after a restart are one run.
  void SetUp() override { ASSERT_EQ(::setenv("FOREBAY_RUN", "test", 0), 0); }

  void Start() {
    ASSERT_EQ(::setenv("LD_PRELOAD", SHIFTED_CLOCK_PATH, 1), 0);
    ASSERT_EQ(::setenv("FOREBAY_TEST_CLOCK", clock_.c_str(), 1), 0);
    std::vector<std::string> arguments = {FOREBAYD_PATH};
    for (const std::string& setting :
         {"socket.path=" + socket_, std::string("memlock=best_effort"),
          "swap.paths=" + a_ + "," + b_, std::string("swap.capacity=32MiB"),
          std::string("swap.probe=never"), std::string("update.block_elems=4096"),
          std::string("update.workers=2"), std::string("dram.limit=64MiB"),
          std::string("jobs.durability=step")}) {
      arguments.insert(arguments.end(), {"--set", setting});
    }
    daemon_ = RunningProgram::Start(arguments, "forebayd ready");
    ::unsetenv("LD_PRELOAD");
    ASSERT_THAT(daemon_->errors(), HasSubstr("forebayd ready"));
  }
  void Shift(int64_t seconds) const {
    const std::string next = dir_.Write("clock.new", std::to_string(seconds));
    std::filesystem::rename(next, clock_);
  }
  // Trains kSteps more steps, and expects that they are durable.
  void Train(HealthyJob& job) {
    for (uint64_t step = 0; step < kSteps; ++step) ASSERT_OK(job.TrainOneMoreStep());
    ASSERT_OK_AND_ASSIGN(auto admin, client::AdminClient::Connect({.socket = socket_}));
    ASSERT_OK_AND_ASSIGN(const client::NodeStatus status, admin->Status());
    ASSERT_EQ(status->getJobs().size(), 1U);
    EXPECT_EQ(status->getJobs()[0].getDurableStep(), job.committed_step());
    uint64_t written = 0;
    uint64_t written_in_all = 0;
    for (const auto path : status->getSwap()) {
      written += path.getWrittenBytes();
      written_in_all += path.getWrittenInAll();
    }
    EXPECT_GT(written_in_all, written_in_all_);
    EXPECT_GE(written_in_all, written);
    written_in_all_ = written_in_all;
  }
  static std::string YearAfter(int64_t seconds) {
    const std::time_t then = std::time(nullptr) + seconds;
    std::tm parts{};
    ::localtime_r(&then, &parts);
    return std::to_string(1900 + parts.tm_year) + "-";
  }

  const testing::TempDir dir_;
  const std::string socket_ = dir_.path() + "/s";
  const std::string clock_ = dir_.path() + "/clock";
  const std::string a_ = dir_.Make("a");
  const std::string b_ = dir_.Make("b");
  std::unique_ptr<RunningProgram> daemon_;
  uint64_t written_in_all_ = 0;
};

TEST_F(ShiftedClock, ThatJumpsByYearsChangesNothing) {
  uint64_t committed = 0;
  for (const int64_t start : {int64_t{0}, 30 * kYear, -20 * kYear, int64_t{0}}) {
    SCOPED_TRACE(::testing::Message() << "started with a clock that is off by " << start << " s");
    Shift(start);
    Start();
    if (committed > 0) {
      EXPECT_THAT(daemon_->errors(), HasSubstr(YearAfter(start))) << "the clock is not shifted";
      EXPECT_THAT(daemon_->errors(), HasSubstr("at step " + std::to_string(committed)));
    }
    written_in_all_ = 0;  // a kill may forget the bytes of the last minute
    {
      ASSERT_OK_AND_ASSIGN(const auto job, HealthyJob::Attach({.socket = socket_}));
      EXPECT_EQ(job->committed_step(), committed);
      for (const int64_t jump : {start, start + 10 * kYear, start - 10 * kYear, start + 3, start}) {
        SCOPED_TRACE(::testing::Message() << "off by " << jump << " s");
        Shift(jump);
        ASSERT_NO_FATAL_FAILURE(Train(*job));
      }
      committed = job->committed_step();
      daemon_->Kill();
    }
    // Sets false timestamps: the first path's file is 10 years in the future, the second path's file 10 years in the past.
    const auto now = std::filesystem::file_time_type::clock::now();
    std::filesystem::last_write_time(a_ + "/forebay.swap", now + std::chrono::hours(24 * 3650));
    std::filesystem::last_write_time(b_ + "/forebay.swap", now - std::chrono::hours(24 * 3650));
  }
}

}  // namespace
}  // namespace forebay::daemon::shifted_clock_process_test
