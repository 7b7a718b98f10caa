// SPDX-License-Identifier: Apache-2.0
// Goal    A scrub reads every slot that the newest ledger names once, and nothing else. It changes nothing, and respects the
//         volume's lock. If it cannot read a volume, it names the volume and the reason.
// Method  Generated jobs on real files. Slots are damaged one by one, and reads fail.

#include <sys/stat.h>

#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "daemon/core/blocks/durable_content.h"
#include "daemon/exec/offline_scrub.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nvme/find_volume.h"
#include "nvme/io/engine_factory.h"
#include "nvme/volume.h"
#include "protocol/error.h"
#include "tests/support/daemon_process.h"
#include "tests/support/durable_run.h"
#include "tests/support/fault_engine.h"
#include "tests/support/status_test.h"

namespace forebay::daemon {
namespace {

using protocol::ErrorId;
using testing::DurableRun;
using testing::HasCode;
using testing::HasError;
using ::testing::HasSubstr;

constexpr size_t kLast = DurableRun::kCommits - 1;

class ScrubTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(chosen_, nvme::CreateIoEngine());
    run_ = DurableRun::Write({dir_.Make("a"), dir_.Make("b")}, /*seed=*/1, *chosen_.engine);
  }
  absl::StatusOr<ScrubReport> Scrub() { return ScrubPaths(run_->paths(), *chosen_.engine); }
  void Flip(const nvme::Slot& slot, uint64_t byte) const {
    std::fstream file(run_->file(slot.path), std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(slot.offset_bytes + byte));
    const char flipped = static_cast<char>(file.get() ^ 1);
    file.seekp(static_cast<std::streamoff>(slot.offset_bytes + byte));
    file.put(flipped);
  }

  const testing::TempDir dir_;
  nvme::ChosenEngine chosen_;
  std::unique_ptr<DurableRun> run_;
};

TEST_F(ScrubTest, AWholeVolumeIsCleanAndEachNamedSlotIsReadOnce) {
  ASSERT_OK_AND_ASSIGN(const ScrubReport report, Scrub());
  EXPECT_TRUE(report.is_clean());
  EXPECT_EQ(report.recovery.sequence, DurableRun::kCommits);
  ASSERT_EQ(report.jobs.size(), run_->node(kLast).jobs.size());
  for (size_t i = 0; i < report.jobs.size(); ++i) {
    const DurableContent content(run_->node(kLast).jobs[i]);
    uint64_t bytes = 0;
    for (uint32_t entry = 0; entry < content.entries(); ++entry) {
      if (const auto expected = content.At(entry)) bytes += expected->bytes;
    }
    EXPECT_EQ(report.jobs[i].slots, run_->node(kLast).jobs[i]->slots());
    EXPECT_EQ(report.jobs[i].bytes, bytes);
    EXPECT_EQ(report.jobs[i].job->step, run_->node(kLast).jobs[i]->step);
  }
}

TEST_F(ScrubTest, EachDamagedSlotIsNamedAndSupersededOnesAreNot) {
  std::set<nvme::Slot> named;
  for (const auto& job : run_->node(kLast).jobs) {
    for (const nvme::Slot& slot : job->Slots()) named.insert(slot);
  }
  std::set<nvme::Slot> damaged;
  bool last = false;
  for (const auto& [slot, versions] : run_->history()) {
    if ((last = !last)) continue;
    Flip(slot, versions.begin()->second.size() - 1);
    if (named.contains(slot)) damaged.insert(slot);
  }
  ASSERT_OK_AND_ASSIGN(const ScrubReport report, Scrub());
  EXPECT_FALSE(report.is_clean());
  std::set<nvme::Slot> found;
  for (const ScrubbedJob& job : report.jobs) {
    for (const DamagedSlot& slot : job.damaged) {
      EXPECT_TRUE(found.insert(slot.slot).second);
      EXPECT_THAT(slot.status, HasError(ErrorId::kCorrupt));
      EXPECT_EQ(slot.path, run_->file(slot.slot.path));
      EXPECT_FALSE(slot.params.empty());
    }
  }
  EXPECT_EQ(found, damaged);
  EXPECT_GT(found.size(), 5U);
}

TEST_F(ScrubTest, WhatLiesBehindABlockInItsSlotIsNotLookedAt) {
  for (const auto& job : run_->node(kLast).jobs) {
    const DurableContent content(job);
    for (uint32_t entry = 0; entry < content.entries(); ++entry) {
      const auto expected = content.At(entry);
      if (expected && expected->bytes < expected->slot.size_bytes) {
        Flip(expected->slot, expected->bytes);
      }
    }
  }
  ASSERT_OK_AND_ASSIGN(const ScrubReport report, Scrub());
  EXPECT_TRUE(report.is_clean());
}

TEST_F(ScrubTest, ASlotThatCannotBeReadIsNamedAndTheOthersAreVerified) {
  testing::FaultEngine faulty(*chosen_.engine);
  // Every try of the first 8 reads fails. 8 reads are in flight at once.
  constexpr uint64_t kFailures = 8 * (1 + nvme::Volume::kErrorRetriesMax);
  faulty.SetFault({.operation = 0, .count = kFailures, .error_number = EIO});
  const auto report = ScrubPaths(run_->paths(), faulty);
  ASSERT_OK(report);
  uint64_t slots = 0;
  uint64_t damaged = 0;
  for (const ScrubbedJob& job : report->jobs) {
    slots += job.slots;
    damaged += job.damaged.size();
    for (const DamagedSlot& slot : job.damaged) {
      EXPECT_THAT(slot.status, HasError(ErrorId::kSwapIo));
    }
  }
  EXPECT_GE(damaged, 1U);
  EXPECT_LE(damaged, 8U);
  EXPECT_GT(slots, 2 * damaged);
}

TEST_F(ScrubTest, NothingIsWritten) {
  std::vector<struct stat> before(2);
  for (size_t path = 0; path < 2; ++path) ::stat(run_->file(path).c_str(), &before[path]);
  ASSERT_OK(Scrub());
  for (size_t path = 0; path < 2; ++path) {
    struct stat after {};
    ::stat(run_->file(path).c_str(), &after);
    EXPECT_EQ(after.st_mtim.tv_nsec, before[path].st_mtim.tv_nsec);
    EXPECT_EQ(after.st_ctim.tv_nsec, before[path].st_ctim.tv_nsec);
    EXPECT_EQ(testing::ReadFile(run_->file(path)), run_->files()[path]);
  }
  ASSERT_OK_AND_ASSIGN(const auto volume,
                       nvme::Volume::Open({.paths = run_->paths(),
                                           .mode = nvme::OpenMode::kInspect,
                                           .ledger_bytes_max = DurableRun::kLedgerBytes},
                                          *chosen_.engine));
  auto page = testing::Pattern(4096, 1);
  const nvme::Slot slot = *nvme::SlotMap(volume->free_slots()).AllocateOn(0, 4096);
  EXPECT_THAT(volume->Write(slot, page, 1), HasCode(absl::StatusCode::kFailedPrecondition));
  EXPECT_THAT(volume->Zero({&slot, 1}, page, 1), HasCode(absl::StatusCode::kFailedPrecondition));
  EXPECT_THAT(volume->CommitLedger(page, {}, 1), HasCode(absl::StatusCode::kFailedPrecondition));
}

TEST_F(ScrubTest, SizesComeFromTheLabels) {
  std::vector<nvme::PathOptions> paths = run_->paths();
  for (nvme::PathOptions& path : paths) path.capacity_bytes = 0;
  ASSERT_OK_AND_ASSIGN(const ScrubReport report, ScrubPaths(paths, *chosen_.engine));
  EXPECT_TRUE(report.is_clean());
  EXPECT_EQ(report.jobs.size(), 4U);
  const std::array missing = {nvme::PathOptions{.path = dir_.Make("empty")}};
  EXPECT_THAT(nvme::WithSizes(missing), HasError(ErrorId::kSwapPath));
  std::ofstream(missing[0].path + "/forebay.swap") << std::string(64 << 10, 'x');
  EXPECT_THAT(nvme::WithSizes(missing), HasError(ErrorId::kSwapPath));
}

TEST_F(ScrubTest, AVolumeInUseIsLeftAlone) {
  ASSERT_OK_AND_ASSIGN(const nvme::ChosenEngine other, nvme::CreateIoEngine());
  {
    ASSERT_OK_AND_ASSIGN(const auto volume,
                         nvme::Volume::Open({.paths = run_->paths(),
                                             .mode = nvme::OpenMode::kRecover,
                                             .ledger_bytes_max = DurableRun::kLedgerBytes},
                                            *other.engine));
    EXPECT_THAT(Scrub(), HasError(ErrorId::kBusy));
  }
  EXPECT_OK(Scrub());
}

TEST_F(ScrubTest, PathsThatAreNotTheWholeVolumeAreRefused) {
  std::vector<nvme::PathOptions> paths = run_->paths();
  std::swap(paths[0], paths[1]);
  EXPECT_THAT(ScrubPaths(paths, *chosen_.engine), HasError(ErrorId::kSwapPath));
  paths.pop_back();
  EXPECT_THAT(ScrubPaths(paths, *chosen_.engine), HasError(ErrorId::kSwapPath));
  std::filesystem::resize_file(run_->file(0), DurableRun::kPathBytes - 4096);
  const auto cut = Scrub();
  EXPECT_THAT(cut, HasError(ErrorId::kSwapPath));
  EXPECT_THAT(std::string(cut.status().message()), HasSubstr(run_->file(0)));
}

TEST_F(ScrubTest, AVolumeWithoutDurableJobsIsClean) {
  const std::vector<nvme::PathOptions> paths = {
      {.path = dir_.Make("new"), .capacity_bytes = 1 << 20}};
  { ASSERT_OK(nvme::Volume::Open({.paths = paths, .ledger_bytes_max = 4096}, *chosen_.engine)); }
  ASSERT_OK_AND_ASSIGN(const ScrubReport report, ScrubPaths(paths, *chosen_.engine));
  EXPECT_TRUE(report.is_clean());
  EXPECT_EQ(report.recovery.sequence, 0U);
}

}  // namespace
}  // namespace forebay::daemon
