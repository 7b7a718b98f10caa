// SPDX-License-Identifier: Apache-2.0
// Goal    A disk fails, hangs, is slow, fills up, loses or misplaces writes, or returns wrong bits. A fault that a retry cures
//         goes unnoticed, and writes move to another path if the daemon has one. Every other fault is an error of the affected job
//         alone, and names path and cause. The daemon lives, serves the other jobs, and can be stopped.
// Method  A real daemon uses a FUSE file system that this process serves and that injects faults on command. States are
//         compared with the reference's, bit by bit. The test is skipped if FUSE cannot be mounted; tests/nvme and
//         node_state_swap_fault_test.cc inject the same faults through the I/O seam.

#include <cerrno>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "client/admin.h"
#include "client/client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "tests/support/daemon_process.h"
#include "tests/support/fuse_disk.h"
#include "tests/support/status_test.h"
#include "tests/support/training.h"
#include "tests/support/training_client.h"

namespace forebay::daemon {
namespace {

using client::Attachment;
using protocol::ErrorId;
using ::testing::AllOf;
using testing::DiskFault;
using testing::FuseDisk;
using testing::HasError;
using ::testing::HasSubstr;
using testing::JobShape;

constexpr auto kTimeout = std::chrono::seconds(60);
constexpr uint64_t kDiskBytes = 32 << 20;
const JobShape kOnSwap = {.world_size = 1};
const JobShape kInDram = {.world_size = 1, .groups = 1, .group_elems = 100};

// Trains one rank, and compares its states with a scalar reference trainer.
class Training {
 public:
  static absl::StatusOr<std::unique_ptr<Training>> Start(const std::string& socket,
                                                         const std::string& job,
                                                         const JobShape& shape) {
    auto layout = protocol::Layout::Create(testing::MakeLayoutSpec(shape));
    if (!layout.ok()) return layout.status();
    auto session = Attachment::Attach(
        {.socket = socket, .job = job, .layout = layout->spec(), .timeout = kTimeout});
    if (!session.ok()) return session.status();
    const absl::Status written = testing::WriteInitial(**session, 1);
    if (!written.ok()) return written;
    auto training = std::unique_ptr<Training>(new Training(*std::move(layout)));
    training->session_ = *std::move(session);
    return training;
  }

  absl::Status Step() {
    const absl::Status stepped =
        testing::TrainStep(*session_, {.rank = 0, .t = step_ + 1}).status();
    if (!stepped.ok()) return stepped;
    ++step_;
    std::vector<uint32_t> groups(layout_.groups().size());
    std::iota(groups.begin(), groups.end(), 0);
    (void)reference_.Step(step_, testing::MakeHyperParams(), 0, groups);
    return absl::OkStatus();
  }
  absl::Status CheckStates() { return testing::CheckStates(*session_, reference_); }
  void Detach() { (void)session_->Detach(); }

 private:
  explicit Training(protocol::Layout layout)
      : layout_(std::move(layout)), reference_(layout_, /*world_size=*/1, /*seed=*/1) {}

  protocol::Layout layout_;
  testing::ReferenceTrainer reference_;
  std::unique_ptr<Attachment> session_;
  uint64_t step_ = 0;
};

enum class Paths { kFaultyAlone, kFaultyAndGood };

class DiskFaults : public ::testing::Test {
 protected:
  void SetUp() override {
    auto disk = FuseDisk::Mount(faulty_, kDiskBytes);
    // A process's disk can be made to fail only with /dev/fuse, which most containers lack. node_state_swap_fault_test and
    // volume_deadline_fault_test simulate the same faults and run everywhere.
    if (absl::IsUnavailable(disk.status())) GTEST_SKIP() << disk.status().message();
    ASSERT_OK(disk);
    disk_ = *std::move(disk);
  }

  void Start(Paths paths, const std::string& durability = "memory",
             const std::string& dram_limit = "6874KiB") {
    const bool both = paths == Paths::kFaultyAndGood;
    ASSERT_OK_AND_ASSIGN(
        daemon_,
        testing::DaemonProcess::Start(
            socket_, {"swap.paths=" + faulty_ + (both ? "," + good_ : ""), "swap.capacity=16MiB",
                      "swap.probe=never", "swap.deadline=1000", "update.block_elems=4096",
                      "dram.limit=" + dram_limit, "jobs.durability=" + durability}));
    ASSERT_OK_AND_ASSIGN(admin_, client::AdminClient::Connect({.socket = socket_}));
    ASSERT_OK_AND_ASSIGN(other_, Training::Start(socket_, "other", kInDram));
    ASSERT_OK_AND_ASSIGN(job_, Training::Start(socket_, "job", kOnSwap));
    const auto job = Status().getJobs()[1];
    ASSERT_LT(job.getResidentBlocks(), job.getBlocks());
    for (int step = 0; step < 2; ++step) ASSERT_OK(job_->Step());
  }

  // Returns the node's status. The reader is valid until the next call.
  schema::NodeStatus::Reader Status() {
    status_ = admin_->Status().value();
    return *status_;
  }

  // Steps the job until a step fails, at most three times: a write error may appear one or two steps late. The other job's
  // steps must succeed. Returns the failed step's error.
  absl::Status FailingStep() {
    for (int step = 0; step < 3; ++step) {
      const absl::Status stepped = job_->Step();
      EXPECT_OK(other_->Step()) << "other jobs go on";
      if (!stepped.ok()) return stepped;
    }
    return absl::OkStatus();
  }

  void DeleteJob() {
    job_->Detach();
    job_.reset();  // The weights count as the job's memory until the client's mapping ends.
    ASSERT_TRUE(testing::Eventually([&] { return Status().getJobs()[1].getSessions() == 0; }));
    ASSERT_OK(admin_->DeleteJob("job"));
  }

  // Repairs the disk, deletes the job, and creates the job again. The new job must train with the right bits.
  void ReplaceJob() {
    disk_->Work();
    ASSERT_NO_FATAL_FAILURE(DeleteJob());
    ASSERT_OK_AND_ASSIGN(job_, Training::Start(socket_, "job", kOnSwap));
    for (int step = 0; step < 2; ++step) ASSERT_OK(job_->Step());
    EXPECT_OK(job_->CheckStates());
    EXPECT_OK(other_->CheckStates());
  }

  const testing::TempDir dir_;
  const std::string socket_ = dir_.path() + "/s";
  const std::string faulty_ = dir_.Make("swap_faulty");
  const std::string good_ = dir_.Make("swap_good");
  std::unique_ptr<FuseDisk> disk_;
  std::unique_ptr<testing::DaemonProcess> daemon_;
  std::unique_ptr<client::AdminClient> admin_;
  std::unique_ptr<Training> other_;
  std::unique_ptr<Training> job_;
  client::NodeStatus status_;
};

TEST_F(DiskFaults, WhatAnotherTryOrTimeCuresIsNotNoticed) {
  ASSERT_NO_FATAL_FAILURE(Start(Paths::kFaultyAlone));
  const std::vector<DiskFault> faults = {
      {.kind = DiskFault::Kind::kFail, .error = EIO, .count = 2},
      {.kind = DiskFault::Kind::kFail, .of = DiskFault::Of::kReads, .error = EIO, .count = 2},
      {.kind = DiskFault::Kind::kFail, .of = DiskFault::Of::kWrites, .error = ENOSPC, .count = 3},
      {.kind = DiskFault::Kind::kFail, .error = ETIMEDOUT, .count = 1},
      {.kind = DiskFault::Kind::kShort, .of = DiskFault::Of::kReads, .count = 3},
      {.kind = DiskFault::Kind::kShort, .of = DiskFault::Of::kReads},
      {.kind = DiskFault::Kind::kDelay, .delay = std::chrono::milliseconds(20), .count = 20}};
  for (const DiskFault& fault : faults) {
    SCOPED_TRACE(::testing::Message() << static_cast<int>(fault.kind) << " " << fault.error);
    disk_->Order(fault);
    EXPECT_OK(job_->Step());
    EXPECT_GT(disk_->faults(), 0u);
    disk_->Work();
    EXPECT_OK(job_->Step()) << "what was written is read";
  }
  EXPECT_GT(Status().getSwap()[0].getRetries(), 10u);
  EXPECT_EQ(Status().getJobs()[1].getFailed(), "");
  EXPECT_OK(job_->CheckStates());
}

TEST_F(DiskFaults, AReadThatFailsAgainAndAgainIsAnErrorOfThatJob) {
  ASSERT_NO_FATAL_FAILURE(Start(Paths::kFaultyAlone));
  disk_->Order({.kind = DiskFault::Kind::kFail, .of = DiskFault::Of::kReads, .error = EIO});
  const absl::Status failed = FailingStep();
  EXPECT_THAT(failed, HasError(ErrorId::kSwapIo));
  EXPECT_THAT(std::string(failed.message()),
              AllOf(HasSubstr(faulty_), HasSubstr("read at offset"), HasSubstr("block "),
                    HasSubstr("parameter "), HasSubstr("Input/output error")));
  EXPECT_NO_FATAL_FAILURE(ReplaceJob());
}

TEST_F(DiskFaults, AReadThatNeverEndsIsAnErrorOfThatJobAfterTheDeadline) {
  ASSERT_NO_FATAL_FAILURE(Start(Paths::kFaultyAlone));
  disk_->Order({.kind = DiskFault::Kind::kHang, .of = DiskFault::Of::kReads});
  const absl::Status failed = FailingStep();
  EXPECT_THAT(failed, HasError(ErrorId::kSwapTimeout));
  EXPECT_THAT(std::string(failed.message()),
              AllOf(HasSubstr(faulty_), HasSubstr("read at offset"), HasSubstr("block "),
                    HasSubstr("parameter "), HasSubstr(" s: the disk does not answer")));
  EXPECT_GT(disk_->hung(), 0u);
  EXPECT_NO_FATAL_FAILURE(ReplaceJob());
}

// After the first failed write the daemon sends no more writes to the faulty path.
class DiskFaultsOfWrites : public DiskFaults, public ::testing::WithParamInterface<DiskFault> {};

TEST_P(DiskFaultsOfWrites, GoToTheOtherPath) {
  ASSERT_NO_FATAL_FAILURE(Start(Paths::kFaultyAndGood));
  disk_->Order(GetParam());
  for (int step = 0; step < 2; ++step) {
    EXPECT_OK(job_->Step());
    EXPECT_OK(other_->Step());
  }
  EXPECT_GT(disk_->faults(), 0u);
  disk_->Work();
  for (int step = 0; step < 3; ++step) EXPECT_OK(job_->Step());
  EXPECT_GT(Status().getSwap()[0].getErrors(), 0u);
  EXPECT_EQ(Status().getSwap()[0].getReadErrors(), 0u);
  EXPECT_EQ(Status().getSwap()[1].getErrors(), 0u);
  EXPECT_EQ(Status().getJobs()[1].getFailed(), "");
  EXPECT_OK(job_->CheckStates());
}

INSTANTIATE_TEST_SUITE_P(
    Faults, DiskFaultsOfWrites,
    ::testing::Values(
        DiskFault{.kind = DiskFault::Kind::kFail, .of = DiskFault::Of::kWrites, .error = EIO},
        DiskFault{.kind = DiskFault::Kind::kFail, .of = DiskFault::Of::kWrites, .error = ENOSPC},
        DiskFault{.kind = DiskFault::Kind::kHang, .of = DiskFault::Of::kWrites}),
    [](const auto& param_info) {
      if (param_info.param.kind == DiskFault::Kind::kHang) return "NeverEnd";
      return param_info.param.error == EIO ? "AreErrors" : "FindNoSpace";
    });

// After a failed flush, all bytes written since the last good flush are written again to other slots: swapped states, and
// copies of resident states and of weights.
TEST_F(DiskFaults, AFailedFlushDelaysADurableStepAlone) {
  ASSERT_NO_FATAL_FAILURE(Start(Paths::kFaultyAlone, "step", "7296KiB"));
  disk_->Order(
      {.kind = DiskFault::Kind::kFail, .of = DiskFault::Of::kFlushes, .error = EIO, .count = 2});
  for (int step = 0; step < 3; ++step) EXPECT_OK(job_->Step());
  EXPECT_EQ(disk_->faults(), 2u);
  EXPECT_OK(other_->Step());
  const auto job = Status().getJobs()[1];
  EXPECT_EQ(job.getDurableStep(), job.getCommittedStep());
  EXPECT_GT(job.getRelocatedBlocks(), 0u);
  EXPECT_EQ(job.getFailed(), "");
  EXPECT_OK(job_->CheckStates());
}

TEST_F(DiskFaults, WhereNoPathTakesAWriteTheStepWaitsUntilOneDoes) {
  ASSERT_NO_FATAL_FAILURE(Start(Paths::kFaultyAlone));
  disk_->Order({.kind = DiskFault::Kind::kHang, .of = DiskFault::Of::kWrites});
  absl::Status stepped = absl::UnknownError("not yet");
  std::thread trainer([this, &stepped] { stepped = job_->Step(); });
  EXPECT_TRUE(testing::Eventually([&] { return Status().getJobs()[1].hasSwapWait(); }));
  EXPECT_THAT(Status().getJobs()[1].getSwapWait().cStr(),
              AllOf(HasSubstr(faulty_), HasSubstr("block "), HasSubstr("E_SWAP_TIMEOUT")));
  EXPECT_OK(other_->Step());
  disk_->Work();
  trainer.join();
  EXPECT_OK(stepped);
  EXPECT_OK(job_->Step());
  EXPECT_OK(job_->CheckStates());
}

TEST_F(DiskFaults, LostMisplacedAndRottenBytesAreNamedAndNeverUsed) {
  const std::vector<DiskFault> faults = {
      {.kind = DiskFault::Kind::kLose},
      {.kind = DiskFault::Kind::kMisdirect, .shift_bytes = 32 << 10},
      {.kind = DiskFault::Kind::kRot}};
  ASSERT_NO_FATAL_FAILURE(Start(Paths::kFaultyAlone));
  for (DiskFault fault : faults) {
    for (const uint64_t count : {uint64_t{1}, uint64_t{1000}}) {
      SCOPED_TRACE(::testing::Message() << static_cast<int>(fault.kind) << " times " << count);
      fault.count = count;
      disk_->Order(fault);
      const absl::Status failed = FailingStep();
      EXPECT_THAT(failed, HasError(ErrorId::kCorrupt));
      EXPECT_THAT(std::string(failed.message()),
                  AllOf(HasSubstr(faulty_), HasSubstr("block "), HasSubstr("parameter ")));
      EXPECT_THAT(Status().getJobs()[1].getFailed().cStr(), HasSubstr("E_CORRUPT"));
      ASSERT_NO_FATAL_FAILURE(ReplaceJob());
    }
  }
}

TEST_F(DiskFaults, AJobWhoseSlotsAreNeverZeroedIsRefused) {
  ASSERT_NO_FATAL_FAILURE(Start(Paths::kFaultyAlone));
  ASSERT_NO_FATAL_FAILURE(DeleteJob());
  disk_->Order({.kind = DiskFault::Kind::kHang, .of = DiskFault::Of::kWrites});
  const absl::Status refused = Training::Start(socket_, "job", kOnSwap).status();
  EXPECT_THAT(refused, HasError(ErrorId::kSwapTimeout));
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr(faulty_), HasSubstr("zero-write at offset")));
  EXPECT_OK(other_->Step());
  EXPECT_THAT(Training::Start(socket_, "job", kOnSwap), HasError(ErrorId::kSwapTimeout));
  disk_->Work();
  ASSERT_TRUE(testing::Eventually([&] { return Status().getSwap()[0].getLateNow() == 0; }));
  ASSERT_OK_AND_ASSIGN(job_, Training::Start(socket_, "job", kOnSwap));
  for (int step = 0; step < 2; ++step) ASSERT_OK(job_->Step());
  EXPECT_OK(job_->CheckStates());
}

TEST_F(DiskFaults, ADaemonWhoseDiskHangsCanBeStopped) {
  ASSERT_NO_FATAL_FAILURE(Start(Paths::kFaultyAlone));
  disk_->Order({.kind = DiskFault::Kind::kHang});
  std::thread trainer([this] { EXPECT_FALSE(job_->Step().ok()); });
  EXPECT_TRUE(testing::Eventually([&] { return Status().getSwap()[0].getErrors() > 0; }));
  const testing::Ended ended = daemon_->Stop();
  trainer.join();
  EXPECT_EQ(ended.exit_code, 0) << ended.signal;
  EXPECT_THAT(ended.errors, AllOf(HasSubstr("swap path 0 (" + faulty_),
                                  HasSubstr("does not answer"), HasSubstr("ending without them")));
}

TEST_F(DiskFaults, ADiskThatIsTooSmallIsRefusedWithBothSizes) {
  const auto refused = testing::DaemonProcess::Start(
      socket_, {"swap.paths=" + faulty_, "swap.capacity=64MiB", "swap.probe=never"});
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(std::string(refused.status().message()),
              AllOf(HasSubstr("E_SWAP_NOSPC"), HasSubstr("64.0 MiB"), HasSubstr("32.0 MiB")));
}

}  // namespace
}  // namespace forebay::daemon
