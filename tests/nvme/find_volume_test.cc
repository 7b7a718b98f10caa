// SPDX-License-Identifier: Apache-2.0
// Goal    Paths with a durable ledger are distinguished from paths without one, despite any damage. A possible ledger is never
//         reported as absent. Paths that are not the whole volume are named.
// Method  Volumes on real files, in which something is committed or nothing; labels and records are damaged in every
//         combination, files removed, swapped, cut and added.

#include "nvme/find_volume.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nvme/internal/disk_format.h"
#include "nvme/internal/page_buffer.h"
#include "nvme/io/engine_factory.h"
#include "nvme/volume.h"
#include "protocol/error.h"
#include "protocol/os/unique_fd.h"
#include "tests/nvme/temp_dir.h"
#include "tests/nvme/volume_world.h"
#include "tests/support/pattern.h"
#include "tests/support/status_test.h"

namespace forebay::nvme::find_volume_test {
namespace {

namespace fs = std::filesystem;
using protocol::ErrorId;
using testing::HasError;
using ::testing::HasSubstr;

constexpr uint64_t kPathBytes = 1 << 20;
constexpr uint64_t kLedgerBytes = 3 * 4096;
constexpr uint64_t kPage = 4096;

class FindVolumeTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(chosen_, CreateIoEngine());
    for (const char* name : {"a", "b", "c"}) dirs_.push_back(directory_.Make(name));
  }

  std::vector<PathOptions> Paths(const std::vector<size_t>& dirs) const {
    std::vector<PathOptions> paths;
    for (const size_t dir : dirs) {
      paths.push_back({.path = dirs_.at(dir), .capacity_bytes = kPathBytes});
    }
    return paths;
  }
  std::string FileOf(size_t dir) const { return dirs_.at(dir) + "/" + kSwapFileName; }

  // Makes a new volume on the paths `dirs` and commits `commits` times.
  void Make(const std::vector<size_t>& dirs, int commits) {
    ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Volume> volume,
                         Volume::Open({.paths = Paths(dirs),
                                       .mode = OpenMode::kReclaim,
                                       .life = FileLife::kKept,
                                       .ledger_bytes_max = kLedgerBytes},
                                      *chosen_.engine));
    for (int i = 0; i < commits; ++i) {
      ASSERT_OK(CommitNow(*volume, *chosen_.engine, testing::Pattern(100, 1), {}));
    }
  }

  void Overwrite(size_t dir, uint64_t offset_bytes, std::span<const std::byte> bytes) {
    const protocol::UniqueFd file(::open(FileOf(dir).c_str(), O_WRONLY | O_CLOEXEC));
    ASSERT_EQ(::pwrite(file.get(), bytes.data(), bytes.size(), static_cast<off_t>(offset_bytes)),
              static_cast<ssize_t>(bytes.size()));
  }

  void ExpectNone(const std::vector<size_t>& dirs) {
    ASSERT_OK_AND_ASSIGN(const auto found, FindVolume(Paths(dirs)));
    EXPECT_FALSE(found.has_value());
  }
  void ExpectFound(const std::vector<size_t>& dirs) {
    ASSERT_OK_AND_ASSIGN(const auto found, FindVolume(Paths(dirs)));
    ASSERT_TRUE(found.has_value());
    EXPECT_EQ(found->ledger_bytes_max, kLedgerBytes);
    ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Volume> volume,
                         Volume::Open({.paths = Paths(dirs),
                                       .mode = OpenMode::kRecover,
                                       .life = FileLife::kKept,
                                       .ledger_bytes_max = found->ledger_bytes_max},
                                      *chosen_.engine));
    EXPECT_EQ(volume->ledger().size(), 100U);
  }
  void ExpectRefused(const std::vector<PathOptions>& paths, const std::string& why) {
    const auto found = FindVolume(paths);
    EXPECT_THAT(found, HasError(ErrorId::kSwapPath));
    EXPECT_THAT(std::string(found.status().message()), HasSubstr(why));
  }

  const TempDir directory_;
  ChosenEngine chosen_;
  std::vector<std::string> dirs_;
};

TEST_F(FindVolumeTest, PathsWithoutAVolumeHaveNone) {
  ExpectNone({0, 1});
  ASSERT_OK_AND_ASSIGN(const auto missing, FindVolume(std::array{PathOptions{.path = "/no/such"}}));
  EXPECT_FALSE(missing.has_value());
  std::ofstream(FileOf(0)) << "short";
  ExpectNone({0});
  std::ofstream(FileOf(0)) << std::string(kPathBytes, '\0');
  ExpectNone({0, 1});
  std::ofstream(FileOf(0)) << std::string(kPathBytes, 'x');
  ExpectNone({0});
}

TEST_F(FindVolumeTest, AVolumeInWhichNothingWasCommittedCountsAsNone) {
  Make({0, 1}, /*commits=*/0);
  for (const std::vector<size_t>& dirs :
       std::vector<std::vector<size_t>>{{0, 1}, {0}, {1}, {1, 0}, {0, 2}, {0, 1, 2}}) {
    ExpectNone(dirs);
  }
  ASSERT_OK_AND_ASSIGN(const auto larger,
                       FindVolume(std::array{PathOptions{.path = dirs_[0], .capacity_bytes = 99}}));
  EXPECT_FALSE(larger.has_value());
}

TEST_F(FindVolumeTest, ACommittedLedgerIsFound) {
  for (const std::vector<size_t>& dirs : std::vector<std::vector<size_t>>{{0}, {1, 2}, {0, 1, 2}}) {
    Make(dirs, /*commits=*/1);
    ExpectFound(dirs);
    Make(dirs, /*commits=*/3);
    ExpectFound(dirs);
    Make(dirs, /*commits=*/0);
    ExpectNone(dirs);
  }
}

TEST_F(FindVolumeTest, TheSlotsAreThoseOfTheNewestLedger) {
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Volume> volume,
                       Volume::Open({.paths = Paths({0, 1}),
                                     .mode = OpenMode::kReclaim,
                                     .life = FileLife::kKept,
                                     .ledger_bytes_max = kLedgerBytes},
                                    *chosen_.engine));
  const std::array slots{Slot{.path = 1, .offset_bytes = 512 << 10, .size_bytes = kPage}};
  for (const size_t count : {0UL, 1UL, 0UL, 1UL}) {
    ASSERT_OK(CommitNow(*volume, *chosen_.engine, testing::Pattern(100, 1),
                        std::span(slots).first(count)));
    ASSERT_OK_AND_ASSIGN(const auto found, FindVolume(Paths({0, 1})));
    ASSERT_TRUE(found.has_value());
    EXPECT_EQ(found->slots, count);
  }
}

TEST_F(FindVolumeTest, ALedgerIsMissedInNoCombinationOfDamage) {
  constexpr std::array<uint64_t, 6> kPlaces = {
      0, kPage, 2 * kPage, kPathBytes - kPage, kPathBytes - 2 * kPage, kPathBytes - 3 * kPage};
  constexpr uint32_t kLabels = 1U << 0 | 1U << 3;
  constexpr uint32_t kAll = (1U << kPlaces.size()) - 1;
  Make({0}, /*commits=*/2);
  const std::string whole = FileOf(0) + ".whole";
  fs::rename(FileOf(0), whole);
  const auto damage = testing::Pattern(kPage, /*seed=*/7);
  for (uint32_t damaged = 0; damaged < kAll; ++damaged) {
    SCOPED_TRACE(damaged);
    fs::copy_file(whole, FileOf(0), fs::copy_options::overwrite_existing);
    for (size_t i = 0; i < kPlaces.size(); ++i) {
      if ((damaged >> i & 1) != 0) Overwrite(0, kPlaces[i], damage);
    }
    const bool is_lost = (damaged & kLabels) == kLabels || (damaged | kLabels) == kAll;
    if (is_lost) {
      EXPECT_THAT(FindVolume(Paths({0})), HasError(ErrorId::kCorrupt));
    } else {
      ASSERT_OK_AND_ASSIGN(const auto found, FindVolume(Paths({0})));
      EXPECT_TRUE(found.has_value());
    }
  }
}

TEST_F(FindVolumeTest, PathsThatAreNotTheWholeVolumeAreNamed) {
  Make({0, 1}, /*commits=*/1);
  ExpectRefused(Paths({0}),
                "path 0 of a volume of 2 paths with durable jobs, and given as path 0 of 1");
  ExpectRefused(Paths({1}), "path 1 of a volume of 2 paths");
  ExpectRefused(Paths({1, 0}),
                "path 1 of a volume of 2 paths with durable jobs, and given as path 0 of 2");
  ExpectRefused(Paths({0, 1, 2}),
                "path 0 of a volume of 2 paths with durable jobs, and given as path 0 of 3");
  ExpectRefused(Paths({0, 2}), "swap path 1 (" + FileOf(2) + "): it holds no part of the volume");
  std::vector<PathOptions> larger = Paths({0, 1});
  larger[1].capacity_bytes = 2 * kPathBytes;
  ExpectRefused(larger, "swap path 1 (" + FileOf(1) +
                            "): its volume with durable jobs was made with 1.0 MiB (1048576 "
                            "bytes), and is given with 2.0 MiB (2097152)");
  fs::remove(FileOf(0));
  ExpectRefused(Paths({0, 1}), "swap path 0 (" + FileOf(0) + "): it holds no part of the volume");
}

TEST_F(FindVolumeTest, ThePartInTheMiddleAloneIsRefused) {
  Make({0, 1, 2}, /*commits=*/0);
  ExpectRefused(Paths({1}), "it is path 1 of a volume of 3 paths");
}

TEST_F(FindVolumeTest, FilesOfTwoVolumesAreNotOne) {
  Make({0, 1}, /*commits=*/1);
  const std::string kept = dirs_[2] + "/kept";
  fs::rename(FileOf(1), kept);
  Make({0, 1}, /*commits=*/1);
  fs::rename(kept, FileOf(1));
  ExpectRefused(Paths({0, 1}), "swap path 1 (" + FileOf(1) + "): it is of another volume");
}

TEST_F(FindVolumeTest, WhatAClientWroteIsNoRecord) {
  Make({0, 1, 2}, /*commits=*/1);
  // Data at the head of the last path looks like a record.
  internal::PageBuffer page(kPage);
  internal::Record record{.volume = {}, .sequence = 9};
  internal::EncodePage(record, page.bytes());
  Overwrite(2, kPage, page.bytes());
  ExpectFound({0, 1, 2});
  Make({0, 1, 2}, /*commits=*/0);
  Overwrite(2, kPage, page.bytes());
  ExpectNone({0, 1, 2});
}

TEST_F(FindVolumeTest, ANewerFormatIsRefused) {
  Make({0}, /*commits=*/0);
  internal::PageBuffer page(kPage);
  internal::EncodePage(internal::Label{.version = internal::kFormatVersion + 1}, page.bytes());
  Overwrite(0, kPathBytes - kPage, page.bytes());
  ExpectRefused(Paths({0}), "it holds a volume of swap format 4; this version of Forebay reads");
}

}  // namespace
}  // namespace forebay::nvme::find_volume_test
