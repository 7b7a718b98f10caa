// Goal    What was written to a drive counts on after a restart of the daemon, and days of life with it; it begins anew
//         with another endurance or another device.
// Method  Real files of the build folder, and a real daemon that is started again.

#include "daemon/exec/path_wear.h"

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

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

uint64_t Load(const std::string& path, uint64_t endurance_bytes) {
  return LoadWrittenBytes(path, kNoStateFolder, endurance_bytes);
}

TEST(PathWearTest, WhatIsKeptIsOfOneEnduranceAndDevice) {
  const TempDir dir;
  const std::string a = dir.Make("a");
  const std::string b = dir.Make("b");
  EXPECT_EQ(Load(a, kTiB), 0U);
  SaveWear({{.path = a, .endurance_bytes = kTiB, .written_bytes = 12345},
            {.path = b, .written_bytes = 5 * kTiB},
            {.path = dir.path() + "/nowhere", .written_bytes = 1}},
           kNoStateFolder);
  EXPECT_EQ(Load(a, kTiB), 12345U);
  EXPECT_EQ(Load(a, 2 * kTiB), 0U);
  EXPECT_EQ(Load(a, 0), 0U);
  EXPECT_EQ(Load(b, 0), 5 * kTiB);
  EXPECT_EQ(Load(dir.path() + "/nowhere", 0), 0U);

  const std::string kept = a + "/forebay.wear.toml";
  std::ostringstream stream;
  stream << std::ifstream(kept).rdbuf();
  const std::string good = stream.str();
  const size_t written = good.find("written = ") + 10;
  for (const std::string& bad :
       {std::string(good).insert(good.find("device = ") + 9, "1"), good.substr(0, written),
        std::string(good).insert(written, "-"), std::string("\xff\xfe"), std::string()}) {
    std::ofstream(kept) << bad;
    EXPECT_EQ(Load(a, kTiB), 0U) << bad;
  }
}

TEST(PathWearTest, OfABlockDeviceItIsInTheStateFolder) {
  const TempDir dir;
  const std::string device = testing::AnyBlockDevice();
  if (device.empty()) GTEST_SKIP() << "there is no block device in /dev";
  SaveWear({{.path = device, .endurance_bytes = kTiB, .written_bytes = 12345}}, dir.path());
  EXPECT_EQ(LoadWrittenBytes(device, dir.path(), kTiB), 12345U);
  EXPECT_EQ(LoadWrittenBytes(device, dir.Make("other"), kTiB), 0U);
  EXPECT_EQ(LoadWrittenBytes(device, kNoStateFolder, kTiB), 0U);
  // Through a link it is the same device.
  const std::string link = dir.path() + "/link";
  std::filesystem::create_symlink(device, link);
  EXPECT_EQ(LoadWrittenBytes(link, dir.path(), kTiB), 12345U);
}

class PathWearProcess : public ::testing::Test {
 protected:
  // A daemon's life, with two steps of a job that is on swap.
  void Run(const std::string& endurance) {
    ASSERT_OK_AND_ASSIGN(
        auto daemon, testing::DaemonProcess::Start(
                         socket_, {"swap.paths=" + swap_, "swap.capacity=16MiB",
                                   "update.block_elems=4096", "dram.limit=6474KiB", endurance}));
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
    left_ = path.getEnduranceBytes();
    days_left_ = path.getDaysLeft();
    EXPECT_GT(written_, 0U);
    EXPECT_EQ(daemon->Stop().exit_code, 0);
  }

  const TempDir dir_;
  const std::string socket_ = dir_.path() + "/s";
  const std::string swap_ = dir_.Make("swap");
  uint64_t written_ = 0;
  uint64_t written_in_all_ = 0;
  uint64_t left_ = 0;
  double days_left_ = 0;
};

TEST_F(PathWearProcess, OfAllStartsCountsUntilTheEnduranceIsSetAnew) {
  ASSERT_NO_FATAL_FAILURE(Run("swap.endurance=1TiB"));
  EXPECT_EQ(written_in_all_, written_);
  EXPECT_EQ(left_, kTiB - written_);
  const uint64_t first = written_in_all_;
  ASSERT_NO_FATAL_FAILURE(Run("swap.endurance=1TiB"));
  EXPECT_GE(written_in_all_, first + written_);
  EXPECT_EQ(left_, kTiB - written_in_all_);
  EXPECT_GT(days_left_, 0);
  ASSERT_NO_FATAL_FAILURE(Run("swap.endurance=2TiB"));
  EXPECT_EQ(written_in_all_, written_);
  EXPECT_EQ(left_, 2 * kTiB - written_);
}

TEST_F(PathWearProcess, OfADriveThatIsWornOutNoDayIsLeft) {
  SaveWear({{.path = swap_, .endurance_bytes = kTiB, .written_bytes = 2 * kTiB}}, kNoStateFolder);
  ASSERT_NO_FATAL_FAILURE(Run("swap.endurance=1TiB"));
  EXPECT_EQ(written_in_all_, 2 * kTiB + written_);
  EXPECT_EQ(left_, 0U);
  EXPECT_EQ(days_left_, 0);
}

}  // namespace
}  // namespace forebay::daemon
