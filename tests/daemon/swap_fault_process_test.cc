// Goal    A swapped block that is not the one that was written is an error that names path and
//         offset, in the step that would have used it; the job is unusable, says so, and can be
//         deleted; other jobs and the daemon go on. Any number of staging slots works.
// Method  The swap file of a running daemon is overwritten from outside between two steps.

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <memory>
#include <string>
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

namespace forebay::daemon {
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
                                                 "update.block_elems=4096", "dram.limit=2100KiB"}));
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
  EXPECT_THAT(status.jobs[0].failed, HasSubstr("E_CORRUPT"));
  EXPECT_EQ(status.jobs[0].committed_step, 2U);
  (void)session->Detach();
  session.reset();  // its mapping of the weights counts until it is gone
  ASSERT_TRUE(testing::Eventually([&] { return admin->Status()->jobs[0].sessions == 0; }));
  EXPECT_OK(admin->DeleteJob("job"));

  ASSERT_OK_AND_ASSIGN(auto other, Attach(socket, "other"));
  for (uint64_t t = 1; t <= 3; ++t) {
    EXPECT_OK(testing::TrainStep(*other, {.rank = 0, .t = t}));
  }
}

// More transfers at once than the volume has requests for: they wait for each other.
TEST(SwapFault, MoreStagingSlotsThanSwapRequestsAreNoError) {
  const testing::TempDir dir;
  const std::string socket = dir.path() + "/s";
  const std::string swap = dir.Make("swap");
  ASSERT_OK_AND_ASSIGN(auto daemon, testing::DaemonProcess::Start(
                                        socket, {"swap.paths=" + swap, "swap.capacity=64MiB",
                                                 "update.block_elems=64", "swap.staging=16MiB",
                                                 "dram.limit=19MiB"}));
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
  EXPECT_GT(status.jobs[0].blocks - status.jobs[0].resident_blocks, nvme::Volume::kRequestsMax);
}

}  // namespace
}  // namespace forebay::daemon
