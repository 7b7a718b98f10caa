// SPDX-License-Identifier: Apache-2.0
// Goal    A persistent swap path is measured at its first start only. Its stored rates are used if they are complete and belong
//         to this device. A path that is too small or cannot be measured prevents no start.
// Method  Real files in the build folder. path_probe_test.cc tests the duration of a probe.

#include "daemon/exec/path_rates.h"

#include <sys/stat.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "client/admin.h"
#include "client/client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nvme/find_volume.h"
#include "nvme/path_probe.h"
#include "protocol/json.h"
#include "protocol/units.h"
#include "tests/nvme/volume_world.h"
#include "tests/support/block_devices.h"
#include "tests/support/daemon_process.h"
#include "tests/support/status_test.h"
#include "tests/support/training.h"
#include "tests/support/training_client.h"

namespace forebay::daemon {
namespace {

using ::forebay::testing::TempDir;
using nvme::PathRates;
using protocol::kMiB;

constexpr std::chrono::milliseconds kLimit(2000);
constexpr std::chrono::milliseconds kNoProbe(0);

SwapSpaceOptions Paths(const std::vector<std::string>& folders, uint64_t capacity_bytes) {
  SwapSpaceOptions options;
  for (const std::string& folder : folders) {
    options.paths.push_back({.path = folder, .capacity_bytes = capacity_bytes});
  }
  return options;
}

void ExpectSane(const std::optional<PathRates>& rates) {
  ASSERT_TRUE(rates.has_value());
  for (const double rate : {rates->read, rates->write, rates->mixed}) {
    EXPECT_GT(rate, 1e6);
    EXPECT_LT(rate, 1e12);
  }
  EXPECT_GT(rates->read_seconds, 0);
  EXPECT_LE(static_cast<double>(kMiB) / rates->read_seconds, rates->read * 1.0001)
      << "alone is not faster";
  EXPECT_GE(rates->depth, 1U);
  EXPECT_LE(rates->request_bytes * rates->depth, 32 * kMiB);
}

std::string TextOf(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

TEST(PathRatesTest, AProbeMeasuresEachPath) {
  const TempDir dir;
  ASSERT_OK_AND_ASSIGN(
      const auto rates,
      nvme::ProbePaths({.paths = Paths({dir.Make("a"), dir.Make("b")}, 300 * kMiB).paths}, {},
                       2 * kLimit));
  ASSERT_EQ(rates.size(), 2U);
  for (const auto& one : rates) ExpectSane(one);
}

TEST(PathRatesTest, ASmallPathIsNotMeasured) {
  const TempDir dir;
  ASSERT_OK_AND_ASSIGN(const auto rates,
                       nvme::ProbePaths({.paths = Paths({dir.Make("a")}, 32 * kMiB).paths}, {},
                                        std::chrono::seconds(1)));
  EXPECT_FALSE(rates.at(0).has_value());
}

TEST(PathRatesTest, WhatIsKeptIsTakenAndNothingIsMeasuredAgain) {
  const TempDir dir;
  const std::string folder = dir.Make("a");
  const SwapSpaceOptions options = Paths({folder}, 300 * kMiB);
  EXPECT_FALSE(RatesOf(options, {}, kNoProbe).at(0).has_value());
  const std::optional<PathRates> first = RatesOf(options, {}, kLimit).at(0);
  ExpectSane(first);
  const std::string kept = folder + "/forebay.rates.toml";
  const std::string text = TextOf(kept);
  for (const auto limit : {kLimit, kNoProbe}) {
    const std::optional<PathRates> again = RatesOf(options, {}, limit).at(0);
    ASSERT_TRUE(again.has_value());
    EXPECT_NEAR(again->read, first->read, 1);
    EXPECT_NEAR(again->mixed, first->mixed, 1);
    EXPECT_EQ(again->request_bytes, first->request_bytes);
    EXPECT_EQ(again->depth, first->depth);
    EXPECT_NEAR(again->read_seconds, first->read_seconds, 1e-9);
  }
  EXPECT_EQ(TextOf(kept), text);
}

TEST(PathRatesTest, OfABlockDeviceItIsKeptInTheStateFolder) {
  const TempDir dir;
  const auto device = testing::LoopDevice::Make(dir.path() + "/backing", 400 * kMiB);
  if (device == nullptr) GTEST_SKIP() << "no loop device can be made here";
  SwapSpaceOptions options = Paths({device->path()}, 300 * kMiB);
  ExpectSane(RatesOf(options, {}, kLimit).at(0));
  EXPECT_FALSE(RatesOf(options, {}, kNoProbe).at(0).has_value()) << "it has no place";
  options.state_folder = dir.Make("state");
  ExpectSane(RatesOf(options, {}, kLimit).at(0));
  ExpectSane(RatesOf(options, {}, kNoProbe).at(0));
  EXPECT_FALSE(LoadRates(device->path(), dir.path()).has_value());
}

TEST(PathRatesTest, WhatIsOfAnotherDeviceOrBrokenIsNotTaken) {
  const TempDir dir;
  const std::string folder = dir.Make("a");
  const std::string kept = folder + "/forebay.rates.toml";
  ExpectSane(RatesOf(Paths({folder}, 300 * kMiB), {}, kLimit).at(0));
  const std::string good = TextOf(kept);
  ASSERT_TRUE(LoadRates(folder).has_value());
  const size_t device = good.find("device = ") + 9;
  const size_t read = good.find("read = ") + 7;
  for (const std::string& bad :
       {std::string(good).insert(device, "1"), std::string(good).replace(read, 1, "-"),
        std::string(good).insert(good.find("version = ") + 10, "9"), good.substr(0, read),
        std::string("read = ["), std::string("\xff\xfe"), std::string()}) {
    std::ofstream(kept) << bad;
    EXPECT_FALSE(LoadRates(folder).has_value()) << bad;
  }
  std::filesystem::remove(kept);
  std::filesystem::create_directory(kept);
  EXPECT_FALSE(LoadRates(folder).has_value());
}

TEST(PathRatesTest, APathWithDurableJobsIsNotMeasured) {
  const TempDir dir;
  const std::string folder = dir.Make("a");
  SwapSpaceOptions options = Paths({folder}, 300 * kMiB);
  options.mode = nvme::OpenMode::kRecover;
  {
    ASSERT_OK_AND_ASSIGN(const nvme::ChosenEngine chosen, nvme::CreateIoEngine());
    ASSERT_OK_AND_ASSIGN(const auto volume,
                         nvme::Volume::Open({.paths = options.paths}, *chosen.engine));
    ASSERT_OK(nvme::CommitNow(*volume, *chosen.engine, std::vector<std::byte>(8), {}));
  }
  EXPECT_FALSE(RatesOf(options, {}, kLimit).at(0).has_value());
  ASSERT_OK_AND_ASSIGN(const auto found, nvme::FindVolume(options.paths));
  EXPECT_TRUE(found.has_value()) << "the probe has made it anew";
  options.mode = nvme::OpenMode::kReclaim;
  ExpectSane(RatesOf(options, {}, kLimit).at(0));
}

TEST(PathRatesTest, APathThatCannotBeOpenedStopsNothingHere) {
  const TempDir dir;
  const auto rates = RatesOf(Paths({dir.path() + "/nowhere"}, 300 * kMiB), {}, kLimit);
  EXPECT_FALSE(rates.at(0).has_value());
}

TEST(PathRatesProcess, ADaemonMeasuresAtItsFirstStartAndShowsIt) {
  const TempDir dir;
  const std::string swap = dir.Make("swap");
  for (const bool is_first : {true, false}) {
    ASSERT_OK_AND_ASSIGN(
        auto daemon, testing::DaemonProcess::Start(dir.path() + "/s",
                                                   {"swap.paths=" + swap, "swap.capacity=300MiB",
                                                    "swap.probe=once", "update.block_elems=4096"}));
    ASSERT_OK_AND_ASSIGN(auto admin, client::AdminClient::Connect({.socket = dir.path() + "/s"}));
    ASSERT_OK_AND_ASSIGN(const client::NodeStatus status, admin->Status());
    const auto path = status->getSwap()[0];
    const std::optional<PathRates> kept = LoadRates(swap);
    ASSERT_TRUE(kept.has_value());
    EXPECT_NEAR(path.getReadRate(), kept->read, 1);
    EXPECT_NEAR(path.getWriteRate(), kept->write, 1);
    EXPECT_NEAR(path.getMixedRate(), kept->mixed, 1);
    EXPECT_EQ(path.getRequestBytes(), kept->request_bytes);
    EXPECT_EQ(path.getRequestsAtOnce(), kept->depth);
    EXPECT_NEAR(path.getReadSeconds(), kept->read_seconds, 1e-9);
    EXPECT_LT(path.getWrittenBytes(), kMiB) << "its own transfers alone";
    admin.reset();
    const testing::Ended ended = daemon->Stop();
    EXPECT_EQ(ended.exit_code, 0);
    const bool says = ended.errors.find("swap: measuring the path") != std::string::npos;
    EXPECT_EQ(says, is_first) << ended.errors;
  }
}

TEST(PathRatesProcess, ADaemonShowsWhatAPathGivesNowAsAShareOfWhatItGave) {
  const TempDir dir;
  const std::string swap = dir.Make("swap");
  struct stat folder {};
  ASSERT_EQ(::stat(swap.c_str(), &folder), 0);
  std::ofstream(swap + "/forebay.rates.toml")
      << "version = 1\ndevice = " << folder.st_dev
      << "\nread = 2e9\nwrite = 1e9\nmixed = 1e9\nrequest_bytes = 1048576\ndepth = 4\n"
         "read_seconds = 0.001\n";
  ASSERT_TRUE(LoadRates(swap).has_value());
  const std::string socket = dir.path() + "/s";
  ASSERT_OK_AND_ASSIGN(auto daemon, testing::DaemonProcess::Start(
                                        socket, {"swap.paths=" + swap, "swap.capacity=16MiB",
                                                 "update.block_elems=4096", "dram.limit=6474KiB"}));
  ASSERT_OK_AND_ASSIGN(
      auto session,
      client::Attachment::Attach(
          {.socket = socket, .job = "job", .layout = testing::MakeLayoutSpec({.world_size = 1})}));
  ASSERT_OK(testing::WriteInitial(*session, 1));
  ASSERT_OK_AND_ASSIGN(auto admin, client::AdminClient::Connect({.socket = socket}));
  {
    ASSERT_OK_AND_ASSIGN(const client::NodeStatus status, admin->Status());
    EXPECT_EQ(status->getSwap()[0].getReadShare(), 0) << "nothing was read yet";
    EXPECT_GT(status->getSwap()[0].getReadRateNow(), 0);
  }
  // Each of the first ten steps reads and writes a few blocks.
  for (uint64_t t = 1; t <= 10; ++t) {
    ASSERT_OK(testing::TrainStep(*session, {.rank = 0, .t = t}));
  }
  ASSERT_OK_AND_ASSIGN(const client::NodeStatus status, admin->Status());
  const auto path = status->getSwap()[0];
  EXPECT_GT(path.getReadShare(), 0);
  EXPECT_GT(path.getWriteShare(), 0);
  EXPECT_DOUBLE_EQ(path.getReadShare(), path.getReadRateNow() / 2e9);
  EXPECT_DOUBLE_EQ(path.getWriteShare(), path.getWriteRateNow() / 1e9);
  const std::string json = protocol::JsonOf(status->getSwap());
  EXPECT_THAT(json, ::testing::HasSubstr("\"read_share\": "));
  EXPECT_THAT(json, ::testing::HasSubstr("\"write_share\": "));
}

}  // namespace
}  // namespace forebay::daemon
