// SPDX-License-Identifier: Apache-2.0
// Goal    A block that is evicted from DRAM and loaded again has the same bytes. In between, its place in the arena has neither
//         less nor more memory than it must. No error loses bytes: after a failed write the block is in DRAM; after a failed
//         read or a wrong checksum its memory is free again and its slot is unchanged. A saved block stays in DRAM, and is
//         restored on request.
// Method  Real workers and real swap files run below an engine that makes a transfer fail. The test acts as the daemon's loop.

#include "daemon/exec/block_mover.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/exec/block_tasks.h"
#include "gtest/gtest.h"
#include "nvme/checksum.h"
#include "nvme/io/engine_factory.h"
#include "nvme/slot_map.h"
#include "protocol/error.h"
#include "tests/support/daemon_process.h"
#include "tests/support/fault_engine.h"
#include "tests/support/pattern.h"
#include "tests/support/status_test.h"

namespace forebay::daemon {
namespace {

using protocol::ErrorId;
using testing::HasError;
using testing::Pattern;

constexpr uint64_t kBlockBytes = 64 << 10;
constexpr uint64_t kBlocks = 4;
constexpr uint64_t kMoved = 2;
constexpr uint64_t kWakeToken = 1;

class BlockMoverTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(nvme::ChosenEngine chosen, nvme::CreateIoEngine());
    inner_ = std::move(chosen.engine);
    engine_ = std::make_unique<testing::FaultEngine>(*inner_);
    ASSERT_OK_AND_ASSIGN(runner_, TaskRunner::Create({.update = {.threads = 2}}));
    const ArenaPolicy arenas{.lock = pinned_mem::LockPolicy::kBestEffort};
    ASSERT_OK_AND_ASSIGN(
        swap_, SwapSpace::Open({.paths = {{.path = dir_.Make("swap"), .capacity_bytes = 8 << 20}},
                                .staging_slots = 3,
                                .staging_slot_bytes = kBlockBytes,
                                .arenas = arenas},
                               *engine_));
    ASSERT_OK(engine_->WatchEventFd(runner_->wake_fd(), kWakeToken));
    nvme::SlotMap free = swap_->free_slots();
    slot_ = free.Allocate(1, kBlockBytes)->front();
    pinned_mem::ArenaOptions options = arenas.Shared("state", kBlocks * kBlockBytes);
    options.parts.emplace();
    options.parts->push_back({.offset_bytes = 0, .size_bytes = kBlocks * kBlockBytes});
    ASSERT_OK_AND_ASSIGN(arena_, pinned_mem::PinnedArena::Create(options));
    for (uint64_t block = 0; block < kBlocks; ++block) {
      std::ranges::copy(Pattern(kBlockBytes, block), BytesOf(block).begin());
    }
    mover_ = std::make_unique<BlockMover>(
        *runner_, swap_.get(), [this](std::vector<SwapDone>& done) { EndTransfers(done); },
        [this](TaskDone done) { done_ = std::move(done); });
  }

  std::span<std::byte> BytesOf(uint64_t block) {
    return arena_->bytes().subspan(block * kBlockBytes, kBlockBytes);
  }
  void EndTransfers(std::vector<SwapDone>& done) {
    for (const SwapDone& one : done) EXPECT_TRUE(mover_->OnTransferred(one, one.start_ns + 1));
  }
  // Runs the loop until the move has ended, for at most 60 s.
  TaskDone RunUntilDone() {
    done_.reset();
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!done_ && std::chrono::steady_clock::now() < end) {
      std::vector<nvme::Completion> completions(16);
      const auto count = engine_->Wait(std::chrono::seconds(1), completions);
      EXPECT_OK(count);
      for (size_t i = 0; i < count.value_or(0); ++i) {
        std::vector<SwapDone> transfers;
        if (nvme::Volume::Owns(completions[i].token)) {
          swap_->OnCompletion(completions[i], transfers);
        }
        EndTransfers(transfers);
      }
      runner_->RunFinished();
    }
    EXPECT_TRUE(done_.has_value()) << "the move never ends";
    return done_.value_or(TaskDone{});
  }
  TaskDone Evict() {
    mover_->Evict({.task = 5, .job = 1, .place = place(), .bytes = kBlockBytes, .identity = kOwner},
                  arena_);
    return RunUntilDone();
  }
  TaskDone Promote(uint64_t checksum) {
    mover_->Promote({.task = 6,
                     .job = 1,
                     .place = place(),
                     .bytes = kBlockBytes,
                     .identity = kOwner,
                     .checksum = checksum},
                    arena_);
    return RunUntilDone();
  }
  TaskDone Save() {
    mover_->Save({.task = 8,
                  .job = 1,
                  .identity = kOwner,
                  .offset_bytes = kMoved * kBlockBytes,
                  .bytes = kBlockBytes,
                  .slot = slot_},
                 arena_);
    return RunUntilDone();
  }
  TaskDone Restore(uint64_t checksum) {
    mover_->Load(RestorePart{.task = 9,
                             .job = 1,
                             .identity = kOwner,
                             .checksum = checksum,
                             .offset_bytes = kMoved * kBlockBytes,
                             .bytes = kBlockBytes,
                             .slot = slot_},
                 arena_);
    return RunUntilDone();
  }
  BlockPlace place() const {
    return {.resident = true, .state_offset_bytes = kMoved * kBlockBytes, .slot = slot_};
  }
  // Expects memory for `blocks` blocks in the arena, and the right bytes in every block that has memory.
  void ExpectResident(uint64_t blocks) {
    EXPECT_EQ(arena_->allocated_bytes(), blocks * kBlockBytes);
    EXPECT_EQ(arena_->populated_bytes(), blocks * kBlockBytes);
    for (uint64_t block = 0; block < kBlocks; ++block) {
      if (block == kMoved && blocks < kBlocks) continue;
      EXPECT_TRUE(std::ranges::equal(BytesOf(block), Pattern(kBlockBytes, block))) << block;
    }
  }

  static constexpr BlockIdentity kOwner = {.job = 1, .block = kMoved, .written_step = 3};
  const testing::TempDir dir_;
  std::unique_ptr<nvme::IoEngine> inner_;
  std::unique_ptr<testing::FaultEngine> engine_;
  std::unique_ptr<TaskRunner> runner_;
  std::unique_ptr<SwapSpace> swap_;
  nvme::Slot slot_;
  ArenaRegistry::Arena arena_;
  std::unique_ptr<BlockMover> mover_;
  std::optional<TaskDone> done_;
};

TEST_F(BlockMoverTest, ABlockLeavesAndComesBackWithItsBytes) {
  ExpectResident(kBlocks);
  const TaskDone evicted = Evict();
  EXPECT_OK(evicted.status);
  EXPECT_EQ(evicted.task, 5U);
  ExpectResident(kBlocks - 1);
  const TaskDone promoted = Promote(evicted.checksum);
  EXPECT_OK(promoted.status);
  EXPECT_EQ(promoted.task, 6U);
  ExpectResident(kBlocks);
}

TEST_F(BlockMoverTest, AFailedWriteLeavesTheBlockInDram) {
  engine_->SetFault({.operation = 0, .count = testing::IoFault::kForEver, .error_number = ENOSPC});
  EXPECT_THAT(Evict().status, HasError(ErrorId::kSwapIo));
  EXPECT_GT(engine_->fired(), 0U);
  ExpectResident(kBlocks);
}

TEST_F(BlockMoverTest, AFailedReadLeavesTheBlockOnSwap) {
  const uint64_t checksum = Evict().checksum;
  engine_->SetFault({.operation = 0, .count = testing::IoFault::kForEver, .error_number = EIO});
  EXPECT_THAT(Promote(checksum).status, HasError(ErrorId::kSwapIo));
  ExpectResident(kBlocks - 1);
  engine_->ClearFault();
  EXPECT_OK(Promote(checksum).status);
  ExpectResident(kBlocks);
}

TEST_F(BlockMoverTest, BytesThatAreNotTheBlocksStayOnSwap) {
  const uint64_t checksum = Evict().checksum;
  const absl::Status status = Promote(checksum + 1).status;
  EXPECT_THAT(status, HasError(ErrorId::kCorrupt));
  ExpectResident(kBlocks - 1);
  EXPECT_OK(Promote(checksum).status);
  ExpectResident(kBlocks);
}

TEST_F(BlockMoverTest, ABlockWithoutASlotIsZeros) {
  const uint64_t checksum = Evict().checksum;
  PromoteBlock zeros{.task = 7,
                     .job = 1,
                     .place = place(),
                     .bytes = kBlockBytes,
                     .identity = {.job = 1, .block = kMoved}};
  zeros.place.slot.reset();
  mover_->Promote(zeros, arena_);
  EXPECT_OK(RunUntilDone().status);
  EXPECT_EQ(arena_->allocated_bytes(), kBlocks * kBlockBytes);
  EXPECT_TRUE(std::ranges::all_of(BytesOf(kMoved), [](std::byte b) { return b == std::byte{0}; }));
  EXPECT_NE(checksum, 0U);
}

TEST_F(BlockMoverTest, APartIsSavedAndRestoredAndStaysInMemory) {
  const uint64_t written = swap_->stats().paths[0].written_bytes;
  const TaskDone saved = Save();
  EXPECT_OK(saved.status);
  EXPECT_EQ(saved.task, 8U);
  EXPECT_GT(saved.begin_ns, 0U);
  EXPECT_EQ(saved.checksum, nvme::Checksum(MakeIdentity(kOwner, swap_->nonce()), BytesOf(kMoved)));
  ExpectResident(kBlocks);
  EXPECT_EQ(swap_->stats().paths[0].written_bytes - written, kBlockBytes) << "not counted";
  std::ranges::fill(BytesOf(kMoved), std::byte{0});
  const TaskDone restored = Restore(saved.checksum);
  EXPECT_OK(restored.status);
  EXPECT_EQ(restored.task, 9U);
  ExpectResident(kBlocks);
}

TEST_F(BlockMoverTest, AFailedSaveOrRestoreIsAnErrorAndFreesNothing) {
  engine_->SetFault({.operation = 0, .count = testing::IoFault::kForEver, .error_number = ENOSPC});
  EXPECT_THAT(Save().status, HasError(ErrorId::kSwapIo));
  EXPECT_GT(engine_->fired(), 0U);
  engine_->ClearFault();
  const uint64_t checksum = Save().checksum;
  EXPECT_THAT(Restore(checksum + 1).status, HasError(ErrorId::kCorrupt));
  engine_->SetFault({.operation = 0, .count = testing::IoFault::kForEver, .error_number = EIO});
  EXPECT_THAT(Restore(checksum).status, HasError(ErrorId::kSwapIo));
  engine_->ClearFault();
  EXPECT_OK(Restore(checksum).status);
  ExpectResident(kBlocks);
}

}  // namespace
}  // namespace forebay::daemon
