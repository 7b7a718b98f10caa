// SPDX-License-Identifier: Apache-2.0
// Goal    A transfer that the disk never ends fails after its deadline with path, offset and seconds. Other slots and paths are
//         served meanwhile. A silent path refuses requests at once, and is used again once it answers. Late transfers of the
//         disk do no harm.
// Method  An engine in which transfers hang until the test ends them, above simulated disks; the clock is
//         the test's.

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nvme/internal/protections.h"
#include "nvme/volume.h"
#include "protocol/error.h"
#include "tests/nvme/volume_world.h"
#include "tests/support/fault_engine.h"
#include "tests/support/pattern.h"
#include "tests/support/simulated_disk.h"
#include "tests/support/status_test.h"

namespace forebay::nvme::volume_deadline_fault_test {
namespace {

using ::forebay::testing::Bytes;
using ::forebay::testing::FaultEngine;
using ::forebay::testing::HasError;
using ::forebay::testing::IoFault;
using ::forebay::testing::SimulatedDisk;
using protocol::ErrorId;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kPathBytes = 512 << 10;
constexpr uint64_t kSecondNs = 1'000'000'000;
constexpr uint64_t kDeadlineNs = 60 * kSecondNs;

class VolumeDeadlineFault : public ::testing::Test {
 protected:
  void Open(const internal::Protections& protections = {}) {
    VolumeOptions options;
    for (uint32_t path = 0; path < 2; ++path) {
      options.paths.push_back({.path = disk_.path_name(path), .capacity_bytes = kPathBytes});
    }
    options.ledger_bytes_max = 4096;
    options.now_ns = [this] { return now_; };
    ASSERT_OK_AND_ASSIGN(volume_, Volume::OpenForTest(options, protections, engine_, disk_));
    SlotMap map = volume_->free_slots();
    for (uint32_t path = 0; path < 2; ++path) {
      for (uint32_t i = 0; i < 8; ++i) {
        slots_[path].push_back(*map.AllocateOn(path, kBlockBytes));
        ASSERT_OK(WriteNow(*volume_, engine_, slots_[path][i], ContentOf(10 * path + i, 1)));
      }
    }
  }

  // Makes all transfers that begin from now on hang.
  void Hang() { engine_.SetFault({.count = IoFault::kForEver, .hangs = true}); }
  void Work() { engine_.ClearFault(); }

  // Sets the time and checks the deadlines, as the daemon does each second.
  std::vector<Finished> CheckAt(uint64_t now_ns) {
    now_ = now_ns;
    std::vector<Finished> finished;
    volume_->GiveUp(
        kDeadlineNs, [](uint64_t) { return true; }, finished);
    volume_->CheckDeadlines(kDeadlineNs / 6);
    return finished;
  }

  // Advances the clock past the deadline in two checks.
  std::vector<Finished> PassDeadline() {
    EXPECT_THAT(CheckAt(now_ + kDeadlineNs - kSecondNs), IsEmpty());
    return CheckAt(now_ + kSecondNs);
  }

  // Finishes all requests that have ended. Does not wait.
  std::vector<Finished> Drain() {
    std::array<Completion, 8> completions;
    std::vector<Finished> finished;
    size_t count = 0;
    do {
      count = engine_.Wait(std::chrono::nanoseconds(0), completions).value();
      for (size_t i = 0; i < count; ++i) volume_->OnCompletion(completions[i], finished);
    } while (count > 0);
    return finished;
  }

  absl::Status ReadAndCompare(const Slot& slot, const Bytes& expected) {
    Bytes bytes(kBlockBytes);
    const absl::Status status = ReadNow(*volume_, engine_, slot, bytes);
    if (status.ok()) {
      EXPECT_EQ(bytes, expected);
    }
    return status;
  }

  uint64_t now_ = 1000 * kSecondNs;
  SimulatedDisk disk_{{.paths = 2, .capacity_bytes = kPathBytes}};
  FaultEngine engine_{disk_};
  std::unique_ptr<Volume> volume_;
  std::array<std::vector<Slot>, 2> slots_;
};

TEST_F(VolumeDeadlineFault, AReadThatNeverEndsIsAnErrorWithPathOffsetAndSeconds) {
  ASSERT_NO_FATAL_FAILURE(Open());
  Hang();
  Bytes bytes(kBlockBytes);
  ASSERT_OK(volume_->Read(slots_[0][1], bytes, /*token=*/7));
  Work();
  EXPECT_OK(ReadAndCompare(slots_[0][2], ContentOf(2, 1))) << "another slot of the path";
  const std::vector<Finished> finished = PassDeadline();
  ASSERT_EQ(finished.size(), 1u);
  EXPECT_EQ(finished[0].token, 7u);
  EXPECT_EQ(finished[0].kind, Finished::Kind::kGivenUp);
  EXPECT_THAT(finished[0].status, HasError(ErrorId::kSwapTimeout));
  EXPECT_THAT(
      finished[0].status.message(),
      AllOf(HasSubstr("swap path 0 (" + disk_.path_name(0)),
            HasSubstr("read at offset " + std::to_string(slots_[0][1].offset_bytes)),
            HasSubstr("0 of " + std::to_string(kBlockBytes) + " bytes"), HasSubstr("60.0 s")));
  EXPECT_EQ(volume_->requests_in_flight(), 1u) << "its memory is the disk's";
  EXPECT_THAT(CheckAt(now_ + kDeadlineNs), IsEmpty()) << "once";

  ASSERT_OK(engine_.EndHung());
  const std::vector<Finished> released = Drain();
  ASSERT_EQ(released.size(), 1u);
  EXPECT_EQ(released[0].token, 7u);
  EXPECT_EQ(released[0].kind, Finished::Kind::kReleased);
  EXPECT_EQ(volume_->requests_in_flight(), 0u);
  EXPECT_OK(ReadAndCompare(slots_[0][1], ContentOf(1, 1))) << "nothing was lost";
}

TEST_F(VolumeDeadlineFault, AShortTransferOfWhatWasGivenUpIsNotGoneOnWith) {
  ASSERT_NO_FATAL_FAILURE(Open());
  Hang();
  Bytes bytes(kBlockBytes);
  ASSERT_OK(volume_->Read(slots_[0][0], bytes, /*token=*/7));
  ASSERT_EQ(PassDeadline().size(), 1u);
  Work();
  engine_.SetFault({.count = 1, .short_bytes = 4096});
  const uint64_t before = disk_.operations();
  ASSERT_OK(engine_.EndHung());
  ASSERT_EQ(Drain().size(), 1u);
  EXPECT_EQ(disk_.operations(), before + 1);
  EXPECT_EQ(volume_->requests_in_flight(), 0u);
}

// A process that was stopped (by a debugger, or a suspended machine) reads completions before it gives a request up.
TEST_F(VolumeDeadlineFault, ATimeInWhichNobodyLookedIsNotTheDisks) {
  ASSERT_NO_FATAL_FAILURE(Open());
  Bytes bytes(kBlockBytes);
  ASSERT_OK(volume_->Read(slots_[0][1], bytes, /*token=*/7));
  EXPECT_THAT(CheckAt(now_ + 10 * kDeadlineNs), IsEmpty());
  const std::vector<Finished> finished = Drain();
  ASSERT_EQ(finished.size(), 1u);
  EXPECT_OK(finished[0].status);
  EXPECT_EQ(finished[0].kind, Finished::Kind::kEnded);
}

TEST_F(VolumeDeadlineFault, OnlyWhatMayBeGivenUpIs) {
  ASSERT_NO_FATAL_FAILURE(Open());
  Hang();
  Bytes bytes(kBlockBytes);
  ASSERT_OK(volume_->Read(slots_[0][1], bytes, /*token=*/7));
  ASSERT_OK(volume_->CommitLedger(std::as_bytes(std::span("ledger")), slots_[1], /*token=*/8));
  (void)CheckAt(now_ + kDeadlineNs / 2);
  now_ += kDeadlineNs;
  std::vector<Finished> finished;
  volume_->GiveUp(
      kDeadlineNs, [](uint64_t token) { return token != 7; }, finished);
  EXPECT_THAT(finished, IsEmpty());
  Work();
  ASSERT_OK(engine_.EndHung());
  EXPECT_OK(FinishOne(*volume_, engine_, 8)) << "commits are waited for";
}

// The disk executes the late write of old bytes after other bytes may have been written to the slot.
TEST_F(VolumeDeadlineFault, AWriteThatWasGivenUpKeepsItsSlotUntilItHasEnded) {
  for (const bool keeps : {true, false}) {
    SCOPED_TRACE(keeps);
    volume_.reset();
    slots_ = {};
    ASSERT_NO_FATAL_FAILURE(Open({.given_up_slots = keeps}));
    const Slot& slot = slots_[0][3];
    Hang();
    const Bytes late = ContentOf(3, 2);
    ASSERT_OK(volume_->Write(slot, late, /*token=*/7));
    const std::vector<Finished> finished = PassDeadline();
    ASSERT_EQ(finished.size(), 1u);
    EXPECT_THAT(finished[0].status, HasError(ErrorId::kSwapTimeout));
    EXPECT_THAT(finished[0].status.message(),
                HasSubstr("write at offset " + std::to_string(slot.offset_bytes)));
    Work();
    const Bytes newer = ContentOf(3, 3);
    const absl::Status written = WriteNow(*volume_, engine_, slot, newer);
    ASSERT_OK(engine_.EndHung());
    ASSERT_EQ(Drain().size(), 1u);
    if (keeps) {
      EXPECT_THAT(written, HasError(ErrorId::kSwapTimeout));
      EXPECT_THAT(ReadAndCompare(slot, late), HasError(ErrorId::kSwapIo)) << "its write failed";
      EXPECT_OK(WriteNow(*volume_, engine_, slot, newer)) << "it is free now";
      EXPECT_OK(ReadAndCompare(slot, newer));
    } else {
      EXPECT_OK(written);
      EXPECT_OK(ReadAndCompare(slot, late)) << "the newer bytes are gone";
    }
  }
}

TEST_F(VolumeDeadlineFault, APathSilentToReadsRefusesThemAtOnceButForOne) {
  ASSERT_NO_FATAL_FAILURE(Open());
  Hang();
  std::vector<Bytes> bytes(4, Bytes(kBlockBytes));
  ASSERT_OK(volume_->Read(slots_[0][0], bytes[0], 1));
  ASSERT_OK(volume_->Read(slots_[0][1], bytes[1], 2));
  ASSERT_EQ(PassDeadline().size(), 2u);

  ASSERT_OK(volume_->Read(slots_[0][2], bytes[2], 3)) << "one asks whether it answers";
  const absl::Status refused = volume_->Read(slots_[0][3], bytes[3], 4);
  EXPECT_THAT(refused, HasError(ErrorId::kSwapTimeout));
  EXPECT_THAT(refused.message(), AllOf(HasSubstr("swap path 0 (" + disk_.path_name(0)),
                                       HasSubstr("has not ended reads (2)"),
                                       HasSubstr("has answered none for 60.0 s")));
  Work();
  EXPECT_OK(WriteNow(*volume_, engine_, slots_[0][4], ContentOf(4, 2))) << "it takes writes";
  EXPECT_THAT(volume_->Read(slots_[0][3], bytes[3], 4), HasError(ErrorId::kSwapTimeout));
  EXPECT_OK(ReadAndCompare(slots_[1][3], ContentOf(13, 1))) << "the other path";

  ASSERT_OK(engine_.EndHung());
  EXPECT_EQ(Drain().size(), 3u);
  EXPECT_OK(ReadAndCompare(slots_[0][3], ContentOf(3, 1))) << "it answers again";
}

// A job that can delay its writes survives only if its reads are served.
TEST_F(VolumeDeadlineFault, APathSilentToWritesRefusesThemAndServesReads) {
  ASSERT_NO_FATAL_FAILURE(Open());
  Hang();
  const Bytes newer = ContentOf(0, 2);
  const uint32_t count = Volume::kGivenUpMax + 1;
  for (uint32_t i = 0; i < count; ++i) ASSERT_OK(volume_->Write(slots_[0][i], newer, i));
  ASSERT_EQ(PassDeadline().size(), count);
  const absl::Status refused = volume_->Write(slots_[0][6], newer, 7);
  EXPECT_THAT(refused, HasError(ErrorId::kSwapTimeout));
  EXPECT_THAT(refused.message(), HasSubstr("has not ended writes (5)"));
  const Bytes zeros(4096);
  EXPECT_THAT(volume_->Zero(std::vector{slots_[1][6], slots_[0][6]}, zeros, 7),
              HasError(ErrorId::kSwapTimeout));
  Work();
  for (int read = 0; read < 3; ++read) {
    EXPECT_OK(ReadAndCompare(slots_[0][6], ContentOf(6, 1)));
  }
  EXPECT_OK(WriteNow(*volume_, engine_, slots_[1][6], newer)) << "the other path";

  ASSERT_OK(engine_.EndHung());
  EXPECT_EQ(Drain().size(), count);
  EXPECT_OK(WriteNow(*volume_, engine_, slots_[0][6], newer)) << "it answers again";
}

// A single lost request does not close the path.
TEST_F(VolumeDeadlineFault, APathThatAnswersServesOthersBesideRequestsThatWereGivenUp) {
  ASSERT_NO_FATAL_FAILURE(Open());
  std::vector<Bytes> bytes(Volume::kGivenUpMax + 1, Bytes(kBlockBytes));
  for (uint32_t i = 0; i <= Volume::kGivenUpMax; ++i) {
    for (uint32_t others = 0; others < 2; ++others) {
      EXPECT_OK(ReadAndCompare(slots_[0][6], ContentOf(6, 1))) << "after " << i;
    }
    Hang();
    ASSERT_OK(volume_->Read(slots_[0][i], bytes[i], i));
    Work();
    ASSERT_EQ(PassDeadline().size(), 1u);
  }
  EXPECT_THAT(ReadAndCompare(slots_[0][6], {}), HasError(ErrorId::kSwapTimeout)) << "too many";
  EXPECT_OK(ReadAndCompare(slots_[1][6], ContentOf(16, 1)));
  ASSERT_OK(engine_.EndHung());
  ASSERT_EQ(Drain().size(), bytes.size());
  EXPECT_OK(ReadAndCompare(slots_[0][6], ContentOf(6, 1)));
}

TEST_F(VolumeDeadlineFault, ZeroingThatIsGivenUpKeepsNoSlotThatTheDiskHasDoneWith) {
  ASSERT_NO_FATAL_FAILURE(Open());
  const Bytes zeros(kBlockBytes);
  std::vector<Slot> all = slots_[0];
  all.insert(all.end(), slots_[1].begin(), slots_[1].end());
  engine_.SetFault({.operation = 3, .count = 1, .hangs = true});
  ASSERT_OK(volume_->Zero(all, zeros, /*token=*/9));
  EXPECT_THAT(Drain(), IsEmpty());
  ASSERT_EQ(PassDeadline().size(), 1u);
  uint32_t kept = 0;
  for (const Slot& slot : all) {
    const absl::Status written = WriteNow(*volume_, engine_, slot, ContentOf(0, 2));
    if (written.ok()) continue;
    EXPECT_THAT(written, HasError(ErrorId::kSwapTimeout));
    ++kept;
  }
  EXPECT_EQ(kept, 1u);
  Work();
  ASSERT_OK(engine_.EndHung());
  ASSERT_EQ(Drain().size(), 1u);
  for (const Slot& slot : all) EXPECT_OK(WriteNow(*volume_, engine_, slot, ContentOf(0, 3)));
}

TEST_F(VolumeDeadlineFault, ZeroingThatNeverEndsIsOneErrorAndItsSlotsAreKept) {
  ASSERT_NO_FATAL_FAILURE(Open());
  Hang();
  const Bytes zeros(4096);
  const std::vector<Slot> both = {slots_[0][0], slots_[1][0]};
  ASSERT_OK(volume_->Zero(both, zeros, /*token=*/9));
  const std::vector<Finished> finished = PassDeadline();
  ASSERT_EQ(finished.size(), 1u);
  EXPECT_EQ(finished[0].token, 9u);
  EXPECT_THAT(finished[0].status, HasError(ErrorId::kSwapTimeout));
  EXPECT_THAT(finished[0].status.message(), HasSubstr("zero-write at offset "));
  EXPECT_THAT(volume_->Write(both[0], ContentOf(0, 2), 10), HasError(ErrorId::kSwapTimeout));
  EXPECT_THAT(volume_->Zero(std::vector{both[0]}, zeros, 10), HasError(ErrorId::kSwapTimeout));
  EXPECT_EQ(volume_->requests_in_flight(), 1u);

  Work();
  ASSERT_OK(engine_.EndHung());
  const std::vector<Finished> released = Drain();
  ASSERT_EQ(released.size(), 1u);
  EXPECT_EQ(released[0].kind, Finished::Kind::kReleased);
  EXPECT_EQ(volume_->requests_in_flight(), 0u);
  EXPECT_OK(WriteNow(*volume_, engine_, both[0], ContentOf(0, 2)));
  EXPECT_OK(ReadAndCompare(both[0], ContentOf(0, 2)));
}

}  // namespace
}  // namespace forebay::nvme::volume_deadline_fault_test
