// SPDX-License-Identifier: Apache-2.0
// Goal    A scrub of a running daemon disturbs no job, and reports no damage because of a step that is in progress. It names
//         slots that were damaged while the daemon ran.
// Method  A real daemon whose jobs are durable at each step, with states in DRAM and with some states on swap. Scrubs run one
//         after the other while a job with known bytes trains. Then the test overwrites the swap file.

#include <atomic>
#include <cstdint>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "client/admin.h"
#include "gtest/gtest.h"
#include "tests/support/daemon_process.h"
#include "tests/support/healthy_job.h"
#include "tests/support/status_test.h"

namespace forebay::daemon::online_scrub_process_test {
namespace {

using client::AdminClient;

constexpr int kScrubs = 200;
constexpr std::streamoff kSwapBytes = 32 << 20;
constexpr std::streamoff kEndBytes = 512 << 10;  // labels, records, ledgers
constexpr uint64_t kFast = uint64_t{1} << 40;    // bytes a second
constexpr uint64_t kStepsMax = 100000;
constexpr char kRoomy[] = "dram.limit=256MiB";

class OnlineScrub : public ::testing::TestWithParam<const char*> {};

TEST_P(OnlineScrub, ATrainingJobIsCleanAndTrainsOn) {
  const testing::TempDir dir;
  const std::string socket = dir.path() + "/s";
  const std::string swap = dir.Make("swap");
  ASSERT_OK_AND_ASSIGN(
      auto daemon, testing::DaemonProcess::Start(
                       socket, {"swap.paths=" + swap, "swap.capacity=32MiB", "swap.ledger=128KiB",
                                "swap.probe=never", "update.block_elems=4096",
                                "jobs.durability=step", GetParam()}));
  ASSERT_OK_AND_ASSIGN(
      auto job,
      testing::HealthyJob::Attach(
          {.socket = socket, .shape = {.world_size = 1, .groups = 3, .group_elems = 10000}}));
  ASSERT_OK(job->TrainOneMoreStep());
  std::atomic<bool> is_done = false;
  std::atomic<uint64_t> step = 0;
  std::thread scrubs([&] {
    const auto admin = AdminClient::Connect({.socket = socket});
    EXPECT_OK(admin);
    for (int i = 0; admin.ok() && (i < kScrubs || step <= 20); ++i) {
      const auto report = (*admin)->Scrub(kFast);
      EXPECT_OK(report);
      if (!report.ok() || (*report)->getJobs().size() != 1) break;
      EXPECT_TRUE((*report)->getClean()) << i;
      EXPECT_GT((*report)->getJobs()[0].getSlots(), 5U);
    }
    is_done = true;
  });
  while (!is_done && job->committed_step() < kStepsMax) {
    const absl::Status trained = job->TrainOneMoreStep();
    EXPECT_OK(trained);
    step = trained.ok() ? job->committed_step() : kStepsMax;
    if (!trained.ok()) break;
  }
  scrubs.join();

  EXPECT_GT(job->committed_step(), 20U) << "too few while it was read";

  // Overwrites the swap file of the running daemon, except for its two ends.
  {
    std::fstream bytes(swap + "/forebay.swap", std::ios::in | std::ios::out | std::ios::binary);
    for (std::streamoff at = kEndBytes; at < kSwapBytes - kEndBytes; at += 4096) {
      bytes.seekp(at);
      bytes << "damage";
    }
  }
  ASSERT_OK_AND_ASSIGN(const auto admin, AdminClient::Connect({.socket = socket}));
  ASSERT_OK_AND_ASSIGN(const client::ScrubReport report, admin->Scrub(0));
  EXPECT_FALSE(report->getClean());
  ASSERT_OK_AND_ASSIGN(const client::NodeStatus status, admin->Status());
  const auto shown = status->getJobs()[0];
  EXPECT_EQ(shown.getResidentBlocks() < shown.getBlocks(), std::string(GetParam()) != kRoomy);
  const auto scrubbed = report->getJobs()[0];
  EXPECT_GT(scrubbed.getDamagedSlots(), 0U);
  for (const auto slot : scrubbed.getDamaged()) EXPECT_GT(slot.getParams().size(), 0U);
}

INSTANTIATE_TEST_SUITE_P(Limits, OnlineScrub, ::testing::Values(kRoomy, "dram.limit=6800KiB"),
                         [](const auto& limit) {
                           return limit.index == 0 ? "AllInDram" : "SomeOnSwap";
                         });

}  // namespace
}  // namespace forebay::daemon::online_scrub_process_test
