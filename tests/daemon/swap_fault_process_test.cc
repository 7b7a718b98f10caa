// SPDX-License-Identifier: Apache-2.0
// Goal    A swapped block with other bytes than were written is an error that names path and offset, in the step that would
//         have used it. The job becomes unusable, reports that, and can be deleted; the daemon and other jobs continue. Any
//         number of staging slots works. If writes fail on one path, the step uses the other path. If they fail on all paths,
//         the step waits until a write succeeds, the status gives the cause, and other jobs continue. A disk that does not
//         answer is named, and does not prevent the daemon from stopping. The status shows the progress of a job's creation.
// Method  The test overwrites the swap file of a running daemon between two steps. A library loaded into the daemon makes its
//         writes fail or hang.

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "client/admin.h"
#include "client/client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nvme/volume.h"
#include "tests/support/daemon_process.h"
#include "tests/support/status_test.h"
#include "tests/support/training.h"
#include "tests/support/training_client.h"

namespace forebay::daemon::swap_fault_process_test {
namespace {

using client::Attachment;
using protocol::ErrorId;
using testing::HasError;
using ::testing::HasSubstr;

constexpr auto kTimeout = std::chrono::seconds(60);

absl::StatusOr<std::unique_ptr<Attachment>> Attach(const std::string& socket,
                                                   const std::string& job) {
  ASSIGN_OR_RETURN(auto session,
                   Attachment::Attach({.socket = socket,
                                       .job = job,
                                       .layout = testing::MakeLayoutSpec({.world_size = 1}),
                                       .timeout = kTimeout}));
  RETURN_IF_ERROR(testing::WriteInitial(*session, 1));
  return session;
}

void OverwriteFile(const std::string& path) {
  const protocol::UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_TRUE(fd.valid()) << path;
  struct stat info = {};
  ASSERT_EQ(::fstat(fd.get(), &info), 0);
  const std::string noise(1 << 20, 'n');
  for (off_t at = 0; at < info.st_size; at += static_cast<off_t>(noise.size())) {
    ASSERT_EQ(::pwrite(fd.get(), noise.data(), noise.size(), at),
              static_cast<ssize_t>(noise.size()));
  }
  ASSERT_EQ(::fsync(fd.get()), 0);
}

TEST(SwapFault, OverwrittenBlocksFailTheStepByNameAndTheJobAlone) {
  const testing::TempDir dir;
  const std::string socket = dir.path() + "/s";
  const std::string swap = dir.Make("swap");
  ASSERT_OK_AND_ASSIGN(auto daemon, testing::DaemonProcess::Start(
                                        socket, {"swap.paths=" + swap, "swap.capacity=16MiB",
                                                 "update.block_elems=4096", "dram.limit=6474KiB"}));
  ASSERT_OK_AND_ASSIGN(auto session, Attach(socket, "job"));
  for (uint64_t t = 1; t <= 2; ++t) {
    ASSERT_OK(testing::TrainStep(*session, {.rank = 0, .t = t}));
  }
  OverwriteFile(swap + "/forebay.swap");
  const auto failed = testing::TrainStep(*session, {.rank = 0, .t = 3});
  EXPECT_THAT(failed, HasError(ErrorId::kCorrupt));
  EXPECT_THAT(failed.status().message().data(), HasSubstr(swap));
  EXPECT_THAT(session->Fetch(0, kTimeout), HasError(ErrorId::kJobFailed));

  ASSERT_OK_AND_ASSIGN(auto admin, client::AdminClient::Connect({.socket = socket}));
  ASSERT_OK_AND_ASSIGN(const client::NodeStatus status, admin->Status());
  EXPECT_THAT(status->getJobs()[0].getFailed().cStr(), HasSubstr("E_CORRUPT"));
  EXPECT_EQ(status->getJobs()[0].getPublishedStep(), 2U);
  (void)session->Detach();
  session.reset();  // The weights count as the job's memory until the client's mapping ends.
  ASSERT_TRUE(
      testing::Eventually([&] { return (*admin->Status())->getJobs()[0].getSessions() == 0; }));
  EXPECT_OK(admin->DeleteJob("job"));

  ASSERT_OK_AND_ASSIGN(auto other, Attach(socket, "other"));
  for (uint64_t t = 1; t <= 3; ++t) {
    EXPECT_OK(testing::TrainStep(*other, {.rank = 0, .t = t}));
  }
}

// More transfers run at once than the volume has requests, so that some transfers wait for a request.
TEST(SwapFault, MoreStagingSlotsThanSwapRequestsAreNoError) {
  const testing::TempDir dir;
  const std::string socket = dir.path() + "/s";
  const std::string swap = dir.Make("swap");
  ASSERT_OK_AND_ASSIGN(auto daemon, testing::DaemonProcess::Start(
                                        socket, {"swap.paths=" + swap, "swap.capacity=64MiB",
                                                 "update.block_elems=64", "swap.staging=16MiB",
                                                 "dram.limit=23748KiB"}));
  ASSERT_OK_AND_ASSIGN(
      auto session, Attachment::Attach({.socket = socket,
                                        .job = "job",
                                        .layout = testing::MakeLayoutSpec(
                                            {.world_size = 1, .groups = 4, .group_elems = 30'000}),
                                        .timeout = kTimeout}));
  ASSERT_OK(testing::WriteInitial(*session, 1));
  for (uint64_t t = 1; t <= 2; ++t) {
    EXPECT_OK(testing::TrainStep(*session, {.rank = 0, .t = t}));
  }
  ASSERT_OK_AND_ASSIGN(auto admin, client::AdminClient::Connect({.socket = socket}));
  const client::NodeStatus status = *admin->Status();
  EXPECT_GT(status->getJobs()[0].getBlocks() - status->getJobs()[0].getResidentBlocks(),
            nvme::Volume::kRequestsMax);
}

// A daemon with two swap paths, whose writes fail or hang on demand.
class FaultySwap : public ::testing::Test {
 protected:
  // `dram_limit` is "dram.limit=SIZE".
  void Start(const std::string& dram_limit) {
    ASSERT_EQ(::setenv("LD_PRELOAD", FAULTY_DISK_PATH, 1), 0);
    ASSERT_EQ(::setenv("FOREBAY_TEST_DISK", (dir_.path() + "/order").c_str(), 1), 0);
    auto daemon = testing::DaemonProcess::Start(
        socket_, {"swap.paths=" + a_ + "," + b_, "swap.capacity=16MiB", "io.engine=threads",
                  "update.block_elems=4096", dram_limit});
    ::unsetenv("LD_PRELOAD");
    ASSERT_OK(daemon);
    daemon_ = *std::move(daemon);
    ASSERT_OK_AND_ASSIGN(admin_, client::AdminClient::Connect({.socket = socket_}));
  }

  // Returns the node's status. The reader is valid until the next call.
  schema::NodeStatus::Reader Status() {
    status_ = admin_->Status().value();
    return *status_;
  }

  // Orders "fail TEXT", "hang TEXT" or "work" from the library in the daemon.
  void Order(const std::string& order) {
    dir_.Write("order.new", order);
    ASSERT_EQ(::rename((dir_.path() + "/order.new").c_str(), (dir_.path() + "/order").c_str()), 0);
  }

  const testing::TempDir dir_;
  const std::string socket_ = dir_.path() + "/s";
  const std::string a_ = dir_.Make("swap_a");
  const std::string b_ = dir_.Make("swap_b");
  std::unique_ptr<testing::DaemonProcess> daemon_;
  std::unique_ptr<client::AdminClient> admin_;
  client::NodeStatus status_;
};

TEST_F(FaultySwap, AStepWhoseWritesFailUsesTheOtherPathOrWaits) {
  ASSERT_NO_FATAL_FAILURE(Start("dram.limit=6874KiB"));
  ASSERT_OK_AND_ASSIGN(auto small,
                       Attachment::Attach({.socket = socket_,
                                           .job = "small",
                                           .layout = testing::MakeLayoutSpec(
                                               {.world_size = 1, .groups = 1, .group_elems = 100}),
                                           .timeout = kTimeout}));
  ASSERT_OK(testing::WriteInitial(*small, 1));
  ASSERT_OK_AND_ASSIGN(auto session, Attach(socket_, "job"));
  ASSERT_LT(Status().getJobs()[1].getResidentBlocks(), Status().getJobs()[1].getBlocks());
  ASSERT_OK(testing::TrainStep(*session, {.rank = 0, .t = 1}));

  Order("fail swap_a");
  ASSERT_OK(testing::TrainStep(*session, {.rank = 0, .t = 2}));
  EXPECT_GT(Status().getSwap()[0].getErrors(), 0u);
  EXPECT_EQ(Status().getSwap()[1].getErrors(), 0u);

  Order("fail swap_");
  absl::Status stepped = absl::UnknownError("not yet");
  std::thread trainer([&session, &stepped] {
    stepped = testing::TrainStep(*session, {.rank = 0, .t = 3}).status();
  });
  EXPECT_TRUE(testing::Eventually([&] { return Status().getJobs()[1].hasSwapWait(); }));
  const schema::JobStatus::Reader waiting = Status().getJobs()[1];
  EXPECT_THAT(
      waiting.getSwapWait().cStr(),
      ::testing::AllOf(HasSubstr("/swap_"), HasSubstr("block "), HasSubstr("Input/output error")));
  EXPECT_EQ(waiting.getFailed(), "");
  EXPECT_EQ(waiting.getCommittedStep(), 3u);
  EXPECT_EQ(waiting.getPublishedStep(), 2u);
  EXPECT_OK(testing::TrainStep(*small, {.rank = 0, .t = 1})) << "other jobs go on";

  Order("work");
  trainer.join();
  EXPECT_OK(stepped);
  EXPECT_EQ(Status().getJobs()[1].getSwapWait(), "");
  EXPECT_EQ(Status().getJobs()[1].getCommittedStep(), 3u);
  EXPECT_OK(testing::TrainStep(*session, {.rank = 0, .t = 4})) << "what was written is right";
}

TEST_F(FaultySwap, APathThatFailsAgainAndAgainIsMarkedAndLeft) {
  ASSERT_NO_FATAL_FAILURE(Start("dram.limit=6474KiB"));
  ASSERT_OK_AND_ASSIGN(auto session, Attach(socket_, "job"));
  uint64_t t = 0;
  for (; t < 4; ++t) ASSERT_OK(testing::TrainStep(*session, {.rank = 0, .t = t + 1}));
  EXPECT_GT(Status().getSwap()[0].getReadRateNow(), 0);
  EXPECT_GT(Status().getSwap()[0].getWriteRateNow(), 0);
  EXPECT_NEAR(Status().getSwap()[0].getShare() + Status().getSwap()[1].getShare(), 1, 1e-9);
  EXPECT_FALSE(Status().getSwap()[0].getMarked());

  Order("fail swap_a");
  for (const uint64_t end = t + 20; t < end && !Status().getSwap()[0].getMarked(); ++t) {
    ASSERT_OK(testing::TrainStep(*session, {.rank = 0, .t = t + 1}));
  }
  EXPECT_TRUE(Status().getSwap()[0].getMarked());
  EXPECT_FALSE(Status().getSwap()[1].getMarked());
  EXPECT_GE(Status().getSwap()[0].getErrors(), 8U);
  ASSERT_OK(testing::TrainStep(*session, {.rank = 0, .t = t + 1}));
  const uint64_t errors = Status().getSwap()[0].getErrors();
  const uint64_t reads = Status().getSwap()[0].getReadOps();
  for (const uint64_t step : {t + 2, t + 3}) {
    ASSERT_OK(testing::TrainStep(*session, {.rank = 0, .t = step}));
  }
  EXPECT_EQ(Status().getSwap()[0].getErrors(), errors) << "no write is tried there";
  EXPECT_EQ(Status().getSwap()[0].getReadOps(), reads) << "nothing is there any more";
  session.reset();
  EXPECT_THAT(daemon_->Stop().errors,
              HasSubstr("swap path 0 (" + a_ + "/forebay.swap) has failed 8 times"));
}

TEST_F(FaultySwap, StatusSaysHowFarAJobIsThatIsBeingMade) {
  ASSERT_NO_FATAL_FAILURE(Start("dram.limit=6474KiB"));
  Order("hang swap_");
  std::thread trainer([this] { EXPECT_OK(Attach(socket_, "job")); });
  // True after the job's arenas have been created. The zeroing of its swap slots hangs.
  const auto zeroes = [this] {
    const auto jobs = Status().getJobs();
    return jobs.size() == 1 && jobs[0].getMadeBytes() > 0;
  };
  EXPECT_TRUE(testing::Eventually(zeroes));
  const schema::JobStatus::Reader job = Status().getJobs()[0];
  EXPECT_LT(job.getMadeBytes(), job.getMakingBytes());
  EXPECT_EQ(job.getSessions(), 1u);

  Order("work");
  trainer.join();
  const schema::JobStatus::Reader made = Status().getJobs()[0];
  EXPECT_EQ(made.getMadeBytes(), 0u);
  EXPECT_EQ(made.getMakingBytes(), 0u);
}

TEST_F(FaultySwap, ADiskThatDoesNotAnswerIsNamedAndDoesNotKeepTheDaemonFromStopping) {
  ASSERT_NO_FATAL_FAILURE(Start("dram.limit=6474KiB"));
  ASSERT_OK_AND_ASSIGN(auto session, Attach(socket_, "job"));
  ASSERT_OK(testing::TrainStep(*session, {.rank = 0, .t = 1}));
  Order("hang swap_");
  std::thread trainer(
      [&session] { EXPECT_FALSE(testing::TrainStep(*session, {.rank = 0, .t = 2}).ok()); });
  EXPECT_TRUE(testing::Eventually([&] { return Status().getSwap()[0].getLateNow() > 0; }));
  const schema::NodeStatus::Reader status = Status();
  EXPECT_GE(status.getSwap()[0].getLate(), status.getSwap()[0].getLateNow());
  EXPECT_GE(status.getSwap()[0].getLateSeconds(), 10);
  EXPECT_EQ(status.getJobs()[0].getFailed(), "");
  const testing::Ended ended = daemon_->Stop();
  trainer.join();
  EXPECT_EQ(ended.exit_code, 0) << ended.signal;
  EXPECT_THAT(ended.errors, ::testing::AllOf(HasSubstr("swap path 0 (" + a_), HasSubstr("10 s"),
                                             HasSubstr("ending without them")));
}

}  // namespace
}  // namespace forebay::daemon::swap_fault_process_test
