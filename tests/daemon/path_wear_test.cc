// SPDX-License-Identifier: Apache-2.0
// Goal    The count of bytes written to a path continues after a restart of the daemon, and from the record of an older
//         release. On another device the count begins at 0.
// Method  Real files of the build folder, and a real daemon that is started again.

#include "daemon/exec/path_wear.h"

#include <sys/stat.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "client/admin.h"
#include "client/client.h"
#include "gtest/gtest.h"
#include "tests/support/block_devices.h"
#include "tests/support/daemon_process.h"
#include "tests/support/status_test.h"
#include "tests/support/training.h"
#include "tests/support/training_client.h"

namespace forebay::daemon {
namespace {

using ::forebay::testing::TempDir;

constexpr uint64_t kTiB = uint64_t{1} << 40;
constexpr char kNoStateFolder[] = "";

uint64_t Load(const std::string& path) { return LoadWrittenBytes(path, kNoStateFolder); }

std::string RecordOf(const std::string& folder) { return folder + "/forebay.wear.toml"; }

// The bytes that release 0.1 recorded for a path with swap.endurance=1TiB, on the device of this folder.
std::string RecordOfOlderRelease(const std::string& folder, uint64_t written_bytes) {
  struct stat found {};
  EXPECT_EQ(::stat(folder.c_str(), &found), 0);
  return "# What forebayd has written to this swap path, in bytes, since swap.endurance has this "
         "value.\n# Delete it where the drive is another one.\nversion = 1\ndevice = " +
         std::to_string(found.st_dev) +
         "\nendurance = 1099511627776\nwritten = " + std::to_string(written_bytes) + "\n";
}

TEST(PathWearTest, ARecordIsOfOneDevice) {
  const TempDir dir;
  const std::string a = dir.Make("a");
  const std::string b = dir.Make("b");
  EXPECT_EQ(Load(a), 0U);
  SaveWear({{.path = a, .written_bytes = 12345},
            {.path = b, .written_bytes = 5 * kTiB},
            {.path = dir.path() + "/nowhere", .written_bytes = 1}},
           kNoStateFolder);
  EXPECT_EQ(Load(a), 12345U);
  EXPECT_EQ(Load(b), 5 * kTiB);
  EXPECT_EQ(Load(dir.path() + "/nowhere"), 0U);

  const std::string record = RecordOf(a);
  std::ostringstream stream;
  stream << std::ifstream(record).rdbuf();
  const std::string good = stream.str();
  const size_t written = good.find("written = ") + 10;
  for (const std::string& bad :
       {std::string(good).insert(good.find("device = ") + 9, "1"), good.substr(0, written),
        std::string(good).insert(written, "-"), std::string("\xff\xfe"), std::string()}) {
    std::ofstream(record) << bad;
    EXPECT_EQ(Load(a), 0U) << bad;
  }
}

TEST(PathWearTest, TheRecordOfAnOlderReleaseIsRead) {
  const TempDir dir;
  std::ofstream(RecordOf(dir.path())) << RecordOfOlderRelease(dir.path(), 12345);
  EXPECT_EQ(Load(dir.path()), 12345U);
}

TEST(PathWearTest, OfABlockDeviceItIsInTheStateFolder) {
  const TempDir dir;
  const std::string device = testing::AnyBlockDevice();
  if (device.empty()) GTEST_SKIP() << "there is no block device in /dev";
  SaveWear({{.path = device, .written_bytes = 12345}}, dir.path());
  EXPECT_EQ(LoadWrittenBytes(device, dir.path()), 12345U);
  EXPECT_EQ(LoadWrittenBytes(device, dir.Make("other")), 0U);
  EXPECT_EQ(LoadWrittenBytes(device, kNoStateFolder), 0U);
  // A link to the path leads to the same device.
  const std::string link = dir.path() + "/link";
  std::filesystem::create_symlink(device, link);
  EXPECT_EQ(LoadWrittenBytes(link, dir.path()), 12345U);
}

class PathWearProcess : public ::testing::Test {
 protected:
  // Starts a daemon, trains two steps of a job on swap, and stops the daemon.
  void Run(const std::vector<std::string>& more = {}) {
    std::vector<std::string> settings = {"swap.paths=" + swap_, "swap.capacity=16MiB",
                                         "update.block_elems=4096", "dram.limit=6474KiB"};
    settings.insert(settings.end(), more.begin(), more.end());
    ASSERT_OK_AND_ASSIGN(auto daemon, testing::DaemonProcess::Start(socket_, settings));
    ASSERT_OK_AND_ASSIGN(auto session, client::Attachment::Attach(
                                           {.socket = socket_,
                                            .job = "job",
                                            .layout = testing::MakeLayoutSpec({.world_size = 1})}));
    ASSERT_OK(testing::WriteInitial(*session, 1));
    for (uint64_t t = 1; t <= 2; ++t) {
      ASSERT_OK(testing::TrainStep(*session, {.rank = 0, .t = t}));
    }
    ASSERT_OK_AND_ASSIGN(auto admin, client::AdminClient::Connect({.socket = socket_}));
    ASSERT_OK_AND_ASSIGN(const client::NodeStatus status, admin->Status());
    const auto path = status->getSwap()[0];
    written_ = path.getWrittenBytes();
    written_in_all_ = path.getWrittenInAll();
    EXPECT_GT(written_, 0U);
    EXPECT_EQ(daemon->Stop().exit_code, 0);
    EXPECT_GE(Load(swap_), written_in_all_) << "recorded when the daemon stops";
  }

  const TempDir dir_;
  const std::string socket_ = dir_.path() + "/s";
  const std::string swap_ = dir_.Make("swap");
  uint64_t written_ = 0;
  uint64_t written_in_all_ = 0;
};

TEST_F(PathWearProcess, OfAllStartsCountsOnWithAndWithoutTheOldKey) {
  ASSERT_NO_FATAL_FAILURE(Run());
  EXPECT_EQ(written_in_all_, written_);
  for (const char* endurance : {"swap.endurance=1TiB", "swap.endurance=2TiB"}) {
    const uint64_t before = written_in_all_;
    ASSERT_NO_FATAL_FAILURE(Run({endurance}));
    EXPECT_GE(written_in_all_, before + written_) << endurance;
  }
}

TEST_F(PathWearProcess, CountsOnFromTheRecordOfAnOlderRelease) {
  std::ofstream(RecordOf(swap_)) << RecordOfOlderRelease(swap_, 2 * kTiB);
  ASSERT_NO_FATAL_FAILURE(Run());
  EXPECT_EQ(written_in_all_, 2 * kTiB + written_);
}

}  // namespace
}  // namespace forebay::daemon
