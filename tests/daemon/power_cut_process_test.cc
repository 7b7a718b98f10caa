// SPDX-License-Identifier: Apache-2.0
// Goal    Power may fail at every moment of a training at level `step`. The disk then holds an intact volume, at a step no
//         older than the newest answered step.
// Method  A real daemon uses a FUSE file system that this process serves and that logs every write and every flush. For each
//         flush the test builds disks from the flushed data, with each prefix of the later writes, and with random subsets of
//         them, including torn writes. A scrub reads the ledger and every slot of each disk. The test is skipped if FUSE cannot
//         be mounted; tests/nvme/volume_fault_test.cc tests cuts before any operation of the volume. FOREBAY_SUBSETS sets the
//         number of subsets for each flush.

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "client/client.h"
#include "daemon/exec/offline_scrub.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nvme/io/engine_factory.h"
#include "nvme/swap_files.h"
#include "protocol/units.h"
#include "tests/support/daemon_process.h"
#include "tests/support/fuse_disk.h"
#include "tests/support/status_test.h"
#include "tests/support/training.h"
#include "tests/support/training_client.h"

namespace forebay::daemon {
namespace {

using client::Attachment;
using testing::DiskWrite;
using testing::FuseDisk;
using testing::JobShape;

constexpr uint64_t kDiskBytes = 8 << 20;
constexpr uint64_t kSteps = 6;
constexpr auto kTimeout = std::chrono::seconds(60);
const JobShape kShape = {.world_size = 1};

using Contents = std::vector<std::byte>;

void Apply(const DiskWrite& write, uint64_t bytes, Contents& contents) {
  ASSERT_LE(write.offset_bytes + write.bytes.size(), contents.size());
  std::copy_n(write.bytes.begin(), bytes,
              contents.begin() + static_cast<ptrdiff_t>(write.offset_bytes));
}

class PowerCuts : public ::testing::Test {
 protected:
  void SetUp() override {
    auto disk = FuseDisk::Mount(faulty_, kDiskBytes);
    if (absl::IsUnavailable(disk.status())) GTEST_SKIP() << disk.status().message();
    ASSERT_OK(disk);
    disk_ = *std::move(disk);
    ASSERT_OK_AND_ASSIGN(engine_, nvme::CreateIoEngine());
  }

  // Trains, and kills the daemon at the end. Fills log_ and answered_.
  void Train(const std::vector<std::string>& settings) {
    disk_->StartLog();
    std::vector<std::string> all = {"swap.paths=" + faulty_, "swap.capacity=8MiB",
                                    "swap.probe=never", "update.block_elems=4096",
                                    "swap.ledger=256KiB"};
    all.insert(all.end(), settings.begin(), settings.end());
    ASSERT_OK_AND_ASSIGN(const auto daemon, testing::DaemonProcess::Start(socket_, all));
    ASSERT_OK_AND_ASSIGN(
        const auto session,
        Attachment::Attach(
            {.socket = socket_,
             .job = "job",
             .durability = {.level = protocol::Durability{protocol::DurabilityLevel::kStep, 1}},
             .layout = testing::MakeLayoutSpec(kShape),
             .timeout = kTimeout}));
    ASSERT_OK(testing::WriteInitial(*session, 1));
    for (uint64_t step = 1; step <= kSteps; ++step) {
      ASSERT_OK(testing::TrainStep(*session, {.rank = 0, .t = step}).status());
      answered_.emplace_back(disk_->logged(), step);
    }
    daemon->Kill();
    log_ = disk_->DrainLog();
  }

  uint64_t AnsweredBefore(size_t position) const {
    uint64_t newest = 0;
    for (const auto& [logged, step] : answered_) {
      if (logged <= position) newest = step;
    }
    return newest;
  }

  // Returns the step at which the job is recovered from `contents`; 0 if no job is recovered.
  uint64_t StepOf(const Contents& contents) {
    const std::string file = left_ + "/" + nvme::kSwapFileName;
    std::ofstream(file, std::ios::binary)
        .write(reinterpret_cast<const char*>(contents.data()),
               static_cast<std::streamsize>(contents.size()));
    const auto report =
        ScrubPaths({{.path = left_, .capacity_bytes = kDiskBytes}}, *engine_.engine);
    if (!report.ok()) {
      // Before its first ledger, the file is not yet a volume, or is a volume without a job.
      EXPECT_EQ(newest_found_, 0U) << report.status();
      return 0;
    }
    if (report->jobs.empty()) return 0;
    EXPECT_TRUE(report->jobs[0].damaged.empty());
    return report->jobs[0].job->step;
  }

  // Checks power cuts at the flush at `position` of the log. `since` are the writes that no flush has covered.
  void Check(const Contents& flushed, const std::vector<const DiskWrite*>& since, size_t position,
             std::mt19937_64& random) {
    const uint64_t least = AnsweredBefore(position);
    const auto check = [&](const Contents& contents) {
      const uint64_t step = StepOf(contents);
      newest_found_ = std::max(newest_found_, step);
      ASSERT_GE(step, least) << "at " << position << " of " << log_.size();
      ASSERT_LE(step, kSteps);
      ++cuts_;
    };
    check(flushed);
    Contents prefix = flushed;
    for (const DiskWrite* write : since) {
      if (HasFatalFailure()) return;
      Apply(*write, write->bytes.size(), prefix);
      check(prefix);
    }
    const char* const wanted = std::getenv("FOREBAY_SUBSETS");
    const int subsets = since.empty() ? 0 : std::atoi(wanted == nullptr ? "4" : wanted);
    for (int i = 0; i < subsets && !HasFatalFailure(); ++i) {
      Contents some = flushed;
      std::vector<const DiskWrite*> shuffled = since;
      std::ranges::shuffle(shuffled, random);
      for (const DiskWrite* write : shuffled) {
        const uint64_t fate = random() % 3;
        const uint64_t sectors = write->bytes.size() / 512;
        if (fate == 0) continue;
        Apply(*write, fate == 1 ? write->bytes.size() : random() % (sectors + 1) * 512, some);
      }
      check(some);
    }
  }

  void CheckAll() {
    std::mt19937_64 random(14);
    Contents flushed(kDiskBytes);
    std::vector<const DiskWrite*> since;
    for (size_t position = 0; position < log_.size() && !HasFatalFailure(); ++position) {
      if (!log_[position].is_flush) {
        since.push_back(&log_[position]);
        continue;
      }
      ++flushes_;
      Check(flushed, since, position, random);
      for (const DiskWrite* write : std::exchange(since, {})) {
        Apply(*write, write->bytes.size(), flushed);
      }
    }
    Check(flushed, since, log_.size(), random);
    EXPECT_EQ(newest_found_, kSteps);
    RecordProperty("cuts", static_cast<int>(cuts_));
    std::printf("%zu cuts at %zu flushes of %zu writes\n", cuts_, flushes_, log_.size() - flushes_);
  }

  const testing::TempDir dir_;
  const std::string socket_ = dir_.path() + "/s";
  const std::string faulty_ = dir_.Make("disk");
  const std::string left_ = dir_.Make("left");
  std::unique_ptr<FuseDisk> disk_;
  nvme::ChosenEngine engine_;
  std::vector<DiskWrite> log_;
  // Length of the log at each answer, and the answered step.
  std::vector<std::pair<size_t, uint64_t>> answered_;
  uint64_t newest_found_ = 0;
  size_t cuts_ = 0;
  size_t flushes_ = 0;
};

TEST_F(PowerCuts, AtEveryFlushWhatIsOnTheDiskComesBackWhole) {
  Train({"dram.limit=64MiB"});
  ASSERT_FALSE(HasFatalFailure());
  CheckAll();
}

TEST_F(PowerCuts, TheSameOfAJobOnSwap) {
  Train({"dram.limit=7520256", "swap.staging=1MiB"});
  ASSERT_FALSE(HasFatalFailure());
  CheckAll();
}

}  // namespace
}  // namespace forebay::daemon
