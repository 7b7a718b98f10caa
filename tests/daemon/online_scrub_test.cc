// SPDX-License-Identifier: Apache-2.0
// Goal    A damaged slot counts only if the job's newest ledger names it once it has been read. A slot that was replaced
//         meanwhile is read again at its new place. One scrub runs at a time, at its rate. A deleted job is scrubbed no
//         further.
// Method  Generated jobs on real files. The test acts as the loop, and chooses the newest ledger.

#include <array>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "daemon/exec/clock.h"
#include "daemon/exec/scrub.h"
#include "daemon/exec/swap_space.h"
#include "daemon/exec/task_runner.h"
#include "gtest/gtest.h"
#include "nvme/io/engine_factory.h"
#include "protocol/error.h"
#include "tests/support/daemon_process.h"
#include "tests/support/durable_run.h"
#include "tests/support/status_test.h"

namespace forebay::daemon {
namespace {

using protocol::ErrorId;
using testing::DurableRun;
using testing::HasError;

constexpr size_t kLast = DurableRun::kCommits - 1;
constexpr uint64_t kFast = uint64_t{1} << 40;  // bytes a second
constexpr int kTurnsMax = 100000;

class OnlineScrubTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(chosen_, nvme::CreateIoEngine());
    run_ = DurableRun::Write({dir_.Make("a"), dir_.Make("b")}, /*seed=*/1, *chosen_.engine);
    ASSERT_OK_AND_ASSIGN(swap_,
                         SwapSpace::Open({.paths = run_->paths(),
                                          .mode = nvme::OpenMode::kRecover,
                                          .staging_slots = 3,
                                          .staging_slot_bytes = 64 << 10,
                                          .arenas = {.lock = pinned_mem::LockPolicy::kBestEffort}},
                                         *chosen_.engine));
    ASSERT_OK_AND_ASSIGN(runner_, TaskRunner::Create({.update = {.threads = 1}}));
    jobs_ = run_->node(kLast).jobs;
    MakeScrubber(/*reads=*/1);
  }
  void MakeScrubber(uint32_t reads) {
    scrub_.emplace(ScrubberOptions{
        .swap = swap_.get(),
        .runner = runner_.get(),
        .jobs = [this] { return jobs_; },
        .end_transfers = [this](std::vector<SwapDone>& done) { EndTransfers(done); },
        .reads = reads});
  }
  void EndTransfers(std::vector<SwapDone>& done) {
    for (const SwapDone& one : done) {
      ++transfers_;
      EXPECT_TRUE(scrub_->OnTransferred(one));
    }
  }
  // Runs the loop until the scrub has answered or `transfers` reads have ended.
  void Turn(uint64_t transfers = UINT64_MAX) {
    for (int turn = 0; turn < kTurnsMax && !answer_ && transfers_ < transfers; ++turn) {
      runner_->RunFinished();
      (void)scrub_->Tick();
      std::array<nvme::Completion, 16> completions;
      std::vector<SwapDone> done;
      const auto count = chosen_.engine->Wait(std::chrono::milliseconds(1), completions);
      ASSERT_OK(count);
      for (size_t i = 0; i < *count; ++i) swap_->OnCompletion(completions[i], done);
      EndTransfers(done);
    }
  }
  void Start(const ScrubRequest& request) {
    answer_.reset();
    scrub_->Start(request, [this](const absl::StatusOr<ScrubReport>& report) { answer_ = report; });
  }
  void Flip(const nvme::Slot& slot) const {
    std::fstream file(run_->file(slot.path), std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(slot.offset_bytes));
    const char flipped = static_cast<char>(file.get() ^ 1);
    file.seekp(static_cast<std::streamoff>(slot.offset_bytes));
    file.put(flipped);
  }

  const testing::TempDir dir_;
  nvme::ChosenEngine chosen_;
  std::unique_ptr<DurableRun> run_;
  std::unique_ptr<SwapSpace> swap_;
  std::unique_ptr<TaskRunner> runner_;
  std::vector<std::shared_ptr<const DurableJob>> jobs_;  // Jobs of the newest ledger.
  std::optional<Scrubber> scrub_;
  uint64_t transfers_ = 0;
  std::optional<absl::StatusOr<ScrubReport>> answer_;
};

TEST_F(OnlineScrubTest, AllSlotsAreReadAndTheDamagedOneIsNamed) {
  const nvme::Slot damaged = jobs_[2]->Slots()[1];
  Flip(damaged);
  Start({.number = 1, .bytes_per_s = kFast});
  EXPECT_GT(scrub_->progress().total_bytes, 0U);
  Turn();
  ASSERT_TRUE(answer_);
  ASSERT_OK(*answer_);
  const ScrubReport& report = **answer_;
  ASSERT_EQ(report.jobs.size(), jobs_.size());
  EXPECT_GT(report.recovery.sequence, 0U);
  for (size_t i = 0; i < jobs_.size(); ++i) {
    EXPECT_EQ(report.jobs[i].slots, jobs_[i]->slots());
    EXPECT_EQ(report.jobs[i].damaged.size(), i == 2 ? 1U : 0U);
  }
  EXPECT_EQ(report.jobs[2].damaged[0].slot, damaged);
  EXPECT_THAT(report.jobs[2].damaged[0].status, HasError(ErrorId::kCorrupt));
  EXPECT_FALSE(report.jobs[2].damaged[0].params.empty());
  EXPECT_EQ(scrub_->progress().total_bytes, 0U);
}

TEST_F(OnlineScrubTest, ASlotThatWasReplacedWhileItWasReadIsNoDamage) {
  // Find the job's first block with another slot in the newest ledger.
  const auto before = run_->node(kLast - 1).jobs;
  const std::shared_ptr<const DurableJob> after = run_->node(kLast).jobs[0];
  size_t block = 0;
  while (!before[0]->blocks[block] ||
         before[0]->blocks[block]->slot == after->blocks[block]->slot) {
    ASSERT_LT(++block, after->blocks.size());
  }
  Flip(before[0]->blocks[block]->slot);
  for (const bool is_replaced : {true, false}) {
    SCOPED_TRACE(is_replaced);
    jobs_ = {before[0]};
    transfers_ = 0;
    Start({.number = 1, .bytes_per_s = kFast});
    // The last block has been read but not yet digested. Each block is one transfer.
    Turn(/*transfers=*/block + 1);
    if (is_replaced) jobs_ = {after};
    Turn();
    ASSERT_TRUE(answer_);
    ASSERT_OK(*answer_);
    EXPECT_EQ((*answer_)->is_clean(), is_replaced);
    EXPECT_EQ((*answer_)->jobs[0].job->step, is_replaced ? after->step : before[0]->step);
  }
}

TEST_F(OnlineScrubTest, SlotsThatWereReplacedWhileSeveralWereReadAreNoDamage) {
  MakeScrubber(/*reads=*/4);
  const auto before = run_->node(kLast - 1).jobs;
  const auto after = run_->node(kLast).jobs;
  std::set<nvme::Slot> named;
  for (const nvme::Slot& slot : after[0]->Slots()) named.insert(slot);
  uint64_t replaced = 0;
  for (const nvme::Slot& slot : before[0]->Slots()) {
    if (named.contains(slot)) continue;
    Flip(slot);
    ++replaced;
  }
  ASSERT_GT(replaced, 0U);
  for (const bool is_replaced : {true, false}) {
    SCOPED_TRACE(is_replaced);
    jobs_ = {before[0]};
    transfers_ = 0;
    Start({.number = 1, .bytes_per_s = kFast});
    (void)scrub_->Tick();  // four are in flight
    if (is_replaced) jobs_ = {after[0]};
    Turn();
    ASSERT_TRUE(answer_);
    ASSERT_OK(*answer_);
    const ScrubbedJob& job = (*answer_)->jobs[0];
    EXPECT_EQ(job.damaged.size(), is_replaced ? 0U : replaced);
    EXPECT_EQ(job.slots, (is_replaced ? after : before)[0]->slots());
  }
}

TEST_F(OnlineScrubTest, SeveralReadsOfADeletedJobEndBeforeTheNextJob) {
  MakeScrubber(/*reads=*/4);
  Start({.number = 1, .bytes_per_s = kFast});
  (void)scrub_->Tick();
  jobs_.erase(jobs_.begin());
  Turn();
  ASSERT_TRUE(answer_);
  ASSERT_OK(*answer_);
  EXPECT_TRUE((*answer_)->is_clean());
  EXPECT_LE((*answer_)->jobs[0].slots, 4U);
  for (size_t i = 0; i < jobs_.size(); ++i) {
    EXPECT_EQ((*answer_)->jobs[i + 1].slots, jobs_[i]->slots());
  }
  // After a cancelled scrub, another scrub can begin only when the transfers in flight have ended.
  Start({.number = 2, .bytes_per_s = kFast});
  (void)scrub_->Tick();
  scrub_->Cancel(2);
  ASSERT_TRUE(answer_);
  EXPECT_THAT(*answer_, HasError(ErrorId::kInterrupted));
  std::optional<absl::Status> refused;
  scrub_->Start({.number = 3},
                [&](const absl::StatusOr<ScrubReport>& report) { refused = report.status(); });
  ASSERT_TRUE(refused);
  EXPECT_THAT(*refused, HasError(ErrorId::kBusy));
  answer_.reset();
  Turn(/*transfers=*/transfers_ + 4);
}

TEST_F(OnlineScrubTest, AJobThatIsDeletedIsReadNoFurther) {
  Start({.number = 1, .bytes_per_s = kFast});
  Turn(/*transfers=*/2);
  jobs_.erase(jobs_.begin());
  Turn();
  ASSERT_TRUE(answer_);
  ASSERT_OK(*answer_);
  EXPECT_TRUE((*answer_)->is_clean());
  EXPECT_LE((*answer_)->jobs[0].slots, 2U);
  EXPECT_EQ((*answer_)->jobs[1].slots, jobs_[0]->slots());
}

TEST_F(OnlineScrubTest, OneUsersJobsAreReadWhereItAsks) {
  Start({.number = 1, .bytes_per_s = kFast, .uid = 1000});
  Turn();
  ASSERT_TRUE(answer_);
  ASSERT_OK(*answer_);
  ASSERT_EQ((*answer_)->jobs.size(), 1U);
  EXPECT_EQ((*answer_)->jobs[0].job->uid, 1000U);
}

TEST_F(OnlineScrubTest, OneRunsAtATimeAtItsRateUntilItIsCancelled) {
  Start({.number = 7, .bytes_per_s = 4096});  // a second for each page
  Turn(/*transfers=*/1);
  runner_->RunFinished();
  EXPECT_GT(scrub_->Tick(), MonotonicNs() + 100'000'000);
  EXPECT_FALSE(answer_);
  std::optional<absl::Status> refused;
  scrub_->Start({.number = 8},
                [&](const absl::StatusOr<ScrubReport>& report) { refused = report.status(); });
  ASSERT_TRUE(refused);
  EXPECT_THAT(*refused, HasError(ErrorId::kBusy));
  scrub_->Cancel(8);
  EXPECT_FALSE(answer_);
  scrub_->Cancel(7);
  ASSERT_TRUE(answer_);
  EXPECT_THAT(*answer_, HasError(ErrorId::kInterrupted));
  EXPECT_EQ(scrub_->Tick(), UINT64_MAX);
}

}  // namespace
}  // namespace forebay::daemon
