// SPDX-License-Identifier: Apache-2.0
// Goal    Three blocks on two paths are together at the old step or at the new step, after any power cut and any failing or
//         short transfer. A lost, torn or misdirected write is noticed: the read returns the right bytes, or an error that
//         names path, offset and identity. Steps never mix, and no fault is silent.
// Method  Faults are enumerated: before or at operation 0, 1, 2, ... of the steps, until they end
//         without meeting the fault; the number of cut points must be the disk's own count. The
//         disk is simulated: its cache is lost, persisted, reordered or torn by sector at a cut.

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

namespace forebay::nvme::volume_fault_test {
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
constexpr uint64_t kOperationsMax = 500;  // far above the operations of a test

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
  options.ledger_bytes_max = 4096;
  return options;
}

// A volume on two simulated paths, over an engine that fails on request.
struct World {
  World() : disk({.paths = 2, .capacity_bytes = kPathBytes}), faults(disk) {}

  absl::StatusOr<std::unique_ptr<Volume>> Open(OpenMode mode) {
    return Volume::OpenForTest(Options(disk, mode), protections, faults, disk);
  }

  // Makes a new volume whose blocks are durable at step 1.
  absl::Status MakeAtStepOne() {
    ASSIGN_OR_RETURN(volume, Open(OpenMode::kReclaim));
    store = std::make_unique<BlockStore>(*volume, faults, kBlocks);
    store->overwrites_in_place = !protections.pins;
    RETURN_IF_ERROR(ZeroNow(*volume, faults, store->slots()));
    return store->CommitStep(1);
  }

  absl::Status Reopen(OpenMode mode) {
    Close();
    ASSIGN_OR_RETURN(volume, Open(mode));
    store = std::make_unique<BlockStore>(*volume, faults, kBlocks);
    store->overwrites_in_place = !protections.pins;
    return absl::OkStatus();
  }

  void Close() {
    store.reset();
    volume.reset();
  }

  SimulatedDisk disk;
  FaultEngine faults;
  internal::Protections protections;
  std::unique_ptr<Volume> volume;
  std::unique_ptr<BlockStore> store;
};

// Reopens the volume. Returns the step of all its blocks, 0 for a volume without blocks. Fails the test on a mix of steps, an
// error, or wrong bytes.
uint32_t StepAfterReopening(World& world) {
  const absl::Status opened = world.Reopen(OpenMode::kRecover);
  EXPECT_OK(opened);
  if (!opened.ok()) return ~0u;
  if (world.volume->durable_sequence() == 0) return 0;
  EXPECT_EQ(world.store->entries().size(), kBlocks);
  uint32_t step = 0;
  for (uint32_t i = 0; i < world.store->entries().size(); ++i) {
    const BlockState block = world.store->Read(i);
    EXPECT_OK(block.status);
    EXPECT_TRUE(block.bytes_right);
    if (step != 0) {
      EXPECT_EQ(block.step, step) << "a mix of steps";
    }
    step = block.step;
  }
  return step;
}

// Commits steps 2 to `last`, until a commit fails. Returns the last acknowledged step, 1 if none was.
uint32_t CommitStepsTo(uint32_t last, BlockStore& store) {
  for (uint32_t step = 2; step <= last; ++step) {
    if (!store.CommitStep(step).ok()) return step - 1;
  }
  return last;
}

// Cuts the power before each operation of steps 2 to 4, one cut per run. Expects as many cut points as the disk counts
// operations.
void CutEverywhere(Fate fate, ExecutionOrder order) {
  constexpr uint32_t kLast = 4;
  uint64_t operations = 0;
  {
    World world;
    world.disk.set_order(order);
    ASSERT_OK(world.MakeAtStepOne());
    const uint64_t before = world.disk.operations();
    ASSERT_EQ(CommitStepsTo(kLast, *world.store), kLast);
    operations = world.disk.operations() - before;
  }
  uint64_t cuts = 0;
  for (; cuts < kOperationsMax; ++cuts) {
    SCOPED_TRACE(::testing::Message() << "power cut before operation " << cuts << ", fate "
                                      << static_cast<int>(fate.kind) << " seed " << fate.seed);
    World world;
    world.disk.set_order(order);
    ASSERT_OK(world.MakeAtStepOne());
    world.disk.set_cut_fate(fate.kind, fate.seed + 1000 * cuts);
    world.disk.CutPowerBefore(cuts);
    const uint32_t acknowledged = CommitStepsTo(kLast, *world.store);
    world.Close();
    if (!world.disk.power_was_cut()) break;
    world.disk.RestorePower();
    const uint32_t step = StepAfterReopening(world);
    EXPECT_GE(step, acknowledged);
    EXPECT_LE(step, acknowledged + 1);
    // The reopened volume accepts another commit.
    ASSERT_OK(world.store->CommitStep(9));
    world.disk.CutPowerNow();
  }
  EXPECT_EQ(cuts, operations) << "the cut points are not the operations of the disk";
  EXPECT_GE(operations, 3 * (kBlocks + 2 + 4 + 2)) << "blocks, flushes, ledger and record, flushes";
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
      // The paths hold an older volume with a commit; a new volume replaces it.
      ASSERT_OK(world.MakeAtStepOne());
      ASSERT_OK(world.store->Commit());  // uses the second record place too
      world.Close();
      world.disk.set_cut_fate(fate.kind, fate.seed + 1000 * cut);
      world.disk.CutPowerBefore(cut);
      const bool opened = world.Reopen(OpenMode::kReclaim).ok();
      if (opened && ZeroNow(*world.volume, world.faults, world.store->slots()).ok()) {
        world.store->CommitStep(2).IgnoreError();
      }
      reached = world.disk.power_was_cut();
      world.Close();
      world.disk.CutPowerNow();
      world.disk.RestorePower();
      if (opened) {
        const uint32_t step = StepAfterReopening(world);
        EXPECT_TRUE(step == 0 || step == 2) << step;
        EXPECT_TRUE(reached || step == 2);
        continue;
      }
      const absl::Status recovered = world.Reopen(OpenMode::kRecover);
      if (!recovered.ok()) {
        EXPECT_THAT(recovered, HasError(protocol::ErrorId::kSwapPath));
      } else if (world.volume->durable_sequence() > 0) {
        // The old volume: no commit of the new one was acknowledged.
        EXPECT_EQ(world.volume->durable_sequence(), 2u);
      }
    }
  }
}

// Injects one fault at each operation of step 2, with and without a power cut afterwards, and reopens the volume.
void FaultEverywhere(IoFault fault, const char* what) {
  for (const bool cut : {false, true}) {
    bool fired = true;
    for (uint64_t operation = 0; fired; ++operation) {
      ASSERT_LT(operation, kOperationsMax);
      SCOPED_TRACE(::testing::Message() << what << " at operation " << operation << ", error "
                                        << fault.error_number << ", bytes " << fault.short_bytes
                                        << ", count " << fault.count << ", cut " << cut);
      World world;
      ASSERT_OK(world.MakeAtStepOne());
      fault.operation = operation;
      world.faults.SetFault(fault);
      const absl::Status status = world.store->CommitStep(2);
      fired = world.faults.operations() > operation;
      world.faults.ClearFault();
      if (!status.ok()) {
        EXPECT_THAT(status, HasError(protocol::ErrorId::kSwapIo));
        EXPECT_THAT(status.message(), HasSubstr("/simulated/"));
      }
      world.Close();
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
      ASSERT_OK(world.MakeAtStepOne());
      world.faults.SetFault({.operation = operation, .error_number = error});
      EXPECT_OK(world.store->CommitStep(2));
      EXPECT_EQ(world.faults.fired(), 1u);
      const VolumeStats stats = world.volume->stats();
      EXPECT_EQ(stats.paths[0].retries + stats.paths[1].retries, 1u);
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
      ASSERT_OK(world.MakeAtStepOne());
      IoFault fault = kind;
      fault.count = count;
      world.faults.SetFault(fault);
      const BlockState block = world.store->Read(1);
      if (block.status.ok()) {
        EXPECT_TRUE(block.bytes_right);
      } else {
        EXPECT_EQ(count, IoFault::kForEver);
        EXPECT_THAT(block.status, HasError(protocol::ErrorId::kSwapIo));
        const Slot& slot = world.store->entries()[1].slot;
        EXPECT_THAT(block.status.message(),
                    HasSubstr("read at offset " + std::to_string(slot.offset_bytes)));
      }
      EXPECT_EQ(world.volume->requests_in_flight(), 0u);
    }
  }
}

// After a failure at any operation, the same open volume commits the step on the next attempt.
TEST(VolumeFault, AfterAFailureTheStepCanBeCommittedAgain) {
  for (const uint64_t count : {1u, 3u, 9u}) {
    bool fired = true;
    for (uint64_t operation = 0; fired; ++operation) {
      ASSERT_LT(operation, kOperationsMax);
      SCOPED_TRACE(::testing::Message() << count << " failures from operation " << operation);
      World world;
      ASSERT_OK(world.MakeAtStepOne());
      world.faults.SetFault({.operation = operation, .count = count, .error_number = EIO});
      const absl::Status status = world.store->CommitStep(2);
      fired = world.faults.operations() > operation;
      world.faults.ClearFault();
      if (!status.ok()) {
        EXPECT_OK(world.store->CommitStep(2));
      }
      EXPECT_OK(world.store->Commit()) << "nothing it names is in doubt";
      world.Close();
      world.disk.CutPowerNow();
      world.disk.RestorePower();
      EXPECT_EQ(StepAfterReopening(world), 2u);
    }
  }
}

// A failed commit may still be durable: neither its slots nor the slots of the older commit are free.
TEST(VolumeFault, AfterACommitOfUnknownOutcomeNoSlotItMayNameIsOverwritten) {
  constexpr uint64_t kLedgerWrites = kBlocks + 2;  // blocks, flushes
  for (uint64_t operation = kLedgerWrites; operation < kLedgerWrites + 6; ++operation) {
    for (const Fate& fate : AllFates()) {
      SCOPED_TRACE(::testing::Message() << "operation " << operation << " fails, fate "
                                        << static_cast<int>(fate.kind) << " seed " << fate.seed);
      World world;
      ASSERT_OK(world.MakeAtStepOne());
      const std::vector<BlockStore::Entry> older = world.store->entries();
      world.faults.SetFault({.operation = operation, .count = 9, .error_number = EIO});
      ASSERT_THAT(world.store->CommitStep(2), HasError(protocol::ErrorId::kSwapIo));
      world.faults.ClearFault();
      const Bytes next = ContentOf(0, 3);
      for (const Slot& slot : {older[0].slot, world.store->entries()[0].slot}) {
        EXPECT_THAT(world.volume->Write(slot, next, /*token=*/1),
                    ::forebay::testing::HasCode(absl::StatusCode::kFailedPrecondition));
      }
      world.disk.set_cut_fate(fate.kind, fate.seed);
      world.Close();
      world.disk.CutPowerNow();
      world.disk.RestorePower();
      const uint32_t step = StepAfterReopening(world);
      EXPECT_TRUE(step == 1 || step == 2) << step;
    }
  }
}

// The simulated error acts like a real fsync error: the kernel drops the pages, and the next fsync succeeds.
TEST(VolumeFault, WhatAFailedFlushDroppedIsWrittenAgainBeforeACommitSucceeds) {
  int failures = 0;
  for (uint64_t operation = 0; operation < 20; ++operation) {
    SCOPED_TRACE(::testing::Message() << "flush fails at operation " << operation);
    World world;
    ASSERT_OK(world.MakeAtStepOne());
    world.disk.FailFlush(operation);
    if (!world.store->CommitStep(2).ok()) {
      ++failures;
      const VolumeStats stats = world.volume->stats();
      EXPECT_TRUE(stats.paths[0].flush_failed || stats.paths[1].flush_failed);
      if (operation < kBlocks + 2) {  // a data flush failed: its blocks are doubted
        EXPECT_GT(world.volume->Doubted().size(), 0u);
        EXPECT_THAT(world.store->Commit(),
                    ::forebay::testing::HasCode(absl::StatusCode::kFailedPrecondition));
      }
      EXPECT_OK(world.store->CommitStep(2));
    }
    world.Close();
    world.disk.CutPowerNow();
    world.disk.RestorePower();
    EXPECT_EQ(StepAfterReopening(world), 2u);
  }
  EXPECT_EQ(failures, 4) << "two flushes each of data and of the ledger";
}

// Writes a step in which one write falsely reports success, cuts the power and reopens the volume. Returns true if the fault
// hit a write.
bool LyingWrite(WriteFault fault, uint64_t operation, bool commit) {
  World world;
  EXPECT_OK(world.MakeAtStepOne());
  world.disk.FaultWrite(operation, fault);
  EXPECT_OK(commit ? world.store->CommitStep(2) : world.store->WriteStep(2));
  const bool fired = world.disk.fault_fired();
  world.Close();
  world.disk.set_cut_fate(CutFate::kKeepAll, 0);
  world.disk.CutPowerNow();
  world.disk.RestorePower();
  const absl::Status opened = world.Reopen(OpenMode::kRecover);
  EXPECT_OK(opened);
  if (!opened.ok()) return fired;
  EXPECT_EQ(world.store->entries().size(), kBlocks);
  uint32_t step = 0;
  for (uint32_t block = 0; block < kBlocks; ++block) {
    const BlockState state = world.store->Read(block);
    EXPECT_TRUE(step == 0 || state.step == step) << "a mix of steps";
    step = state.step;
    EXPECT_EQ(state.status.ok(), state.bytes_right) << "silence, or a false alarm";
    if (state.status.ok()) continue;
    EXPECT_THAT(state.status, HasError(protocol::ErrorId::kCorrupt));
    EXPECT_THAT(state.status.message(), HasSubstr("/simulated/"));
    const Slot& slot = world.store->entries()[block].slot;
    EXPECT_THAT(state.status.message(),
                HasSubstr("offset " + std::to_string(slot.offset_bytes) + " "));
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
    EXPECT_EQ(fired, kBlocks + 2 + 2) << "blocks, two ledgers, two records";
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
  EXPECT_EQ(writes, kBlocks + 2 + 2) << "blocks, two ledgers, two records";
}

// Without checksums a lost write goes unnoticed.
TEST(VolumeFault, WithoutChecksumsALostWriteIsSilent) {
  for (const bool verified : {true, false}) {
    World world;
    ASSERT_OK(world.MakeAtStepOne());
    world.disk.FaultWrite(0, {.kind = WriteFault::Kind::kLost});
    ASSERT_OK(world.store->CommitStep(2));
    ASSERT_TRUE(world.disk.fault_fired());
    const BlockState block = world.store->Read(0, verified);
    EXPECT_FALSE(block.bytes_right);
    EXPECT_EQ(block.status.ok(), !verified);
  }
}

TEST(VolumeFault, WithoutPinnedSlotsAPowerCutLeavesAMix) {
  for (const bool pins : {true, false}) {
    int damaged = 0;
    bool reached = true;
    for (uint64_t cut = 0; reached; ++cut) {
      ASSERT_LT(cut, kOperationsMax);
      World world;
      world.protections.pins = pins;
      ASSERT_OK(world.MakeAtStepOne());
      world.disk.set_cut_fate(CutFate::kKeepAll, 0);
      world.disk.CutPowerBefore(cut);
      world.store->CommitStep(2).IgnoreError();
      reached = world.disk.power_was_cut();
      world.Close();
      world.disk.CutPowerNow();
      world.disk.RestorePower();
      ASSERT_OK(world.Reopen(OpenMode::kRecover));
      for (uint32_t block = 0; block < world.store->entries().size(); ++block) {
        damaged += world.store->Read(block).bytes_right ? 0 : 1;
      }
    }
    EXPECT_EQ(damaged > 0, !pins) << damaged;
  }
}

// The previous ledger stays intact: its slots are pinned as long as recovery may need it.
TEST(VolumeFault, ADamagedNewestLedgerLeavesTheOneBefore) {
  World world;
  ASSERT_OK(world.MakeAtStepOne());
  ASSERT_OK(world.store->CommitStep(2));
  ASSERT_OK(world.store->CommitStep(3));
  ASSERT_OK(world.store->WriteStep(4));
  world.disk.set_cut_fate(CutFate::kKeepAll, 0);
  world.Close();
  world.disk.CutPowerNow();
  world.disk.RestorePower();
  ASSERT_EQ(StepAfterReopening(world), 3u);
  world.Close();
  // The ledgers of sequences 1 and 3 lie in area 0: page 3 of the head, and 5 pages before the end of the tail.
  const Bytes junk = ::forebay::testing::Pattern(4096, /*seed=*/5);
  world.disk.Overwrite(0, 3 * 4096, junk);
  world.disk.Overwrite(1, kPathBytes - 5 * 4096, junk);
  EXPECT_EQ(StepAfterReopening(world), 2u);
  EXPECT_TRUE(world.volume->recovery().fell_back);
  EXPECT_EQ(world.volume->recovery().damaged_ledgers, 2u);
}

// If both copies of a record are damaged, recovery cannot know whether that record was the newest.
TEST(VolumeFault, ARecordWithoutAWholeCopyMayHaveBeenTheNewest) {
  for (const uint64_t record : {uint64_t{0}, uint64_t{1}}) {
    for (const bool zeros : {false, true}) {
      World world;
      ASSERT_OK(world.MakeAtStepOne());
      ASSERT_OK(world.store->CommitStep(2));
      ASSERT_OK(world.store->CommitStep(3));
      world.Close();
      Bytes junk = ::forebay::testing::Pattern(4096, /*seed=*/5);
      if (zeros) std::fill(junk.begin(), junk.end(), std::byte{0});
      world.disk.Overwrite(0, (1 + record) * 4096, junk);
      EXPECT_EQ(StepAfterReopening(world), 3u);
      EXPECT_FALSE(world.volume->recovery().fell_back) << "one copy is enough";
      EXPECT_EQ(world.volume->recovery().damaged_records, 1u);
      world.Close();
      world.disk.Overwrite(1, kPathBytes - (3 - record) * 4096, junk);
      // Record 0 holds sequences 1 and 3, record 1 sequence 2.
      EXPECT_EQ(StepAfterReopening(world), record == 0 ? 2u : 3u);
      EXPECT_TRUE(world.volume->recovery().fell_back);
      EXPECT_EQ(world.volume->recovery().damaged_records, 2u);
    }
  }
}

}  // namespace
}  // namespace forebay::nvme::volume_fault_test
