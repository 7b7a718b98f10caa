// SPDX-License-Identifier: Apache-2.0
// Goal    A volume is in the same place if only the name of a device has changed. Every other difference is named. Unknown
//         values differ from nothing.
// Method  Generated places, and files, links and a device of this machine.

#include "daemon/exec/volume_place.h"

#include <sys/stat.h>

#include <array>
#include <cstddef>
#include <filesystem>
#include <string>

#include "absl/strings/escaping.h"
#include "daemon/exec/machine_id.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "tests/support/block_devices.h"
#include "tests/support/daemon_process.h"
#include "tests/support/status_test.h"

namespace forebay::daemon {
namespace {

using protocol::ErrorId;
using testing::HasError;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr MachineId kMachine{std::byte{1}};
constexpr MachineId kOtherMachine{std::byte{2}};

VolumePlace MakePlace() {
  return {.machine = kMachine,
          .paths = {{.name = "/a/forebay.swap", .inode = 7},
                    {.name = "/dev/sda1", .disk = "naa.50 partition 1"},
                    {.name = "/dev/loop3"}}};
}

TEST(VolumePlace, IsTheSameWhereADiskHasAnotherName) {
  EXPECT_THAT(DescribeMove(MakePlace(), MakePlace()), IsEmpty());
  VolumePlace now = MakePlace();
  now.paths[1].name = "/dev/sdb1";
  EXPECT_THAT(DescribeMove(MakePlace(), now), IsEmpty());
  now.machine = {};
  EXPECT_THAT(DescribeMove(MakePlace(), now), IsEmpty());
  EXPECT_THAT(DescribeMove(now, MakePlace()), IsEmpty());
  EXPECT_THAT(DescribeMove({.machine = kOtherMachine, .paths = {}}, now), IsEmpty());
}

// A disk without an identity is recognized by its name only.
TEST(VolumePlace, IsTheSameWhereADiskThatSaysNothingHasTheSameName) {
  VolumePlace now = MakePlace();
  now.paths[1].disk.clear();
  EXPECT_THAT(DescribeMove(MakePlace(), now), IsEmpty());
  now.paths[1].name = "/dev/sdb1";
  EXPECT_THAT(DescribeMove(MakePlace(), now), HasSubstr("was last used as /dev/sda1"));
}

TEST(VolumePlace, AllThatDiffersIsNamed) {
  VolumePlace now = MakePlace();
  now.machine = kOtherMachine;
  now.paths[0].name = "/b/forebay.swap";
  now.paths[1].disk = "naa.51 partition 1";
  now.paths[2].name = "/dev/loop4";
  EXPECT_EQ(DescribeMove(MakePlace(), now),
            "the volume was last used on another machine; swap path 0 (/b/forebay.swap) was last "
            "used as /a/forebay.swap; swap path 1 (/dev/sda1) is the disk naa.51 partition 1; last "
            "used was naa.50 partition 1; swap path 2 (/dev/loop4) was last used as /dev/loop3");
  now = MakePlace();
  now.paths[0].inode = 8;
  EXPECT_EQ(DescribeMove(MakePlace(), now),
            "swap path 0 (/a/forebay.swap) is another file than was last used there, as a copy is");
  now.paths.pop_back();
  EXPECT_THAT(DescribeMove(MakePlace(), now), HasSubstr("last used on 3 paths"));
}

TEST(VolumePlace, IsThatOfTheFileItself) {
  const testing::TempDir dir;
  const std::string folder = dir.Make("a");
  const std::string file = dir.Write("a/forebay.swap", "swap");
  std::filesystem::create_directory_symlink(folder, dir.path() + "/link");
  struct stat status {};
  ASSERT_EQ(::stat(file.c_str(), &status), 0);
  for (const std::string& path : {folder, dir.path() + "/link", folder + "/../link/."}) {
    ASSERT_OK_AND_ASSIGN(const VolumePlace place,
                         PlaceOf(std::array{nvme::PathOptions{.path = path}}, kMachine));
    EXPECT_EQ(place, (VolumePlace{.machine = kMachine,
                                  .paths = {{.name = std::filesystem::canonical(file),
                                             .inode = status.st_ino}}}));
  }
  const auto missing = PlaceOf(std::array{nvme::PathOptions{.path = dir.path() + "/b"}}, kMachine);
  EXPECT_THAT(missing, HasError(ErrorId::kSwapPath));
}

TEST(VolumePlace, OfADeviceHasNoInode) {
  const std::string device = testing::AnyBlockDevice();
  if (device.empty()) GTEST_SKIP() << "there is no block device in /dev";
  ASSERT_OK_AND_ASSIGN(const VolumePlace place,
                       PlaceOf(std::array{nvme::PathOptions{.path = device}}, kMachine));
  EXPECT_EQ(place.paths[0].inode, 0U);
  EXPECT_EQ(place.paths[0].name, std::filesystem::canonical(device));
}

TEST(VolumePlace, TheMachineIsTheSameFromOneReadingToTheNext) {
  EXPECT_EQ(ThisMachine(), ThisMachine());
}

// The expected bytes are printed by `systemd-id128 machine-id --app-specific=6f0b52c19d3e4b77a2185ce49370fd2b` on a machine
// with this id.
TEST(VolumePlace, AMachineIsKnownByAHashOfItsMachineId) {
  const MachineId machine = MachineOf("0123456789abcdef0123456789abcdef");
  const std::string bytes(reinterpret_cast<const char*>(machine.data()), machine.size());
  EXPECT_EQ(absl::BytesToHexString(bytes), "65784cf6606d4401ac2dff28c2d10f99");
}

TEST(VolumePlace, WhatIsNoMachineIdIsNotKnown) {
  for (const std::string text :
       {"", "uninitialized", "0123456789abcdef0123456789abcde", "00000000000000000000000000000000",
        "0123456789abcdef0123456789abcdeg"}) {
    EXPECT_EQ(MachineOf(text), MachineId{}) << text;
  }
}

}  // namespace
}  // namespace forebay::daemon
