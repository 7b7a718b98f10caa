// SPDX-License-Identifier: Apache-2.0
// Goal    A volume stores bytes in slots on all its paths, never touches a slot that a durable ledger
//         names, refuses what cannot be right, recovers its ledger, and counts every byte.
// Method  On a simulated disk, driven by completions; expected values are computed by hand. Faults
//         are in volume_fault_test.cc, real files in volume_files_test.cc.

#include "nvme/volume.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nvme/internal/disk_format.h"
#include "nvme/internal/page_buffer.h"
#include "protocol/error.h"
#include "tests/nvme/volume_world.h"
#include "tests/support/pattern.h"
#include "tests/support/simulated_disk.h"
#include "tests/support/status_test.h"

namespace forebay::nvme::volume_test {
namespace {

using ::forebay::testing::Bytes;
using ::forebay::testing::HasCode;
using ::forebay::testing::HasError;
using ::forebay::testing::SimulatedDisk;
using protocol::ErrorId;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kPathBytes = 1 << 20;
constexpr uint64_t kLedgerBytes = 4096;
// Metadata bytes on two paths: a label at each end of a path; two records and two ledgers at the head and at the tail.
constexpr uint64_t kMetaBytes = (4 + 2 * (2 + 2)) * 4096;

class VolumeTest : public ::testing::Test {
 protected:
  VolumeTest() : disk_({.paths = 3, .capacity_bytes = kPathBytes}) {}

  VolumeOptions Options(uint32_t paths) const {
    VolumeOptions options;
    for (uint32_t path = 0; path < paths; ++path) {
      options.paths.push_back({.path = disk_.path_name(path), .capacity_bytes = kPathBytes});
    }
    options.ledger_bytes_max = kLedgerBytes;
    return options;
  }

  void Open(const VolumeOptions& options) {
    store_.reset();
    volume_.reset();
    ASSERT_OK_AND_ASSIGN(volume_, Volume::Open(options, disk_, disk_));
  }

  void Recover(uint32_t paths) {
    VolumeOptions options = Options(paths);
    options.mode = OpenMode::kRecover;
    Open(options);
  }

  void MakeStore(uint32_t blocks) {
    store_ = std::make_unique<BlockStore>(*volume_, disk_, blocks);
  }

  std::vector<Slot> SomeSlots(uint64_t count, uint64_t bytes = kBlockBytes) {
    SlotMap map = volume_->free_slots();
    return map.Allocate(count, bytes).value();
  }

  SimulatedDisk disk_;
  std::unique_ptr<Volume> volume_;
  std::unique_ptr<BlockStore> store_;
};

TEST_F(VolumeTest, StartsEmpty) {
  Open(Options(2));
  EXPECT_EQ(volume_->durable_sequence(), 0u);
  EXPECT_THAT(volume_->ledger(), IsEmpty());
  EXPECT_THAT(volume_->ledger_slots(), IsEmpty());
  EXPECT_EQ(volume_->free_slots().free_bytes(), 2 * kPathBytes - kMetaBytes);
  EXPECT_EQ(volume_->free_slots().paths(), 2u);
}

TEST_F(VolumeTest, RefusesRequestsThatCannotBeRight) {
  Open(Options(2));
  const Slot slot = SomeSlots(1)[0];
  Bytes bytes(2 * kBlockBytes);
  const std::span<std::byte> span(bytes);
  const auto invalid = HasCode(absl::StatusCode::kInvalidArgument);
  Slot outside = slot;
  outside.path = 7;
  EXPECT_THAT(volume_->Read(outside, span.first(4096), 1), invalid);
  outside = slot;
  outside.offset_bytes = 0;
  EXPECT_THAT(volume_->Write(outside, span.first(4096), 1), invalid) << "over the label";
  outside.offset_bytes = kPathBytes - 4096;
  EXPECT_THAT(volume_->Write(outside, span.first(4096), 1), invalid) << "behind the data";
  outside.offset_bytes = slot.offset_bytes + 8;
  EXPECT_THAT(volume_->Write(outside, span.first(4096), 1), invalid);
  outside = slot;
  outside.size_bytes = ~uint64_t{0} - 4095;
  EXPECT_THAT(volume_->Write(outside, span.first(4096), 1), invalid) << "wraps around";
  EXPECT_THAT(volume_->Write(slot, span, 1), invalid) << "too long";
  EXPECT_THAT(volume_->Write(slot, span.first(100), 1), invalid);
  EXPECT_THAT(volume_->Write(slot, span.subspan(8, 4096), 1), invalid);
  EXPECT_THAT(volume_->Write(slot, {}, 1), invalid);
  EXPECT_THAT(volume_->Read(slot, span.subspan(1, 4096), 1), invalid);
  EXPECT_THAT(volume_->Zero({}, span, 1), invalid);
  EXPECT_THAT(volume_->Zero({{slot}}, span.first(100), 1), invalid);
  EXPECT_THAT(volume_->Zero({{outside}}, span, 1), invalid);
  EXPECT_EQ(volume_->requests_in_flight(), 0u);
}

TEST_F(VolumeTest, ASlotIsReadOrWrittenButNotBoth) {
  Open(Options(1));
  const Slot slot = SomeSlots(1)[0];
  const auto refused = HasCode(absl::StatusCode::kFailedPrecondition);
  const Bytes content = ContentOf(0, 1);
  ASSERT_OK(WriteNow(*volume_, disk_, slot, content));
  Bytes bytes(kBlockBytes);
  Bytes other(kBlockBytes);
  ASSERT_OK(volume_->Read(slot, bytes, 50));
  ASSERT_OK(volume_->Read(slot, other, 51)) << "two readers";
  EXPECT_THAT(volume_->Write(slot, content, 52), refused);
  EXPECT_THAT(volume_->Zero({{slot}}, Bytes(4096), 52), refused);
  ASSERT_OK(FinishOne(*volume_, disk_, 51));
  EXPECT_EQ(bytes, content);
  EXPECT_EQ(other, content);
  ASSERT_OK(volume_->Write(slot, content, 53));
  EXPECT_THAT(volume_->Write(slot, content, 54), refused);
  EXPECT_THAT(volume_->Read(slot, bytes, 54), refused);
  ASSERT_OK(FinishOne(*volume_, disk_, 53));
  EXPECT_EQ(volume_->requests_in_flight(), 0u);
}

TEST_F(VolumeTest, ReadsPagesOfASlotWhichCannotBeWrittenMeanwhile) {
  Open(Options(1));
  const std::vector<Slot> slots = SomeSlots(2);  // the second slot follows the first
  const Bytes content = ContentOf(0, 1);
  ASSERT_OK(WriteNow(*volume_, disk_, slots[0], content));
  ASSERT_OK(WriteNow(*volume_, disk_, slots[1], ContentOf(1, 1)));
  Bytes bytes(kBlockBytes);
  const std::span<std::byte> span(bytes);
  ASSERT_OK(volume_->Read(slots[0], 4096, span.first(8192), 50));
  ASSERT_OK(volume_->Read(slots[0], 8192, span.last(4096), 51));
  EXPECT_THAT(volume_->Write(slots[0], content, 52),
              HasCode(absl::StatusCode::kFailedPrecondition));
  ASSERT_OK(FinishOne(*volume_, disk_, 51));
  EXPECT_TRUE(std::equal(bytes.begin(), bytes.begin() + 8192, content.begin() + 4096));
  EXPECT_TRUE(std::equal(bytes.begin() + 8192, bytes.end(), content.begin() + 8192));
  ASSERT_OK(WriteNow(*volume_, disk_, slots[0], content));
  const auto invalid = HasCode(absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(volume_->Read(slots[0], 4096, span, 53), invalid) << "behind the slot";
  EXPECT_THAT(volume_->Read(slots[0], kBlockBytes, span.first(4096), 53), invalid);
  EXPECT_THAT(volume_->Read(slots[0], ~uint64_t{0} - 4095, span.first(8192), 53), invalid);
  EXPECT_THAT(volume_->Read(slots[0], 512, span.first(4096), 53), invalid) << "no whole page";
  EXPECT_EQ(volume_->requests_in_flight(), 0u);
}

TEST_F(VolumeTest, ZeroesEverySlotWithDeepQueuesOnAllPaths) {
  Open(Options(2));
  const auto data = [this](uint32_t path) {
    return path == 0 ? disk_.bytes(0).subspan(5 * 4096, kPathBytes - 6 * 4096)
                     : disk_.bytes(1).subspan(4096, kPathBytes - 6 * 4096);
  };
  for (uint32_t path = 0; path < 2; ++path) {
    std::fill(data(path).begin(), data(path).end(), std::byte{0xEE});
  }
  constexpr uint64_t kSlots = 30;
  const std::vector<Slot> slots = SomeSlots(kSlots);
  const Bytes zeros(4096);  // three pieces per slot
  ASSERT_OK(volume_->Zero(slots, zeros, /*token=*/4));
  EXPECT_EQ(volume_->requests_in_flight(), 1u);
  EXPECT_THAT(volume_->Write(slots[0], Bytes(4096), 5),
              HasCode(absl::StatusCode::kFailedPrecondition));
  // Volume::kZerosInFlight pieces are in flight on each path.
  std::array<Completion, 2 * Volume::kZerosInFlight + 1> completions;
  ASSERT_OK_AND_ASSIGN(const size_t count, disk_.Wait(std::chrono::seconds(1), completions));
  EXPECT_EQ(count, 2 * Volume::kZerosInFlight);
  std::vector<Finished> finished;
  for (size_t i = 0; i < count; ++i) volume_->OnCompletion(completions[i], finished);
  EXPECT_THAT(finished, IsEmpty());
  EXPECT_EQ(volume_->zeroed_bytes(4), count * 4096);
  ASSERT_OK(FinishOne(*volume_, disk_, 4));
  EXPECT_EQ(volume_->zeroed_bytes(4), 0u);
  size_t zeroed = 0;
  for (uint32_t path = 0; path < 2; ++path) {
    zeroed += static_cast<size_t>(std::count(data(path).begin(), data(path).end(), std::byte{0}));
  }
  EXPECT_EQ(zeroed, kSlots * kBlockBytes);
  EXPECT_EQ(volume_->requests_in_flight(), 0u);
  // Two concurrent calls of Zero() share the queues. Each call ends exactly once.
  ASSERT_OK(volume_->Zero(std::span(slots).first(15), zeros, /*token=*/6));
  const Bytes more_zeros(8192);
  ASSERT_OK(volume_->Zero(std::span(slots).subspan(15), more_zeros, /*token=*/7));
  EXPECT_EQ(volume_->requests_in_flight(), 2u);
  ASSERT_OK(FinishOne(*volume_, disk_, 7));
  EXPECT_EQ(volume_->requests_in_flight(), 0u);
}

TEST_F(VolumeTest, CountsEveryByteOfEveryPath) {
  Open(Options(2));
  MakeStore(3);
  ASSERT_OK(store_->CommitStep(1));
  EXPECT_EQ(store_->Read(2).step, 1u);
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
  MakeStore(1);
  ASSERT_OK(store_->CommitStep(1));
  // life 1: the volume that committed the step; life 2: the volume that recovered it.
  for (uint32_t life = 1; life <= 2; ++life) {
    for (uint32_t step = 2; step < 6; ++step) {
      ASSERT_OK(store_->WriteStep(step));
      EXPECT_EQ(store_->Read(0).step, step);
    }
    disk_.set_cut_fate(::forebay::testing::CutFate::kKeepAll, 0);
    disk_.CutPowerNow();
    store_.reset();
    volume_.reset();
    disk_.RestorePower();
    Recover(2);
    MakeStore(1);
    const BlockState block = store_->Read(0);
    EXPECT_OK(block.status);
    EXPECT_EQ(block.step, 1u);
  }
}

TEST_F(VolumeTest, SlotsOfTheLastTwoCommitsArePinned) {
  Open(Options(2));
  const std::vector<Slot> slots = SomeSlots(4);
  const auto refused = HasCode(absl::StatusCode::kFailedPrecondition);
  const Bytes content = ContentOf(0, 1);
  for (const Slot& slot : slots) ASSERT_OK(WriteNow(*volume_, disk_, slot, content));
  ASSERT_OK(CommitNow(*volume_, disk_, {}, {{slots[0]}}));
  EXPECT_TRUE(volume_->is_pinned(slots[0]));
  EXPECT_THAT(volume_->Write(slots[0], content, 9), refused);
  EXPECT_THAT(volume_->Zero({{slots[0]}}, Bytes(4096), 9), refused);
  ASSERT_OK(CommitNow(*volume_, disk_, {}, {{slots[1]}}));
  EXPECT_THAT(volume_->Write(slots[0], content, 9), refused) << "the ledger before the newest";
  // A slot that the pending commit names is pinned from the commit's start; other slots are not.
  ASSERT_OK(volume_->CommitLedger({}, {{slots[2]}}, 70));
  EXPECT_THAT(volume_->CommitLedger({}, {{slots[3]}}, 71), refused) << "one at a time";
  EXPECT_THAT(volume_->Write(slots[2], content, 9), refused);
  ASSERT_OK(volume_->Write(slots[3], content, 9));
  ASSERT_OK(FinishOne(*volume_, disk_, 70));
  EXPECT_FALSE(volume_->is_pinned(slots[0]));
  EXPECT_OK(WriteNow(*volume_, disk_, slots[0], content));
  EXPECT_THAT(volume_->Write(slots[1], content, 9), refused);
}

TEST_F(VolumeTest, RefusesToCommitWhatIsNotWhole) {
  Open(Options(2));
  const std::vector<Slot> slots = SomeSlots(2);
  const Bytes content = ContentOf(0, 1);
  ASSERT_OK(volume_->Write(slots[0], content, 1));
  EXPECT_THAT(volume_->CommitLedger({}, {{slots[0]}}, 2),
              HasCode(absl::StatusCode::kFailedPrecondition));
  EXPECT_OK(FinishOne(*volume_, disk_, 1));
  EXPECT_THAT(volume_->CommitLedger({}, {{slots[0], slots[0]}}, 2),
              HasCode(absl::StatusCode::kInvalidArgument));
  const Bytes ledger(kLedgerBytes - 23);
  EXPECT_THAT(volume_->CommitLedger(ledger, {{slots[0]}}, 2), HasError(ErrorId::kLimit));
  EXPECT_OK(CommitNow(*volume_, disk_, std::span(ledger).first(kLedgerBytes - 24), {{slots[0]}}));
}

TEST_F(VolumeTest, RecoversLedgerSlotsAndSequence) {
  Open(Options(3));
  MakeStore(4);
  for (uint32_t step = 1; step <= 3; ++step) ASSERT_OK(store_->CommitStep(step));
  const std::vector<Slot> named(volume_->ledger_slots().begin(), volume_->ledger_slots().end());
  const uint64_t free_bytes = volume_->free_slots().free_bytes();
  Recover(3);
  EXPECT_THAT(std::vector<Slot>(volume_->ledger_slots().begin(), volume_->ledger_slots().end()),
              ::testing::ElementsAreArray(named));
  EXPECT_EQ(volume_->free_slots().free_bytes(), free_bytes - 4 * kBlockBytes);
  EXPECT_EQ(volume_->durable_sequence(), 3u);
  EXPECT_EQ(volume_->recovery().sequence, 3u);
  EXPECT_EQ(volume_->recovery().damaged_records, 0u);
  EXPECT_EQ(volume_->recovery().damaged_ledgers, 0u);
  EXPECT_FALSE(volume_->recovery().fell_back);
  MakeStore(4);
  for (uint32_t block = 0; block < 4; ++block) EXPECT_TRUE(store_->Read(block).bytes_right);
  EXPECT_OK(store_->CommitStep(4));
  EXPECT_EQ(volume_->durable_sequence(), 4u);
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
  VolumeOptions other_ledgers = recover;
  other_ledgers.ledger_bytes_max = 100000;
  EXPECT_THAT(Volume::Open(other_ledgers, disk_, disk_), HasError(ErrorId::kSwapPath));
  VolumeOptions shorter = recover;
  shorter.paths[1].capacity_bytes -= 4096;
  EXPECT_THAT(Volume::Open(shorter, disk_, disk_), HasError(ErrorId::kSwapPath));
  EXPECT_OK(Volume::Open(recover, disk_, disk_));
}

// A label of another format at the head of the first path.
void PutLabel(SimulatedDisk& disk, uint32_t version) {
  internal::Label label;
  label.version = version;
  internal::PageBuffer page(4096);
  EncodePage(label, page.bytes());
  disk.Overwrite(0, 0, page.bytes());
}

TEST_F(VolumeTest, AnotherFormatIsMadeAnewWhereItIsOlderAndRefusedWithBothNumbersWhereNewer) {
  VolumeOptions recover = Options(2);
  recover.mode = OpenMode::kRecover;
  for (const uint32_t version : {1u, 2u}) {
    PutLabel(disk_, version);
    const auto refused = Volume::Open(recover, disk_, disk_);
    EXPECT_THAT(refused, HasError(ErrorId::kSwapPath));
    EXPECT_THAT(refused.status().message(), HasSubstr("swap format " + std::to_string(version)));
    EXPECT_OK(Volume::Open(Options(2), disk_, disk_)) << "nothing durable is in it";
  }
  PutLabel(disk_, 4);
  const Bytes before(disk_.bytes(0).begin(), disk_.bytes(0).end());
  for (const OpenMode mode : {OpenMode::kReclaim, OpenMode::kRecover}) {
    recover.mode = mode;
    const auto refused = Volume::Open(recover, disk_, disk_);
    EXPECT_THAT(refused, HasError(ErrorId::kSwapPath));
    EXPECT_THAT(refused.status().message(),
                ::testing::AllOf(HasSubstr("swap format 4"), HasSubstr("reads format 3")));
  }
  EXPECT_TRUE(std::equal(before.begin(), before.end(), disk_.bytes(0).begin())) << "left as it was";
}

TEST_F(VolumeTest, BothEndsMustBeDamagedToLoseADurableLedger) {
  Open(Options(2));
  MakeStore(1);
  for (uint32_t step = 1; step <= 2; ++step) ASSERT_OK(store_->CommitStep(step));
  // Damages the head of path 0 (label, records, ledgers), then also the tail of path 1.
  const Bytes junk = ::forebay::testing::Pattern(5 * 4096, /*seed=*/77);
  store_.reset();
  volume_.reset();
  disk_.Overwrite(0, 0, junk);
  Recover(2);
  MakeStore(1);
  EXPECT_EQ(store_->Read(0).step, 2u);
  EXPECT_EQ(volume_->recovery().damaged_records, 2u);
  store_.reset();
  volume_.reset();
  disk_.Overwrite(1, kPathBytes - 5 * 4096, std::span(junk).first(4 * 4096));
  VolumeOptions options = Options(2);
  options.mode = OpenMode::kRecover;
  EXPECT_THAT(Volume::Open(options, disk_, disk_), HasError(ErrorId::kCorrupt));
}

TEST_F(VolumeTest, RefusesOptionsOutsideTheirRules) {
  EXPECT_THAT(Volume::Open(VolumeOptions{}, disk_, disk_), HasError(ErrorId::kConfig));
  VolumeOptions options = Options(2);
  options.ledger_bytes_max = 0;
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
  const std::vector<Slot> slots = SomeSlots(2);
  ASSERT_OK(WriteNow(*volume_, disk_, slots[0], ContentOf(0, 1)));
  Bytes bytes(kBlockBytes);
  for (uint32_t i = 0; i < Volume::kRequestsMax; ++i) ASSERT_OK(volume_->Read(slots[0], bytes, 5));
  EXPECT_THAT(volume_->Read(slots[0], bytes, 5), HasCode(absl::StatusCode::kResourceExhausted));
  EXPECT_EQ(volume_->requests_in_flight(), Volume::kRequestsMax);
  // Zeroing and commits succeed although kRequestsMax requests are in flight.
  const Bytes zeros(4096);
  ASSERT_OK(volume_->Zero({{slots[1]}}, zeros, /*token=*/6));
  ASSERT_OK(CommitNow(*volume_, disk_, {}, {{slots[0]}}));
  EXPECT_EQ(volume_->requests_in_flight(), 0u);
}

TEST_F(VolumeTest, IgnoresCompletionsThatAreNotItsOwn) {
  Open(Options(1));
  std::vector<Finished> finished;
  for (const uint64_t token :
       {uint64_t{0}, ~uint64_t{0}, Volume::kTokenTag, Volume::kTokenTag | (uint64_t{3} << 32)}) {
    volume_->OnCompletion({.token = token, .result = 4096, .kind = IoKind::kRead}, finished);
  }
  EXPECT_THAT(finished, IsEmpty());
  EXPECT_FALSE(Volume::Owns(0));
  EXPECT_TRUE(Volume::Owns(Volume::kTokenTag | 5));
}

TEST_F(VolumeTest, LateRequestsAreCountedOnceAndShownWhileTheyLast) {
  uint64_t now = 1000;
  VolumeOptions options = Options(2);
  options.now_ns = [&now] { return now; };
  Open(options);
  const std::vector<Slot> slots = SomeSlots(2);
  const uint32_t path = slots[0].path;
  Bytes bytes(kBlockBytes);
  ASSERT_OK(volume_->Read(slots[0], bytes, 1));
  now += 99;
  EXPECT_THAT(volume_->CheckDeadlines(100), IsEmpty());
  now += 1;
  for (int i = 0; i < 2; ++i) {
    const std::vector<LateRequests> late = volume_->CheckDeadlines(100);
    ASSERT_EQ(late.size(), 1u);
    EXPECT_EQ(late[0].path, path);
    EXPECT_EQ(late[0].requests, 1u);
    EXPECT_EQ(late[0].oldest_ns, 100u);
    EXPECT_EQ(volume_->stats().paths[path].late, 1u) << "counted once";
  }
  ASSERT_OK(FinishOne(*volume_, disk_, 1));
  EXPECT_THAT(volume_->CheckDeadlines(100), IsEmpty());
}

}  // namespace
}  // namespace forebay::nvme::volume_test
