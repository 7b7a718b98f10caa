// SPDX-License-Identifier: Apache-2.0
// Goal    A second job is admitted although the first has all its states in DRAM: the first job moves to swap as many blocks as
//         the second needs. Both train on with the bits of the scalar reference, and the DRAM in the status equals the kernel's
//         count. If a client of one job dies while blocks move, or if the disk fails then, the other job is unharmed. A job
//         that cannot fit is refused at once, with the numbers.
// Method  A real daemon with a small dram.limit. A library loaded into the daemon makes its writes hang or fail, so that the
//         test can act in the middle of a move.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "client/admin.h"
#include "client/client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/support/daemon_process.h"
#include "tests/support/sanitized.h"
#include "tests/support/status_test.h"
#include "tests/support/training.h"
#include "tests/support/training_client.h"

namespace forebay::daemon {
namespace {

using client::Attachment;
using protocol::ErrorId;
using protocol::Layout;
using ::testing::AllOf;
using testing::HasError;
using ::testing::HasSubstr;
using testing::JobShape;
using testing::ReferenceTrainer;

constexpr auto kTimeout = std::chrono::seconds(60);

// Trains one rank, and compares its states with a scalar reference trainer.
class Training {
 public:
  static absl::StatusOr<std::unique_ptr<Training>> Start(const std::string& socket,
                                                         const std::string& job,
                                                         const JobShape& shape, uint64_t seed) {
    ASSIGN_OR_RETURN(Layout layout, Layout::Create(testing::MakeLayoutSpec(shape)));
    auto training = std::make_unique<Training>(std::move(layout), seed);
    ASSIGN_OR_RETURN(training->session_,
                     Attachment::Attach({.socket = socket,
                                         .job = job,
                                         .layout = testing::MakeLayoutSpec(shape),
                                         .timeout = kTimeout}));
    RETURN_IF_ERROR(testing::WriteInitial(*training->session_, seed));
    return training;
  }
  Training(Layout layout, uint64_t seed)
      : layout_(std::move(layout)), reference_(layout_, /*world_size=*/1, seed) {}

  void Step() {
    ++step_;
    std::vector<uint32_t> groups(layout_.groups().size());
    std::iota(groups.begin(), groups.end(), 0);
    (void)reference_.Step(step_, testing::MakeHyperParams(), 0, groups);
    ASSERT_OK(testing::TrainStep(*session_, {.rank = 0, .t = step_}));
    for (const uint32_t group : groups) {
      ASSERT_OK_AND_ASSIGN(const client::Lease lease, session_->Fetch(group, kTimeout));
      EXPECT_TRUE(std::ranges::equal(lease.bytes, reference_.Weights(group)))
          << "weights of group " << group << " after step " << step_;
      EXPECT_OK(session_->Release(lease));
    }
  }
  // Drops the session as a process that dies does. Then reattaches as the next process of the same run.
  void Reattach(const std::string& socket, const std::string& job) {
    session_.reset();
    ASSERT_OK_AND_ASSIGN(
        session_,
        Attachment::Attach(
            {.socket = socket, .job = job, .layout = layout_.spec(), .timeout = kTimeout}));
    EXPECT_EQ(session_->committed_step(), step_);
  }
  void CheckStates() { EXPECT_OK(testing::CheckStates(*session_, reference_)); }

 private:
  Layout layout_;
  ReferenceTrainer reference_;
  std::unique_ptr<Attachment> session_;
  uint64_t step_ = 0;
};

// The first job has all its blocks in DRAM, and the limit leaves less than the second needs.
const JobShape kFirst = {.world_size = 1, .groups = 8, .group_elems = 64 << 10};
constexpr uint64_t kBlockBytes = 2 * 16384;
constexpr uint64_t kBlocks = 129;
constexpr uint64_t kLastBlockBytes = 8192;  // The last block is the first to move to swap.
// Shape of held_client's job, except for the world size.
const JobShape kSecond = {.world_size = 1};

class SecondJob : public ::testing::Test {
 protected:
  void Start(const std::vector<std::string>& more = {}) {
    ASSERT_EQ(::setenv("LD_PRELOAD", FAULTY_DISK_PATH, 1), 0);
    ASSERT_EQ(::setenv("FOREBAY_TEST_DISK", (dir_.path() + "/order").c_str(), 1), 0);
    std::vector<std::string> settings = {
        "swap.paths=" + dir_.Make("swap_a") + "," + dir_.Make("swap_b"), "swap.capacity=32MiB",
        "io.engine=threads", "update.block_elems=4096", "dram.limit=15724KiB"};
    settings.insert(settings.end(), more.begin(), more.end());
    auto daemon = testing::DaemonProcess::Start(socket_, settings);
    ::unsetenv("LD_PRELOAD");
    ASSERT_OK(daemon);
    daemon_ = *std::move(daemon);
    ASSERT_OK_AND_ASSIGN(admin_, client::AdminClient::Connect({.socket = socket_}));
    ASSERT_OK_AND_ASSIGN(first_, Training::Start(socket_, "first", kFirst, 7));
    ASSERT_NO_FATAL_FAILURE(first_->Step());
    ASSERT_EQ(Job("first").resident_blocks, kBlocks);
  }
  // Orders "fail TEXT", "hang TEXT" or "work" from the library in the daemon.
  void Order(const std::string& order) {
    dir_.Write("order.new", order);
    ASSERT_EQ(::rename((dir_.path() + "/order.new").c_str(), (dir_.path() + "/order").c_str()), 0);
  }
  struct JobNumbers {
    std::string name;
    std::string failed;
    uint64_t blocks = 0;
    uint64_t resident_blocks = 0;
    uint64_t sessions = 0;
  };
  // Returns the numbers of the job `name`. The result's name is empty if no such job exists.
  JobNumbers Job(const std::string& name) {
    const client::NodeStatus status = *admin_->Status();
    for (const auto job : status->getJobs()) {
      if (job.getName() != name) continue;
      return {.name = name,
              .failed = job.getFailed(),
              .blocks = job.getBlocks(),
              .resident_blocks = job.getResidentBlocks(),
              .sessions = job.getSessions()};
    }
    return {};
  }
  struct StateBytes {
    uint64_t of_blocks = 0;  // bytes of resident blocks
    uint64_t allocated = 0;  // Bytes allocated, as counted by the kernel.
    uint64_t arena = 0;

    bool agree() const { return of_blocks == allocated && of_blocks == arena; }
  };
  // Bytes of the first job's states, counted in three ways.
  StateBytes StateBytesNow() {
    StateBytes bytes;
    const client::NodeStatus status = *admin_->Status();
    for (const auto job : status->getJobs()) {
      if (job.getName() != "first") continue;
      const uint64_t blocks = job.getResidentBlocks();
      bytes.of_blocks =
          blocks == kBlocks ? (kBlocks - 1) * kBlockBytes + kLastBlockBytes : blocks * kBlockBytes;
    }
    for (const auto arena : status->getMemory().getArenas()) {
      if (arena.getKind() != "state" || arena.getJob() != "first") continue;
      bytes.allocated += arena.getAllocatedBytes();
      bytes.arena += arena.getSizeBytes();
    }
    return bytes;
  }
  // Waits until the three counts agree: while a block moves, the daemon counts the block before its memory changes.
  void ExpectStateBytesAreTrue() {
    StateBytes bytes;
    EXPECT_TRUE(testing::Eventually([&] { return (bytes = StateBytesNow()).agree(); }))
        << bytes.of_blocks << " of resident blocks, " << bytes.allocated << " allocated, "
        << bytes.arena << " in the arena";
    const client::NodeStatus status = *admin_->Status();
    if (testing::kSanitized) return;  // The sanitizer's heap would count too.
    EXPECT_LE(status->getMemory().getPeakBytes(), status->getMemory().getLimitBytes());
  }

  const testing::TempDir dir_;
  const std::string socket_ = dir_.path() + "/s";
  std::unique_ptr<testing::DaemonProcess> daemon_;
  std::unique_ptr<client::AdminClient> admin_;
  std::unique_ptr<Training> first_;
};

TEST_F(SecondJob, IsAdmittedAndBothHaveTheBitsThatEachHasAlone) {
  ASSERT_NO_FATAL_FAILURE(Start());
  ExpectStateBytesAreTrue();
  ASSERT_OK_AND_ASSIGN(auto second, Training::Start(socket_, "second", kSecond, 8));
  EXPECT_LT(Job("first").resident_blocks, Job("first").blocks);
  EXPECT_GT(Job("first").resident_blocks, 0U) << "no more than the second needs";
  EXPECT_EQ(Job("second").resident_blocks, 0U);
  ExpectStateBytesAreTrue();
  for (int step = 0; step < 3; ++step) {
    ASSERT_NO_FATAL_FAILURE(first_->Step());
    ASSERT_NO_FATAL_FAILURE(second->Step());
  }
  first_->CheckStates();
  second->CheckStates();
  ExpectStateBytesAreTrue();
}

TEST_F(SecondJob, ThatEndsGivesTheFirstItsRoomBackWhileItTrains) {
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_OK_AND_ASSIGN(auto second, Training::Start(socket_, "second", kSecond, 8));
  ASSERT_NO_FATAL_FAILURE(first_->Step());
  ASSERT_NO_FATAL_FAILURE(second->Step());
  const uint64_t left = Job("first").resident_blocks;
  ASSERT_LT(left, kBlocks);
  second.reset();
  ASSERT_TRUE(testing::Eventually([&] { return Job("second").sessions == 0; }));
  ASSERT_OK(admin_->DeleteJob("second"));
  for (int step = 0; step < 3; ++step) ASSERT_NO_FATAL_FAILURE(first_->Step());
  // All blocks return to DRAM, except for the DRAM reserved for readers, a 64th of the limit.
  constexpr uint64_t kForReaders = (15724 << 10) / 64 / kBlockBytes + 1;
  EXPECT_TRUE(testing::Eventually([&] {
    return Job("first").resident_blocks >= kBlocks - kForReaders;
  })) << Job("first").resident_blocks
      << " of " << kBlocks << ", before " << left;
  ExpectStateBytesAreTrue();
  ASSERT_NO_FATAL_FAILURE(first_->Step());
  first_->CheckStates();
}

TEST_F(SecondJob, IsAdmittedWhileTheFirstTrains) {
  ASSERT_NO_FATAL_FAILURE(Start());
  absl::StatusOr<std::unique_ptr<Training>> second;
  std::thread attaching([&] { second = Training::Start(socket_, "second", kSecond, 8); });
  for (int step = 0; step < 4; ++step) {
    first_->Step();
  }
  attaching.join();
  ASSERT_OK(second);
  ASSERT_NO_FATAL_FAILURE((*second)->Step());
  ASSERT_NO_FATAL_FAILURE(first_->Step());
  first_->CheckStates();
  (*second)->CheckStates();
}

TEST_F(SecondJob, ThatIsKilledWhileABlockMovesCostsTheFirstNothing) {
  ASSERT_NO_FATAL_FAILURE(Start());
  Order("hang swap_");
  {
    auto waiting =
        testing::RunningProgram::Start({HELD_CLIENT_PATH, socket_, "0", "1", "begin"}, "attaching");
    ASSERT_TRUE(testing::Eventually([&] { return Job("job").sessions == 1; }));
    waiting->Kill();
  }
  EXPECT_TRUE(testing::Eventually([&] { return Job("job").name.empty(); }));
  Order("work");
  ASSERT_NO_FATAL_FAILURE(first_->Step());
  first_->CheckStates();
  ASSERT_OK_AND_ASSIGN(auto second, Training::Start(socket_, "second", kSecond, 8));
  ASSERT_NO_FATAL_FAILURE(second->Step());
  ASSERT_NO_FATAL_FAILURE(first_->Step());
  ExpectStateBytesAreTrue();
}

TEST_F(SecondJob, IsAdmittedThoughTheFirstLosesItsRankWhileABlockMoves) {
  ASSERT_NO_FATAL_FAILURE(Start());
  Order("hang swap_");
  absl::StatusOr<std::unique_ptr<Training>> second;
  std::thread attaching([&] { second = Training::Start(socket_, "second", kSecond, 8); });
  EXPECT_TRUE(testing::Eventually([&] { return Job("second").sessions == 1; }));
  first_->Reattach(socket_, "first");
  EXPECT_EQ(Job("first").resident_blocks, kBlocks) << "the first block is still being written";
  Order("work");
  attaching.join();
  ASSERT_OK(second);
  ASSERT_NO_FATAL_FAILURE(first_->Step());
  ASSERT_NO_FATAL_FAILURE((*second)->Step());
  first_->CheckStates();
  (*second)->CheckStates();
  ExpectStateBytesAreTrue();
}

TEST_F(SecondJob, IsRefusedWhereTheFirstCannotWriteItsBlocks) {
  ASSERT_NO_FATAL_FAILURE(Start());
  Order("fail swap_");
  const auto refused = Training::Start(socket_, "second", kSecond, 8);
  EXPECT_THAT(refused, HasError(ErrorId::kDramLimit));
  EXPECT_THAT(std::string(refused.status().message()),
              AllOf(HasSubstr("job first"), HasSubstr("Input/output error")));
  EXPECT_EQ(Job("first").resident_blocks, Job("first").blocks);
  EXPECT_EQ(Job("first").failed, "");
  ExpectStateBytesAreTrue();
  Order("work");
  ASSERT_NO_FATAL_FAILURE(first_->Step());
  first_->CheckStates();
}

TEST_F(SecondJob, IsRefusedAtOnceWithTheNumbersWhereItCannotFit) {
  ASSERT_NO_FATAL_FAILURE(Start());
  const JobShape large = {.world_size = 1, .groups = 8, .group_elems = 512 << 10};
  const auto refused = Training::Start(socket_, "second", large, 8);
  EXPECT_THAT(refused, HasError(ErrorId::kDramLimit));
  EXPECT_THAT(std::string(refused.status().message()),
              AllOf(HasSubstr("the job needs"), HasSubstr("the limit is 15.4 MiB (16101376 bytes)"),
                    HasSubstr("other jobs hold"), HasSubstr("4.0 MiB (4202496 bytes) can move")));
  EXPECT_EQ(Job("first").resident_blocks, Job("first").blocks);
  ASSERT_NO_FATAL_FAILURE(first_->Step());
}

}  // namespace
}  // namespace forebay::daemon
