// Goal    A volume gives out extents, keeps the old content readable until the new one is
//         published, refuses what cannot be right, and counts every byte.
// Method  On a simulated disk, driven by completions; expected values are computed by hand. Faults
//         are in volume_fault_test.cc, real files in volume_files_test.cc.

#include "nvme/volume.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "protocol/error.h"
#include "tests/nvme/volume_world.h"
#include "tests/support/pattern.h"
#include "tests/support/simulated_disk.h"
#include "tests/support/status_test.h"

namespace forebay::nvme {
namespace {

using ::forebay::testing::Bytes;
using ::forebay::testing::HasCode;
using ::forebay::testing::HasError;
using ::forebay::testing::SimulatedDisk;
using protocol::ErrorId;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kPathBytes = 1 << 20;
constexpr uint32_t kExtentsMax = 16;  // tables of one page
// Of two paths: a label at each end; two records and two tables at the head and at the tail.
constexpr uint64_t kMetaBytes = (4 + 2 * (2 + 2)) * 4096;

class VolumeTest : public ::testing::Test {
 protected:
  VolumeTest() : disk_({.paths = 3, .capacity_bytes = kPathBytes}) {}

  VolumeOptions Options(uint32_t paths) const {
    VolumeOptions options;
    for (uint32_t path = 0; path < paths; ++path) {
      options.paths.push_back({.path = disk_.path_name(path), .capacity_bytes = kPathBytes});
    }
    options.extents_max = kExtentsMax;
    return options;
  }

  void Open(const VolumeOptions& options) {
    volume_.reset();
    ASSERT_OK_AND_ASSIGN(volume_, Volume::Open(options, disk_, disk_));
  }

  absl::Status Put(ExtentId extent, uint32_t step) {
    return WriteNow(*volume_, disk_, extent, ContentOf(0, step), IdentityOf(0, step));
  }

  // The step that the extent reads as.
  uint32_t Get(ExtentId extent) {
    const auto expected = volume_->expected(extent);
    Bytes bytes(kBlockBytes);
    EXPECT_TRUE(expected.has_value());
    EXPECT_OK(ReadNow(*volume_, disk_, extent, bytes));
    EXPECT_OK(Verify(*expected, bytes));
    EXPECT_EQ(bytes, ContentOf(0, StepOf(expected->identity)));
    return StepOf(expected->identity);
  }

  SimulatedDisk disk_;
  std::unique_ptr<Volume> volume_;
};

TEST_F(VolumeTest, StartsEmptyAndGivesOutDenseIds) {
  Open(Options(2));
  EXPECT_THAT(volume_->extents(), IsEmpty());
  EXPECT_EQ(volume_->durable_sequence(), 0u);
  EXPECT_EQ(volume_->free_bytes(), 2 * kPathBytes - kMetaBytes);
  ASSERT_OK_AND_ASSIGN(const auto first, volume_->AllocateExtents(3, 5000));
  EXPECT_THAT(first, ElementsAre(ExtentId{0}, ExtentId{1}, ExtentId{2}));
  EXPECT_EQ(volume_->size_bytes(ExtentId{0}), 8192u) << "rounded up to whole pages";
  ASSERT_OK(volume_->FreeExtents({{ExtentId{1}}}));
  EXPECT_EQ(volume_->size_bytes(ExtentId{1}), 0u);
  ASSERT_OK_AND_ASSIGN(const auto second, volume_->AllocateExtents(2, 4096));
  EXPECT_THAT(second, ElementsAre(ExtentId{1}, ExtentId{3}));
  EXPECT_THAT(volume_->extents(), ElementsAre(ExtentId{0}, ExtentId{1}, ExtentId{2}, ExtentId{3}));
}

TEST_F(VolumeTest, KeepsEveryPathBusyWithTheSlotsOfOneStep) {
  for (const uint32_t paths : {1u, 2u, 3u}) {
    Open(Options(paths));
    ASSERT_OK_AND_ASSIGN(const auto extents, volume_->AllocateExtents(6, kBlockBytes));
    for (uint32_t step = 1; step <= 3; ++step) {
      std::vector<uint64_t> before;
      for (const PathStats& path : volume_->stats().paths) before.push_back(path.written_bytes);
      for (const ExtentId extent : extents) ASSERT_OK(Put(extent, step));
      const VolumeStats stats = volume_->stats();
      for (uint32_t path = 0; path < paths; ++path) {
        EXPECT_EQ(stats.paths[path].written_bytes - before[path], 6 / paths * kBlockBytes);
      }
    }
  }
}

TEST_F(VolumeTest, PlacesExtentsByWeight) {
  VolumeOptions options = Options(2);
  options.paths[1].weight = 3;
  Open(options);
  ASSERT_OK(volume_->AllocateExtents(8, 8192));
  const VolumeStats stats = volume_->stats();
  EXPECT_EQ(stats.paths[0].allocated_bytes, 4 * 8192u);
  EXPECT_EQ(stats.paths[1].allocated_bytes, 12 * 8192u);
  EXPECT_EQ(stats.extents, 8u);
}

TEST_F(VolumeTest, RefusesWhatDoesNotFitAndTakesNothing) {
  Open(Options(2));
  const uint64_t free_bytes = volume_->free_bytes();
  const auto refused = volume_->AllocateExtents(4, 512 << 10);
  EXPECT_THAT(refused, HasError(ErrorId::kSwapNospc));
  EXPECT_THAT(refused.status().message(), HasSubstr("needed 4.0 MiB, free 2.0 MiB on 2 paths"));
  EXPECT_EQ(volume_->free_bytes(), free_bytes);
  EXPECT_THAT(volume_->AllocateExtents(kExtentsMax + 1, 4096), HasError(ErrorId::kLimit));
  EXPECT_EQ(volume_->free_bytes(), free_bytes);
  EXPECT_THAT(volume_->extents(), IsEmpty());
  EXPECT_FALSE(volume_->AllocateExtents(0, 4096).ok());
  EXPECT_FALSE(volume_->AllocateExtents(1, 0).ok());
  // All of it in one piece after many pieces came and went: free ranges merge.
  for (int round = 0; round < 20; ++round) {
    ASSERT_OK_AND_ASSIGN(auto extents, volume_->AllocateExtents(kExtentsMax, 4096 * 7));
    std::reverse(extents.begin() + round % 3, extents.end());
    ASSERT_OK(volume_->FreeExtents(extents));
  }
  EXPECT_EQ(volume_->free_bytes(), free_bytes);
  EXPECT_OK(volume_->AllocateExtents(1, (free_bytes / 2) / 4096 * 4096));
}

TEST_F(VolumeTest, KeepsTheOldContentUntilTheNewOneIsPublished) {
  Open(Options(2));
  ASSERT_OK(volume_->AllocateExtents(1, kBlockBytes));
  const ExtentId extent{0};
  ASSERT_OK(Put(extent, 1));
  const Bytes draft = ContentOf(0, 5);
  const Bytes final_content = ContentOf(0, 2);
  ASSERT_OK(volume_->Write(extent, draft, IdentityOf(0, 5), Checksum(IdentityOf(0, 5), draft), 9));
  ASSERT_OK(FinishOne(*volume_, disk_, 9));
  EXPECT_EQ(Get(extent), 1u);
  // Written again before it was published: the draft is gone, the old one is not.
  ASSERT_OK(volume_->Write(extent, final_content, IdentityOf(0, 2),
                           Checksum(IdentityOf(0, 2), final_content), 9));
  EXPECT_THAT(volume_->Write(extent, draft, Identity{}, 0, 10),
              HasCode(absl::StatusCode::kFailedPrecondition));
  EXPECT_EQ(Get(extent), 1u) << "read while the write is in flight";
  ASSERT_OK(volume_->Publish(extent));
  EXPECT_EQ(Get(extent), 2u);
  EXPECT_THAT(volume_->Publish(extent), HasCode(absl::StatusCode::kFailedPrecondition));
}

TEST_F(VolumeTest, RefusesRequestsThatCannotBeRight) {
  Open(Options(2));
  ASSERT_OK(volume_->AllocateExtents(2, kBlockBytes));
  Bytes bytes(2 * kBlockBytes);
  const std::span<std::byte> span(bytes);
  const auto invalid = HasCode(absl::StatusCode::kInvalidArgument);
  const auto refused = HasCode(absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(volume_->Read(ExtentId{7}, span, 1), refused);
  EXPECT_THAT(volume_->Read(ExtentId{0}, span, 1), refused) << "never written";
  EXPECT_FALSE(volume_->expected(ExtentId{0}).has_value());
  EXPECT_THAT(volume_->Write(ExtentId{7}, span, Identity{}, 0, 1), refused);
  EXPECT_THAT(volume_->Write(ExtentId{0}, span, Identity{}, 0, 1), invalid) << "too long";
  EXPECT_THAT(volume_->Write(ExtentId{0}, span.first(100), Identity{}, 0, 1), invalid);
  EXPECT_THAT(volume_->Write(ExtentId{0}, span.subspan(8, 4096), Identity{}, 0, 1), invalid);
  EXPECT_THAT(volume_->Write(ExtentId{0}, {}, Identity{}, 0, 1), invalid);
  ASSERT_OK(Put(ExtentId{0}, 1));
  EXPECT_THAT(volume_->Read(ExtentId{0}, span, 1), invalid) << "longer than what was written";
  EXPECT_THAT(volume_->Read(ExtentId{0}, span.subspan(1, 4096), 1), invalid);
  EXPECT_THAT(volume_->FreeExtents({{ExtentId{0}, ExtentId{5}}}), refused);
  EXPECT_EQ(volume_->extents().size(), 2u) << "none was freed";
  EXPECT_THAT(volume_->ZeroExtents({{ExtentId{0}}}, bytes, 1), refused) << "it has content";
  EXPECT_EQ(volume_->requests_in_flight(), 0u);
  // While a request is in flight.
  ASSERT_OK(volume_->Read(ExtentId{0}, span.first(kBlockBytes), 1));
  EXPECT_THAT(volume_->FreeExtents({{ExtentId{0}}}), refused);
  ASSERT_OK(FinishOne(*volume_, disk_, 1));
  EXPECT_OK(volume_->FreeExtents({{ExtentId{0}}}));
}

TEST_F(VolumeTest, RefusesAWriteIntoASlotThatIsBeingRead) {
  Open(Options(1));
  ASSERT_OK(volume_->AllocateExtents(1, kBlockBytes));
  ASSERT_OK(Put(ExtentId{0}, 1));
  Bytes bytes(kBlockBytes);
  ASSERT_OK(volume_->Read(ExtentId{0}, bytes, 50));
  // The engine has done both before it reports either; the volume sees the write first.
  const Bytes next = ContentOf(0, 2);
  ASSERT_OK(
      volume_->Write(ExtentId{0}, next, IdentityOf(0, 2), Checksum(IdentityOf(0, 2), next), 51));
  std::array<Completion, 2> both;
  ASSERT_OK_AND_ASSIGN(const size_t count, disk_.Wait(IoEngine::kForever, both));
  ASSERT_EQ(count, 2u);
  std::vector<Finished> finished;
  volume_->OnCompletion(both[1], finished);
  ASSERT_OK(volume_->Publish(ExtentId{0}));
  EXPECT_THAT(volume_->Write(ExtentId{0}, next, Identity{}, 0, 52),
              HasCode(absl::StatusCode::kFailedPrecondition));
  volume_->OnCompletion(both[0], finished);
  EXPECT_EQ(finished.size(), 2u);
  EXPECT_OK(Put(ExtentId{0}, 3));
}

TEST_F(VolumeTest, ZeroesBothSlotsOfEveryExtent) {
  Open(Options(2));
  // Everything but labels, records and tables.
  const auto data = [this](uint32_t path) {
    return path == 0 ? disk_.bytes(0).subspan(5 * 4096, kPathBytes - 6 * 4096)
                     : disk_.bytes(1).subspan(4096, kPathBytes - 6 * 4096);
  };
  for (uint32_t path = 0; path < 2; ++path) {
    std::fill(data(path).begin(), data(path).end(), std::byte{0xEE});
  }
  ASSERT_OK_AND_ASSIGN(const auto extents, volume_->AllocateExtents(5, kBlockBytes));
  ASSERT_OK(ZeroNow(*volume_, disk_, extents));
  size_t zeros = 0;
  for (uint32_t path = 0; path < 2; ++path) {
    zeros += static_cast<size_t>(std::count(data(path).begin(), data(path).end(), std::byte{0}));
  }
  EXPECT_EQ(zeros, 5 * 2 * kBlockBytes);
  EXPECT_EQ(volume_->requests_in_flight(), 0u);
}

TEST_F(VolumeTest, CountsEveryByteOfEveryPath) {
  Open(Options(2));
  ASSERT_OK(volume_->AllocateExtents(3, kBlockBytes));
  for (uint32_t block = 0; block < 3; ++block) ASSERT_OK(Put(ExtentId{block}, 1));
  ASSERT_OK(CommitNow(*volume_, disk_));
  EXPECT_EQ(Get(ExtentId{2}), 1u);
  const VolumeStats stats = volume_->stats();
  std::vector<PathStats> seen(2);
  for (const auto& operation : disk_.log()) {
    PathStats& path = seen.at(operation.path);
    switch (operation.kind) {
      case IoKind::kRead:
        ++path.reads;
        path.read_bytes += operation.size_bytes;
        break;
      case IoKind::kWrite:
        ++path.writes;
        path.written_bytes += operation.size_bytes;
        break;
      default:
        ++path.flushes;
    }
  }
  for (size_t path = 0; path < 2; ++path) {
    EXPECT_EQ(stats.paths[path].reads, seen[path].reads);
    EXPECT_EQ(stats.paths[path].read_bytes, seen[path].read_bytes);
    EXPECT_EQ(stats.paths[path].writes, seen[path].writes);
    EXPECT_EQ(stats.paths[path].written_bytes, seen[path].written_bytes);
    EXPECT_EQ(stats.paths[path].flushes, seen[path].flushes);
    EXPECT_EQ(stats.paths[path].retries + stats.paths[path].errors, 0u);
    EXPECT_EQ(stats.paths[path].capacity_bytes, kPathBytes);
  }
  EXPECT_EQ(stats.commits, 1u);
}

TEST_F(VolumeTest, NeverOverwritesADurableSlotBetweenCommits) {
  Open(Options(2));
  ASSERT_OK(volume_->AllocateExtents(1, kBlockBytes));
  ASSERT_OK(Put(ExtentId{0}, 1));
  ASSERT_OK(CommitNow(*volume_, disk_));
  // In the life that committed it, and in one that recovered it.
  for (uint32_t life = 1; life <= 2; ++life) {
    for (uint32_t step = 2; step < 6; ++step) {
      ASSERT_OK(Put(ExtentId{0}, step));
      EXPECT_EQ(Get(ExtentId{0}), step);
    }
    disk_.set_cut_fate(::forebay::testing::CutFate::kKeepAll, 0);
    disk_.CutPowerNow();
    volume_.reset();
    disk_.RestorePower();
    VolumeOptions options = Options(2);
    options.mode = OpenMode::kRecover;
    Open(options);
    EXPECT_EQ(Get(ExtentId{0}), 1u);
  }
}

TEST_F(VolumeTest, AWriteDuringACommitThatNeedsBothSlotsWaitsForItsEnd) {
  Open(Options(2));
  ASSERT_OK(volume_->AllocateExtents(2, kBlockBytes));
  ASSERT_OK(Put(ExtentId{0}, 1));
  ASSERT_OK(Put(ExtentId{1}, 1));
  ASSERT_OK(CommitNow(*volume_, disk_));
  ASSERT_OK(Put(ExtentId{0}, 2));
  ASSERT_OK(volume_->Commit(70));
  EXPECT_THAT(volume_->Commit(71), HasCode(absl::StatusCode::kFailedPrecondition));
  const Bytes next = ContentOf(0, 3);
  const uint64_t checksum = Checksum(IdentityOf(0, 3), next);
  ASSERT_OK(volume_->Write(ExtentId{0}, next, IdentityOf(0, 3), checksum, 72));  // waits
  ASSERT_OK(volume_->Write(ExtentId{1}, next, IdentityOf(0, 3), checksum, 73));  // need not
  EXPECT_THAT(volume_->FreeExtents({{ExtentId{0}}}),
              HasCode(absl::StatusCode::kFailedPrecondition));
  std::vector<uint64_t> order;
  std::array<Completion, 1> one;
  while (order.size() < 3) {
    ASSERT_OK_AND_ASSIGN(const size_t count, disk_.Wait(IoEngine::kForever, one));
    ASSERT_EQ(count, 1u);
    std::vector<Finished> finished;
    volume_->OnCompletion(one[0], finished);
    for (const Finished& ended : finished) {
      EXPECT_OK(ended.status);
      order.push_back(ended.token);
    }
  }
  EXPECT_THAT(order, ElementsAre(73, 70, 72));
  ASSERT_OK(volume_->Publish(ExtentId{0}));
  EXPECT_EQ(Get(ExtentId{0}), 3u);
}

TEST_F(VolumeTest, FreedSpaceThatIsDurableComesBackWithTheNextCommit) {
  Open(Options(2));
  const uint64_t free_bytes = volume_->free_bytes();
  ASSERT_OK(volume_->AllocateExtents(2, kBlockBytes));
  ASSERT_OK(Put(ExtentId{0}, 1));
  ASSERT_OK(CommitNow(*volume_, disk_));
  ASSERT_OK(volume_->FreeExtents({{ExtentId{0}, ExtentId{1}}}));
  EXPECT_EQ(volume_->free_bytes(), free_bytes - 2 * kBlockBytes);
  ASSERT_OK_AND_ASSIGN(const auto other, volume_->AllocateExtents(1, 4096));
  EXPECT_THAT(other, ElementsAre(ExtentId{1})) << "0 is still named by the record";
  ASSERT_OK(CommitNow(*volume_, disk_));
  EXPECT_EQ(volume_->free_bytes(), free_bytes - 2 * 4096);
}

TEST_F(VolumeTest, RecoversExtentsSpaceAndSequence) {
  Open(Options(3));
  ASSERT_OK(volume_->AllocateExtents(4, kBlockBytes));
  for (uint32_t block : {0u, 1u, 3u}) ASSERT_OK(Put(ExtentId{block}, 1));
  ASSERT_OK(volume_->FreeExtents({{ExtentId{1}}}));
  for (int i = 0; i < 3; ++i) ASSERT_OK(CommitNow(*volume_, disk_));
  const uint64_t free_bytes = volume_->free_bytes();
  VolumeOptions options = Options(3);
  options.mode = OpenMode::kRecover;
  Open(options);
  EXPECT_THAT(volume_->extents(), ElementsAre(ExtentId{0}, ExtentId{2}, ExtentId{3}));
  EXPECT_EQ(volume_->free_bytes(), free_bytes);
  EXPECT_EQ(volume_->durable_sequence(), 3u);
  EXPECT_EQ(volume_->recovery().sequence, 3u);
  EXPECT_EQ(volume_->recovery().damaged_records, 0u);
  EXPECT_EQ(volume_->recovery().damaged_tables, 0u);
  EXPECT_EQ(Get(ExtentId{0}), 1u);
  EXPECT_FALSE(volume_->expected(ExtentId{2}).has_value()) << "never written";
  EXPECT_OK(Put(ExtentId{2}, 4));
}

TEST_F(VolumeTest, RefusesToRecoverWhatIsNotThisVolume) {
  VolumeOptions recover = Options(2);
  recover.mode = OpenMode::kRecover;
  EXPECT_THAT(Volume::Open(recover, disk_, disk_), HasError(ErrorId::kSwapPath)) << "blank";
  Open(Options(2));
  volume_.reset();
  VolumeOptions swapped = recover;
  std::swap(swapped.paths[0], swapped.paths[1]);
  EXPECT_THAT(Volume::Open(swapped, disk_, disk_), HasError(ErrorId::kSwapPath));
  VolumeOptions other_tables = recover;
  other_tables.extents_max = 1000;
  EXPECT_THAT(Volume::Open(other_tables, disk_, disk_), HasError(ErrorId::kSwapPath));
  VolumeOptions shorter = recover;
  shorter.paths[1].capacity_bytes -= 4096;
  EXPECT_THAT(Volume::Open(shorter, disk_, disk_), HasError(ErrorId::kSwapPath));
  EXPECT_OK(Volume::Open(recover, disk_, disk_));
}

TEST_F(VolumeTest, NeedsBothRecordsAndTablesGoneToLoseADurableState) {
  Open(Options(2));
  ASSERT_OK(volume_->AllocateExtents(1, kBlockBytes));
  for (uint32_t step = 1; step <= 2; ++step) {
    ASSERT_OK(Put(ExtentId{0}, step));
    ASSERT_OK(CommitNow(*volume_, disk_));
  }
  VolumeOptions options = Options(2);
  options.mode = OpenMode::kRecover;
  // Head: label, records, tables on path 0; then the tail on path 1 too.
  const Bytes junk = ::forebay::testing::Pattern(5 * 4096, /*seed=*/77);
  volume_.reset();
  disk_.Overwrite(0, 0, junk);
  Open(options);
  EXPECT_EQ(Get(ExtentId{0}), 2u);
  EXPECT_EQ(volume_->recovery().damaged_records, 2u);
  volume_.reset();
  disk_.Overwrite(1, kPathBytes - 5 * 4096, std::span(junk).first(4 * 4096));
  EXPECT_THAT(Volume::Open(options, disk_, disk_), HasError(ErrorId::kCorrupt));
}

TEST_F(VolumeTest, RefusesOptionsOutsideTheirRules) {
  EXPECT_THAT(Volume::Open(VolumeOptions{}, disk_, disk_), HasError(ErrorId::kConfig));
  VolumeOptions options = Options(2);
  options.extents_max = 0;
  EXPECT_THAT(Volume::Open(options, disk_, disk_), HasError(ErrorId::kConfig));
  options = Options(2);
  options.paths[1].capacity_bytes = 0;
  EXPECT_THAT(Volume::Open(options, disk_, disk_), HasError(ErrorId::kConfig));
  options = Options(2);
  options.paths[1].capacity_bytes = 4096;
  const auto small = Volume::Open(options, disk_, disk_);
  EXPECT_THAT(small, HasError(ErrorId::kSwapNospc));
  EXPECT_THAT(small.status().message(), HasSubstr("swap path 1"));
  EXPECT_TRUE(disk_.log().empty()) << "nothing was touched";
}

TEST_F(VolumeTest, TooManyRequestsAreRefusedUntilSomeHaveFinished) {
  Open(Options(1));
  ASSERT_OK(volume_->AllocateExtents(1, kBlockBytes));
  ASSERT_OK(Put(ExtentId{0}, 1));
  Bytes bytes(kBlockBytes);
  for (uint32_t i = 0; i < Volume::kRequestsMax; ++i) {
    ASSERT_OK(volume_->Read(ExtentId{0}, bytes, 5));
  }
  EXPECT_THAT(volume_->Read(ExtentId{0}, bytes, 5), HasCode(absl::StatusCode::kResourceExhausted));
  EXPECT_EQ(volume_->requests_in_flight(), Volume::kRequestsMax);
  ASSERT_OK(CommitNow(*volume_, disk_)) << "commits have room of their own";
  EXPECT_EQ(volume_->requests_in_flight(), 0u);
  EXPECT_EQ(Get(ExtentId{0}), 1u);
}

TEST_F(VolumeTest, IgnoresCompletionsThatAreNotItsOwn) {
  Open(Options(1));
  ASSERT_OK(volume_->AllocateExtents(1, kBlockBytes));
  ASSERT_OK(Put(ExtentId{0}, 1));
  std::vector<Finished> finished;
  for (const uint64_t token :
       {uint64_t{0}, ~uint64_t{0}, Volume::kTokenTag, Volume::kTokenTag | (uint64_t{3} << 32)}) {
    volume_->OnCompletion({.token = token, .result = 4096, .kind = IoKind::kRead}, finished);
  }
  EXPECT_THAT(finished, IsEmpty());
  EXPECT_FALSE(Volume::Owns(0));
  EXPECT_TRUE(Volume::Owns(Volume::kTokenTag | 5));
}

TEST(Verify, NamesPathExtentAndIdentity) {
  const Bytes bytes = ContentOf(1, 2);
  ExpectedContent expected;
  expected.extent = ExtentId{41};
  expected.path_index = 1;
  expected.path = "/mnt/b/forebay.swap";
  expected.identity.fill(std::byte{0xAB});
  expected.checksum = Checksum(expected.identity, bytes);
  expected.size_bytes = bytes.size();
  EXPECT_OK(Verify(expected, bytes));
  expected.identity[0] = std::byte{0xAC};
  const absl::Status status = Verify(expected, bytes);
  EXPECT_THAT(status, HasError(ErrorId::kCorrupt));
  EXPECT_THAT(status.message(), HasSubstr("swap path 1 (/mnt/b/forebay.swap): extent 41 "));
  EXPECT_THAT(status.message(), HasSubstr("acabababab"));
}

}  // namespace
}  // namespace forebay::nvme
