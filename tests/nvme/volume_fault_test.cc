// Goal    Three blocks on two paths are at the old step or at the new one, together, after any
//         power cut and any failing or short transfer; and one lost, torn or misdirected write is
//         that, or an error that names path, extent and identity. Never a mix, never silence.
// Method  Faults are enumerated: before or at operation 0, 1, 2, ... of the steps, until they end
//         without meeting the fault; the number of cut points must be the disk's own count. The
//         disk is simulated: its cache is lost, kept, reordered or torn by sector at a cut.

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
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

namespace forebay::nvme {
namespace {

using ::forebay::testing::Bytes;
using ::forebay::testing::CutFate;
using ::forebay::testing::ExecutionOrder;
using ::forebay::testing::FaultEngine;
using ::forebay::testing::HasError;
using ::forebay::testing::IoFault;
using ::forebay::testing::SimulatedDisk;
using ::forebay::testing::WriteFault;
using ::testing::HasSubstr;

constexpr uint32_t kBlocks = 3;
constexpr uint64_t kPathBytes = 128 << 10;
constexpr uint64_t kOperationsMax = 500;  // far above what the steps need

struct Fate {
  CutFate kind;
  uint64_t seed;
};

std::vector<Fate> AllFates() {
  std::vector<Fate> fates = {
      {CutFate::kLoseAll, 0}, {CutFate::kKeepAll, 0}, {CutFate::kLoseOldest, 0}};
  for (uint64_t seed = 1; seed <= 6; ++seed) fates.push_back({CutFate::kTornSectors, seed});
  return fates;
}

VolumeOptions Options(const SimulatedDisk& disk, OpenMode mode) {
  VolumeOptions options;
  for (uint32_t path = 0; path < 2; ++path) {
    options.paths.push_back({.path = disk.path_name(path), .capacity_bytes = kPathBytes});
  }
  options.mode = mode;
  options.extents_max = 8;
  return options;
}

// Two paths and an engine that may be told to fail.
struct World {
  World() : disk({.paths = 2, .capacity_bytes = kPathBytes}), faults(disk) {}

  absl::StatusOr<std::unique_ptr<Volume>> Open(OpenMode mode) {
    return Volume::OpenForTest(Options(disk, mode), protections, faults, disk);
  }

  // A new volume with its blocks durable at step 1.
  absl::StatusOr<std::unique_ptr<Volume>> AtStepOne() {
    ASSIGN_OR_RETURN(std::unique_ptr<Volume> volume, Open(OpenMode::kReclaim));
    ASSIGN_OR_RETURN(const std::vector<ExtentId> extents,
                     volume->AllocateExtents(kBlocks, kBlockBytes));
    RETURN_IF_ERROR(ZeroNow(*volume, faults, extents));
    RETURN_IF_ERROR(CommitStep(*volume, faults, 1));
    return volume;
  }

  SimulatedDisk disk;
  FaultEngine faults;
  internal::Protections protections;
};

// The step that all blocks have after reopening; 0 for a volume without blocks. Fails the test on a
// mix, an error, or bytes that are not what they claim to be.
uint32_t StepAfterReopening(World& world) {
  const auto volume = world.Open(OpenMode::kRecover);
  EXPECT_OK(volume);
  if (!volume.ok()) return ~0u;
  EXPECT_FALSE((*volume)->recovery().fell_back);
  const std::vector<ExtentId> extents = (*volume)->extents();
  if (extents.empty()) return 0;
  EXPECT_EQ(extents.size(), kBlocks);
  uint32_t step = 0;
  for (const ExtentId extent : extents) {
    const BlockState block = ReadBlock(**volume, world.disk, extent);
    EXPECT_OK(block.status);
    EXPECT_TRUE(block.bytes_right);
    if (step != 0) {
      EXPECT_EQ(block.step, step) << "a mix of steps";
    }
    step = block.step;
  }
  return step;
}

// Steps 2 to `last`, until one fails; the last one that was acknowledged, 1 for none.
uint32_t CommitStepsTo(uint32_t last, Volume& volume, IoEngine& engine) {
  for (uint32_t step = 2; step <= last; ++step) {
    if (!CommitStep(volume, engine, step).ok()) return step - 1;
  }
  return last;
}

// Cuts before each operation of steps 2 to 4; how many cut points there were.
void CutEverywhere(Fate fate, ExecutionOrder order) {
  constexpr uint32_t kLast = 4;
  uint64_t operations = 0;
  {
    World world;
    world.disk.set_order(order);
    ASSERT_OK_AND_ASSIGN(const auto volume, world.AtStepOne());
    const uint64_t before = world.disk.operations();
    ASSERT_EQ(CommitStepsTo(kLast, *volume, world.disk), kLast);
    operations = world.disk.operations() - before;
  }
  uint64_t cuts = 0;
  for (; cuts < kOperationsMax; ++cuts) {
    SCOPED_TRACE(::testing::Message() << "power cut before operation " << cuts << ", fate "
                                      << static_cast<int>(fate.kind) << " seed " << fate.seed);
    World world;
    world.disk.set_order(order);
    uint32_t acknowledged = 0;
    {
      ASSERT_OK_AND_ASSIGN(const auto volume, world.AtStepOne());
      world.disk.set_cut_fate(fate.kind, fate.seed + 1000 * cuts);
      world.disk.CutPowerBefore(cuts);
      acknowledged = CommitStepsTo(kLast, *volume, world.disk);
    }
    if (!world.disk.power_was_cut()) break;
    world.disk.RestorePower();
    const uint32_t step = StepAfterReopening(world);
    EXPECT_GE(step, acknowledged);
    EXPECT_LE(step, acknowledged + 1);
    // And it goes on from there.
    ASSERT_OK_AND_ASSIGN(const auto volume, world.Open(OpenMode::kRecover));
    ASSERT_OK(CommitStep(*volume, world.disk, 9));
    world.disk.CutPowerNow();
  }
  EXPECT_EQ(cuts, operations) << "the cut points are not the operations of the disk";
  EXPECT_GE(operations, 3 * (kBlocks + 2 + 2 + 2 + 2 + 2));
}

TEST(VolumeFault, StepsAreAtomicAtEveryPowerCut) {
  for (const Fate& fate : AllFates()) {
    for (const ExecutionOrder order : {ExecutionOrder::kAsSubmitted, ExecutionOrder::kLastFirst}) {
      ASSERT_NO_FATAL_FAILURE(CutEverywhere(fate, order));
    }
  }
}

TEST(VolumeFault, AVolumeIsEmptyOrAtItsFirstStepAtEveryPowerCutWhileItIsMade) {
  for (const Fate& fate : AllFates()) {
    bool reached = true;
    for (uint64_t cut = 0; reached; ++cut) {
      ASSERT_LT(cut, kOperationsMax);
      SCOPED_TRACE(::testing::Message() << "power cut before operation " << cut << ", fate "
                                        << static_cast<int>(fate.kind) << " seed " << fate.seed);
      World world;
      // An older volume lies there, as after a change of mind: its step must never come back.
      {
        ASSERT_OK_AND_ASSIGN(const auto older, world.AtStepOne());
        ASSERT_OK(CommitNow(*older, world.faults));  // both record slots are in use
      }
      world.disk.set_cut_fate(fate.kind, fate.seed + 1000 * cut);
      world.disk.CutPowerBefore(cut);
      bool opened = false;
      {
        const auto volume = world.Open(OpenMode::kReclaim);
        opened = volume.ok();
        if (opened) {
          const auto extents = (*volume)->AllocateExtents(kBlocks, kBlockBytes);
          if (ZeroNow(**volume, world.faults, *extents).ok()) {
            CommitStep(**volume, world.faults, 2).IgnoreError();
          }
        }
      }
      reached = world.disk.power_was_cut();
      world.disk.CutPowerNow();
      world.disk.RestorePower();
      if (opened) {
        const uint32_t step = StepAfterReopening(world);
        EXPECT_TRUE(step == 0 || step == 2) << step;
        EXPECT_TRUE(reached || step == 2);
        continue;
      }
      const auto volume = world.Open(OpenMode::kRecover);
      if (!volume.ok()) {
        EXPECT_THAT(volume, HasError(protocol::ErrorId::kSwapPath));
      } else if (!(*volume)->extents().empty()) {
        EXPECT_EQ((*volume)->durable_sequence(), 2u);  // the old one, as nothing was acknowledged
      }
    }
  }
}

// One fault at each operation of step 2; then the power is cut or not, and the volume reopened.
void FaultEverywhere(IoFault fault, const char* what) {
  for (const bool cut : {false, true}) {
    bool fired = true;
    for (uint64_t operation = 0; fired; ++operation) {
      ASSERT_LT(operation, kOperationsMax);
      SCOPED_TRACE(::testing::Message() << what << " at operation " << operation << ", error "
                                        << fault.error_number << ", bytes " << fault.short_bytes
                                        << ", count " << fault.count << ", cut " << cut);
      World world;
      absl::Status status;
      {
        ASSERT_OK_AND_ASSIGN(const auto volume, world.AtStepOne());
        fault.operation = operation;
        world.faults.SetFault(fault);
        status = CommitStep(*volume, world.faults, 2);
        fired = world.faults.operations() > operation;
        world.faults.ClearFault();
        if (!status.ok()) {
          EXPECT_THAT(status, HasError(protocol::ErrorId::kSwapIo));
          EXPECT_THAT(status.message(), HasSubstr("/simulated/"));
        }
      }
      if (cut) {
        world.disk.set_cut_fate(CutFate::kTornSectors, operation + 1);
        world.disk.CutPowerNow();
      }
      world.disk.RestorePower();
      const uint32_t step = StepAfterReopening(world);
      EXPECT_TRUE(step == 1 || step == 2) << step;
      if (status.ok()) {
        EXPECT_EQ(step, 2u);
      }
    }
  }
}

TEST(VolumeFault, StepsAreAtomicAtEveryFailingTransfer) {
  for (const int error : {EIO, ENOSPC, EAGAIN, EINTR, ENODATA, ETIMEDOUT, ECANCELED}) {
    ASSERT_NO_FATAL_FAILURE(FaultEverywhere({.count = 1, .error_number = error}, "once"));
    ASSERT_NO_FATAL_FAILURE(
        FaultEverywhere({.count = IoFault::kForEver, .error_number = error}, "permanently"));
  }
}

TEST(VolumeFault, StepsAreAtomicAtEveryShortTransfer) {
  for (const uint64_t count : {uint64_t{1}, IoFault::kForEver}) {
    for (const int64_t bytes : {0, 1, 511, 512, 4096, 4097}) {
      ASSERT_NO_FATAL_FAILURE(FaultEverywhere({.count = count, .short_bytes = bytes}, "short"));
    }
    ASSERT_NO_FATAL_FAILURE(
        FaultEverywhere({.count = count, .short_bytes = 512, .short_by = true}, "short by"));
  }
}

TEST(VolumeFault, OneFailureOfADataTransferIsCuredByTryingAgain) {
  for (const int error : {EIO, EAGAIN, EINTR, ETIMEDOUT}) {
    for (uint64_t operation = 0; operation < kBlocks; ++operation) {
      World world;
      ASSERT_OK_AND_ASSIGN(const auto volume, world.AtStepOne());
      world.faults.SetFault({.operation = operation, .error_number = error});
      EXPECT_OK(CommitStep(*volume, world.faults, 2));
      EXPECT_EQ(world.faults.fired(), 1u);
      EXPECT_EQ(volume->stats().paths[0].retries + volume->stats().paths[1].retries, 1u);
    }
  }
}

TEST(VolumeFault, ReadsMeetFailingAndShortTransfersWithTheRightBytesOrAnError) {
  for (const IoFault& kind :
       {IoFault{.error_number = EIO}, IoFault{.error_number = EAGAIN}, IoFault{.short_bytes = 0},
        IoFault{.short_bytes = 511}, IoFault{.short_bytes = 4096}, IoFault{.short_bytes = 8191}}) {
    for (const uint64_t count : {uint64_t{1}, IoFault::kForEver}) {
      SCOPED_TRACE(::testing::Message() << kind.error_number << " " << kind.short_bytes);
      World world;
      ASSERT_OK_AND_ASSIGN(const auto volume, world.AtStepOne());
      IoFault fault = kind;
      fault.count = count;
      world.faults.SetFault(fault);
      const BlockState block = ReadBlock(*volume, world.faults, ExtentId{1});
      if (block.status.ok()) {
        EXPECT_TRUE(block.bytes_right);
      } else {
        EXPECT_EQ(count, IoFault::kForEver);
        EXPECT_THAT(block.status, HasError(protocol::ErrorId::kSwapIo));
        EXPECT_THAT(block.status.message(), HasSubstr("extent 1 "));
      }
      EXPECT_EQ(volume->requests_in_flight(), 0u);
    }
  }
}

// After any one failure the same volume, without a restart, gets the step through.
TEST(VolumeFault, AfterAFailureTheStepCanBeCommittedAgain) {
  for (const uint64_t count : {1u, 3u, 9u}) {
    bool fired = true;
    for (uint64_t operation = 0; fired; ++operation) {
      ASSERT_LT(operation, kOperationsMax);
      SCOPED_TRACE(::testing::Message() << count << " failures from operation " << operation);
      World world;
      {
        ASSERT_OK_AND_ASSIGN(const auto volume, world.AtStepOne());
        world.faults.SetFault({.operation = operation, .count = count, .error_number = EIO});
        const absl::Status status = CommitStep(*volume, world.faults, 2);
        fired = world.faults.operations() > operation;
        world.faults.ClearFault();
        if (!status.ok()) {
          EXPECT_OK(CommitStep(*volume, world.faults, 2));
        }
        EXPECT_EQ(volume->NeedsRewrite().size(), 0u);
      }
      world.disk.CutPowerNow();
      world.disk.RestorePower();
      EXPECT_EQ(StepAfterReopening(world), 2u);
    }
  }
}

// A commit that failed may be durable all the same: then neither slot of a block is free.
TEST(VolumeFault, AfterACommitOfUnknownOutcomeNoSlotItMayNameIsOverwritten) {
  constexpr uint64_t kRecordWrites = kBlocks + 2 + 2 + 2;  // blocks, flushes, tables, flushes
  for (uint64_t operation = kRecordWrites; operation < kRecordWrites + 4; ++operation) {
    for (const Fate& fate : AllFates()) {
      SCOPED_TRACE(::testing::Message() << "operation " << operation << " fails, fate "
                                        << static_cast<int>(fate.kind) << " seed " << fate.seed);
      World world;
      {
        ASSERT_OK_AND_ASSIGN(const auto volume, world.AtStepOne());
        world.faults.SetFault({.operation = operation, .count = 9, .error_number = EIO});
        ASSERT_THAT(CommitStep(*volume, world.faults, 2), HasError(protocol::ErrorId::kSwapIo));
        world.faults.ClearFault();
        const Bytes next = ContentOf(0, 3);
        EXPECT_THAT(volume->Write(ExtentId{0}, next, IdentityOf(0, 3), 0, /*token=*/1),
                    ::forebay::testing::HasCode(absl::StatusCode::kFailedPrecondition));
        world.disk.set_cut_fate(fate.kind, fate.seed);
        world.disk.CutPowerNow();
      }
      world.disk.RestorePower();
      const uint32_t step = StepAfterReopening(world);
      EXPECT_TRUE(step == 1 || step == 2) << step;
    }
  }
}

// As after a real fsync error: the kernel dropped the pages, and the next fsync succeeds.
TEST(VolumeFault, WhatAFailedFlushDroppedIsWrittenAgainBeforeACommitSucceeds) {
  bool failed = true;
  int failures = 0;
  for (uint64_t operation = 0; operation < 20; ++operation) {
    SCOPED_TRACE(::testing::Message() << "flush fails at operation " << operation);
    World world;
    {
      ASSERT_OK_AND_ASSIGN(const auto volume, world.AtStepOne());
      world.disk.FailFlush(operation);
      failed = !CommitStep(*volume, world.disk, 2).ok();
      if (failed) {
        ++failures;
        const VolumeStats stats = volume->stats();
        EXPECT_TRUE(stats.paths[0].flush_failed || stats.paths[1].flush_failed);
        if (operation < 5) {  // a flush of data: its blocks are in doubt
          EXPECT_GT(volume->NeedsRewrite().size(), 0u);
          EXPECT_THAT(volume->Commit(1),
                      ::forebay::testing::HasCode(absl::StatusCode::kFailedPrecondition));
        }
        EXPECT_OK(CommitStep(*volume, world.disk, 2));
      }
    }
    world.disk.CutPowerNow();
    world.disk.RestorePower();
    EXPECT_EQ(StepAfterReopening(world), 2u);
  }
  EXPECT_EQ(failures, 6) << "two flushes each of data, table and record";
}

// A step with one write that lies about its success; then a power cut and a reopening. Returns
// whether the fault hit a write.
bool LyingWrite(WriteFault fault, uint64_t operation, bool commit) {
  World world;
  bool fired = false;
  {
    const auto volume = world.AtStepOne();
    EXPECT_OK(volume);
    world.disk.FaultWrite(operation, fault);
    if (commit) {
      EXPECT_OK(CommitStep(**volume, world.disk, 2));
    } else {
      for (uint32_t block = 0; block < kBlocks; ++block) {
        EXPECT_OK(WriteNow(**volume, world.disk, ExtentId{block}, ContentOf(block, 2),
                           IdentityOf(block, 2)));
      }
    }
    fired = world.disk.fault_fired();
  }
  world.disk.set_cut_fate(CutFate::kKeepAll, 0);
  world.disk.CutPowerNow();
  world.disk.RestorePower();
  const auto volume = world.Open(OpenMode::kRecover);
  EXPECT_OK(volume);
  if (!volume.ok()) return fired;
  EXPECT_EQ((*volume)->extents().size(), kBlocks);
  uint32_t step = 0;
  for (uint32_t block = 0; block < kBlocks; ++block) {
    const BlockState state = ReadBlock(**volume, world.disk, ExtentId{block});
    EXPECT_TRUE(step == 0 || state.step == step) << "a mix of steps";
    step = state.step;
    EXPECT_EQ(state.status.ok(), state.bytes_right) << "silence, or a false alarm";
    if (state.status.ok()) continue;
    EXPECT_THAT(state.status, HasError(protocol::ErrorId::kCorrupt));
    EXPECT_THAT(state.status.message(), HasSubstr("/simulated/"));
    EXPECT_THAT(state.status.message(), HasSubstr("extent " + std::to_string(block) + " "));
    const Identity identity = IdentityOf(block, step);
    EXPECT_THAT(state.status.message(),
                HasSubstr(absl::BytesToHexString(
                    {reinterpret_cast<const char*>(identity.data()), identity.size()})));
  }
  EXPECT_TRUE(step == 1 || step == 2);
  EXPECT_TRUE(commit || step == 1);
  return fired;
}

TEST(VolumeFault, OneLostOrTornWriteIsAnErrorOrWithoutEffect) {
  for (const WriteFault::Kind kind : {WriteFault::Kind::kLost, WriteFault::Kind::kTorn}) {
    int fired = 0;
    for (uint64_t operation = 0; operation < 20; ++operation) {
      SCOPED_TRACE(::testing::Message() << static_cast<int>(kind) << " at " << operation);
      fired += LyingWrite({.kind = kind}, operation, /*commit=*/true) ? 1 : 0;
    }
    EXPECT_EQ(fired, kBlocks + 2 + 2) << "blocks, two tables, two records";
  }
}

TEST(VolumeFault, OneMisdirectedWriteIsAnErrorOrWithoutEffect) {
  int writes = 0;
  for (uint64_t operation = 0; operation < 20; ++operation) {
    WriteFault fault = {.kind = WriteFault::Kind::kMisdirected};
    if (!LyingWrite(fault, operation, /*commit=*/true)) continue;  // a flush
    ++writes;
    for (fault.path = 0; fault.path < 2; ++fault.path) {
      for (fault.offset_bytes = 0; fault.offset_bytes < kPathBytes; fault.offset_bytes += 4096) {
        for (const bool commit : {false, true}) {
          SCOPED_TRACE(::testing::Message()
                       << "write " << operation << " to path " << fault.path << " offset "
                       << fault.offset_bytes << " commit " << commit);
          LyingWrite(fault, operation, commit);
        }
      }
    }
  }
  EXPECT_EQ(writes, kBlocks + 2 + 2) << "blocks, two tables, two records";
}

// The faults above with a protection off: nothing notices them.
TEST(VolumeFault, WithoutChecksumsALostWriteIsSilent) {
  for (const bool protected_by_checksum : {true, false}) {
    World world;
    world.protections.checksum = protected_by_checksum;
    ASSERT_OK_AND_ASSIGN(const auto volume, world.AtStepOne());
    world.disk.FaultWrite(0, {.kind = WriteFault::Kind::kLost});
    ASSERT_OK(CommitStep(*volume, world.disk, 2));
    ASSERT_TRUE(world.disk.fault_fired());
    const BlockState block = ReadBlock(*volume, world.disk, ExtentId{0});
    EXPECT_FALSE(block.bytes_right);
    EXPECT_EQ(block.status.ok(), !protected_by_checksum);
  }
}

TEST(VolumeFault, WithoutTwoSlotsAPowerCutLeavesAMix) {
  for (const bool two_slots : {true, false}) {
    int damaged = 0;
    bool reached = true;
    for (uint64_t cut = 0; reached; ++cut) {
      World world;
      world.protections.two_slots = two_slots;
      {
        ASSERT_OK_AND_ASSIGN(const auto volume, world.AtStepOne());
        world.disk.set_cut_fate(CutFate::kKeepAll, 0);
        world.disk.CutPowerBefore(cut);
        CommitStep(*volume, world.disk, 2).IgnoreError();
        reached = world.disk.power_was_cut();
      }
      world.disk.CutPowerNow();
      world.disk.RestorePower();
      ASSERT_OK_AND_ASSIGN(const auto volume, world.Open(OpenMode::kRecover));
      for (const ExtentId extent : volume->extents()) {
        damaged += ReadBlock(*volume, world.disk, extent).bytes_right ? 0 : 1;
      }
    }
    EXPECT_EQ(damaged > 0, !two_slots) << damaged;
  }
}

}  // namespace
}  // namespace forebay::nvme
