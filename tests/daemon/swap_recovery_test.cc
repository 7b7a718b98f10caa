// SPDX-License-Identifier: Apache-2.0
// Goal    Committed jobs return with the next opening, with the checksums of their slots. A volume that may have durable jobs
//         is never replaced by a new one unasked. A volume that was last used elsewhere is refused until it is adopted. A slot
//         that no ledger names any more can be written.
// Method  Real swap files, invented jobs and machines; the test is the loop. Ledgers are damaged on the disk, transfers
//         fail, folders are renamed, files copied.

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/exec/block_tasks.h"
#include "daemon/exec/recovery/ledger_codec.h"
#include "daemon/exec/swap_space.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nvme/internal/disk_format.h"
#include "nvme/io/engine_factory.h"
#include "protocol/error.h"
#include "protocol/os/unique_fd.h"
#include "tests/support/daemon_process.h"
#include "tests/support/durable_jobs.h"
#include "tests/support/durable_run.h"
#include "tests/support/fault_engine.h"
#include "tests/support/pattern.h"
#include "tests/support/status_test.h"

namespace forebay::daemon {
namespace {

using protocol::ErrorId;
using testing::ExpectEqual;
using testing::HasCode;
using testing::HasError;
using ::testing::HasSubstr;
using testing::Pattern;

constexpr uint64_t kPathBytes = 8 << 20;
constexpr uint64_t kLedgerBytes = 64 << 10;
constexpr uint64_t kSlotsBegin = 1 << 20;
constexpr uint64_t kStagingSlotBytes = 64 << 10;

class SwapRecoveryTest : public ::testing::Test {
 protected:
  SwapSpaceOptions Options() const {
    return {.paths = {{.path = a_, .capacity_bytes = kPathBytes},
                      {.path = b_, .capacity_bytes = kPathBytes}},
            .mode = nvme::OpenMode::kRecover,
            .ledger_bytes_max = kLedgerBytes,
            .staging_slots = 4,
            .staging_slot_bytes = kStagingSlotBytes,
            .arenas = {.lock = pinned_mem::LockPolicy::kBestEffort}};
  }
  // Opens a swap space in place of the previous one.
  absl::Status Open(const SwapSpaceOptions& options) {
    swap_.reset();
    engine_.reset();
    ASSIGN_OR_RETURN(nvme::ChosenEngine chosen, nvme::CreateIoEngine());
    inner_ = std::move(chosen.engine);
    engine_ = std::make_unique<testing::FaultEngine>(*inner_);
    ASSIGN_OR_RETURN(swap_, SwapSpace::Open(options, *engine_));
    return absl::OkStatus();
  }
  void TearDown() override { swap_.reset(); }

  SwapDone WaitFor(std::vector<SwapDone> done) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (done.empty() && std::chrono::steady_clock::now() < end) {
      std::array<nvme::Completion, 16> completions;
      const auto count = engine_->Wait(std::chrono::seconds(1), completions);
      EXPECT_OK(count);
      for (size_t i = 0; i < count.value_or(0); ++i) swap_->OnCompletion(completions[i], done);
    }
    EXPECT_EQ(done.size(), 1U);
    return done.empty() ? SwapDone{} : done[0];
  }
  absl::Status CommitBytes(std::span<const std::byte> ledger, std::span<const nvme::Slot> slots) {
    std::vector<SwapDone> done;
    swap_->CommitLedger(/*task=*/5, ledger, slots, done);
    const SwapDone committed = WaitFor(std::move(done));
    EXPECT_EQ(committed.task, 5U);
    EXPECT_EQ(committed.kind, SwapDone::Kind::kCommitted);
    return committed.status;
  }
  absl::Status Commit(const DurableNode& node) {
    ASSIGN_OR_RETURN(const auto ledger, EncodeLedger(node, swap_->nonce(), swap_->place()));
    return CommitBytes(ledger, SlotsOf(node));
  }
  // Commits a ledger without a place, as older programs wrote it.
  absl::Status CommitWithoutPlace(const DurableNode& node) {
    ASSIGN_OR_RETURN(const auto ledger, EncodeLedger(node, swap_->nonce()));
    return CommitBytes(ledger, SlotsOf(node));
  }
  // Expects that the volume holds `node` and can be adopted, and that it then belongs to its new place.
  void ExpectAdopted(SwapSpaceOptions options, const DurableNode& node) {
    options.other_place = OtherPlace::kAdopted;
    ASSERT_OK(Open(options));
    EXPECT_FALSE(swap_->adopted().empty());
    ExpectEqual(swap_->recovered(), node);
    options.other_place = OtherPlace::kRefused;
    ASSERT_OK(Open(options));
    EXPECT_TRUE(swap_->adopted().empty());
    ExpectEqual(swap_->recovered(), node);
  }
  void ExpectRefused(const SwapSpaceOptions& options, const std::string& why) {
    swap_.reset();
    const auto before = ReadAll(options);
    const absl::Status refused = Open(options);
    EXPECT_THAT(refused, HasError(ErrorId::kSwapPath));
    EXPECT_THAT(std::string(refused.message()), HasSubstr(why));
    EXPECT_THAT(protocol::FormatError(refused), HasSubstr("forebayd --adopt"));
    EXPECT_EQ(ReadAll(options), before) << "written";
  }
  static std::vector<testing::FileBytes> ReadAll(const SwapSpaceOptions& options) {
    std::vector<testing::FileBytes> files;
    for (const nvme::PathOptions& path : options.paths) {
      files.push_back(testing::ReadFile(path.path + "/forebay.swap"));
    }
    return files;
  }
  absl::Status Write(const nvme::Slot& slot, std::span<std::byte> bytes) {
    std::vector<SwapDone> done;
    swap_->StartWrite({.task = 6, .job = 1, .slot = slot, .bytes = bytes}, /*pause=*/false, done);
    return WaitFor(std::move(done)).status;
  }

  const testing::TempDir dir_;
  const std::string a_ = dir_.Make("a");
  const std::string b_ = dir_.Make("b");
  std::unique_ptr<nvme::IoEngine> inner_;
  std::unique_ptr<testing::FaultEngine> engine_;
  std::unique_ptr<SwapSpace> swap_;
};

TEST_F(SwapRecoveryTest, PathsWithoutALedgerAreMadeAnew) {
  ASSERT_OK(Open(Options()));
  EXPECT_TRUE(swap_->recovered().jobs.empty());
  const uint64_t nonce = swap_->nonce();
  SwapSpaceOptions other = Options();
  other.paths[0].capacity_bytes *= 2;
  other.ledger_bytes_max *= 2;
  ASSERT_OK(Open(other));
  EXPECT_TRUE(swap_->recovered().jobs.empty());
  EXPECT_NE(swap_->nonce(), nonce);
  EXPECT_EQ(swap_->ledger_bytes_max(), 2 * kLedgerBytes - LedgerBytes(swap_->place()));
}

TEST_F(SwapRecoveryTest, CommittedJobsComeBack) {
  ASSERT_OK(Open(Options()));
  const uint64_t free_bytes = swap_->free_slots().free_bytes();
  const uint64_t nonce = swap_->nonce();
  const DurableNode node = testing::MakeDurableNode(kSlotsBegin);
  ASSERT_OK(Commit(node));
  SwapSpaceOptions other = Options();
  other.ledger_bytes_max = 3 * kLedgerBytes;  // Applies to a new volume only.
  for (int opening = 0; opening < 3; ++opening) {
    ASSERT_OK(Open(other));
    ExpectEqual(swap_->recovered(), node);
    EXPECT_EQ(swap_->nonce(), nonce);
    EXPECT_EQ(swap_->ledger_bytes_max(), kLedgerBytes - LedgerBytes(swap_->place()));
    uint64_t named_bytes = 0;
    for (const nvme::Slot& slot : SlotsOf(node)) named_bytes += slot.size_bytes;
    EXPECT_EQ(swap_->free_slots().free_bytes(), free_bytes - named_bytes);
  }
  SwapSpaceOptions reclaim = Options();
  reclaim.mode = nvme::OpenMode::kReclaim;
  ASSERT_OK(Open(reclaim));
  EXPECT_TRUE(swap_->recovered().jobs.empty());
  EXPECT_NE(swap_->nonce(), nonce);
  ASSERT_OK(Open(Options()));
  EXPECT_TRUE(swap_->recovered().jobs.empty());
}

TEST_F(SwapRecoveryTest, WhatASlotHeldIsVerifiedAsBefore) {
  ASSERT_OK(Open(Options()));
  const DurableNode node = testing::MakeDurableNode(kSlotsBegin);
  const nvme::Slot slot = SlotsOf(node)[0];
  const BlockIdentity identity{.job = 1, .written_step = 7};
  auto bytes = Pattern(slot.size_bytes, 3);
  const uint64_t checksum = nvme::Checksum(MakeIdentity(identity, swap_->nonce()), bytes);
  ASSERT_OK(Write(slot, bytes));
  ASSERT_OK(Commit(node));
  ASSERT_OK(Open(Options()));
  std::vector<SwapDone> done;
  const std::span<std::byte> staged = swap_->Slot(0, slot.size_bytes);
  swap_->StartRead({.task = 9, .job = 1, .slot = slot, .bytes = staged}, done);
  ASSERT_OK(WaitFor(std::move(done)).status);
  const BlockPlace place{.resident = false, .slot = slot};
  EXPECT_OK(VerifyBlock(swap_->Expected(place, identity, checksum), identity, staged));
}

TEST_F(SwapRecoveryTest, SlotsOfTheLedgerBeforeAreFree) {
  const DurableNode before = testing::MakeDurableNode(kSlotsBegin);
  const DurableNode node = testing::MakeDurableNode(2 * kSlotsBegin + kSlotsBegin);
  const nvme::Slot old_slot = SlotsOf(before)[0];
  auto bytes = Pattern(old_slot.size_bytes, 3);
  ASSERT_OK(Open(Options()));
  ASSERT_OK(Commit(before));
  ASSERT_OK(Commit(node));
  EXPECT_THAT(Write(old_slot, bytes), HasCode(absl::StatusCode::kFailedPrecondition));
  ASSERT_OK(Open(Options()));
  ExpectEqual(swap_->recovered(), node);
  nvme::SlotMap free = swap_->free_slots();
  EXPECT_TRUE(free.Reserve(old_slot));
  EXPECT_OK(Write(old_slot, bytes));
  EXPECT_THAT(Write(SlotsOf(node)[0], bytes), HasCode(absl::StatusCode::kFailedPrecondition));
}

// The two copies of a commit are on different paths. The daemon dies between writing them, so that the other path still has the
// copy of the commit two before.
TEST_F(SwapRecoveryTest, SlotsOfAnOlderLedgerOfWhichOneCopyIsLeftAreFree) {
  const std::string second = b_ + "/forebay.swap";
  const DurableNode older = testing::MakeDurableNode(kSlotsBegin);
  const DurableNode node = testing::MakeDurableNode(5 * kSlotsBegin);
  const nvme::Slot old_slot = SlotsOf(older)[0];
  auto bytes = Pattern(old_slot.size_bytes, 3);
  ASSERT_OK(Open(Options()));
  ASSERT_OK(Commit(older));
  std::filesystem::copy_file(second, b_ + "/older");
  ASSERT_OK(Commit(testing::MakeDurableNode(3 * kSlotsBegin)));
  ASSERT_OK(Commit(node));
  swap_.reset();
  std::filesystem::copy_file(b_ + "/older", second,
                             std::filesystem::copy_options::overwrite_existing);
  ASSERT_OK(Open(Options()));
  ExpectEqual(swap_->recovered(), node);
  nvme::SlotMap free = swap_->free_slots();
  EXPECT_TRUE(free.Reserve(old_slot));
  EXPECT_OK(Write(old_slot, bytes));
}

// ------------------------------------------------------------------------------- what is refused

TEST_F(SwapRecoveryTest, AVolumeThatIsNotWholeIsRefusedAndStaysAsItIs) {
  ASSERT_OK(Open(Options()));
  const DurableNode node = testing::MakeDurableNode(kSlotsBegin);
  ASSERT_OK(Commit(node));
  SwapSpaceOptions unlinked = Options();
  unlinked.life = nvme::FileLife::kUnlinked;
  EXPECT_THAT(Open(unlinked), HasError(ErrorId::kSwapPath));
  SwapSpaceOptions larger = Options();
  larger.paths[1].capacity_bytes *= 2;
  EXPECT_THAT(Open(larger), HasError(ErrorId::kSwapPath));
  SwapSpaceOptions one_path = Options();
  one_path.paths.pop_back();
  EXPECT_THAT(Open(one_path), HasError(ErrorId::kSwapPath));
  std::filesystem::rename(b_ + "/forebay.swap", b_ + "/moved");
  const absl::Status missing = Open(Options());
  EXPECT_THAT(missing, HasError(ErrorId::kSwapPath));
  EXPECT_THAT(std::string(missing.message()), HasSubstr(b_));
  std::filesystem::rename(b_ + "/moved", b_ + "/forebay.swap");
  ASSERT_OK(Open(Options()));
  ExpectEqual(swap_->recovered(), node);
}

TEST_F(SwapRecoveryTest, ALedgerThatIsNotOneIsRefused) {
  ASSERT_OK(Open(Options()));
  ASSERT_OK(CommitBytes(Pattern(64, 1), {}));
  EXPECT_THAT(Open(Options()), HasError(ErrorId::kCorrupt));
}

TEST_F(SwapRecoveryTest, ALedgerThatNamesOtherSlotsThanItsVolumeIsRefused) {
  ASSERT_OK(Open(Options()));
  const DurableNode node = testing::MakeDurableNode(kSlotsBegin);
  ASSERT_OK_AND_ASSIGN(const auto ledger, EncodeLedger(node, swap_->nonce()));
  std::vector<nvme::Slot> slots = SlotsOf(node);
  slots.pop_back();
  ASSERT_OK(CommitBytes(ledger, slots));
  EXPECT_THAT(Open(Options()), HasError(ErrorId::kCorrupt));
}

TEST_F(SwapRecoveryTest, AFirstCommitThatWasCutShortLeavesNothing) {
  ASSERT_OK(Open(Options()));
  const uint64_t nonce = swap_->nonce();
  ASSERT_OK(Commit(testing::MakeDurableNode(kSlotsBegin)));
  swap_.reset();
  const std::array<uint64_t, 2> capacity_bytes = {kPathBytes, kPathBytes};
  const nvme::internal::Geometry geometry(capacity_bytes, kLedgerBytes);
  for (uint32_t copy = 0; copy < 2; ++copy) {
    const nvme::internal::Place place = geometry.AreaPlace(0, copy);
    const std::string name = (place.path == 0 ? a_ : b_) + "/forebay.swap";
    const protocol::UniqueFd file(::open(name.c_str(), O_WRONLY | O_CLOEXEC));
    ASSERT_EQ(::pwrite(file.get(), "torn", 4, static_cast<off_t>(place.offset_bytes)), 4);
  }
  ASSERT_OK(Open(Options()));
  EXPECT_TRUE(swap_->recovered().jobs.empty());
  EXPECT_NE(swap_->nonce(), nonce);
  ASSERT_OK(Commit(testing::MakeDurableNode(kSlotsBegin)));
}

// ------------------------------------------------------------------------------------ another place

constexpr MachineId kMachine{std::byte{1}};
constexpr MachineId kOtherMachine{std::byte{2}};

TEST_F(SwapRecoveryTest, UnderAnotherPathAVolumeIsRefusedUntilItIsAdopted) {
  const DurableNode node = testing::MakeDurableNode(kSlotsBegin);
  ASSERT_OK(Open(Options()));
  ASSERT_OK(Commit(node));
  SwapSpaceOptions moved = Options();
  moved.paths[1].path = dir_.path() + "/c";
  std::filesystem::rename(b_, moved.paths[1].path);
  ExpectRefused(moved, "swap path 1 (" + moved.paths[1].path + "/forebay.swap) was last used as " +
                           b_ + "/forebay.swap; durable on it: 4 jobs: 1000:gpt at step 41");
  ExpectAdopted(moved, node);
  std::filesystem::rename(moved.paths[1].path, b_);
  ExpectRefused(Options(), "was last used as " + moved.paths[1].path + "/forebay.swap");
}

TEST_F(SwapRecoveryTest, ALinkToTheSameFolderIsTheSamePlace) {
  const DurableNode node = testing::MakeDurableNode(kSlotsBegin);
  ASSERT_OK(Open(Options()));
  ASSERT_OK(Commit(node));
  SwapSpaceOptions linked = Options();
  linked.paths[0].path = dir_.path() + "/link";
  std::filesystem::create_directory_symlink(a_, linked.paths[0].path);
  ASSERT_OK(Open(linked));
  ExpectEqual(swap_->recovered(), node);
}

TEST_F(SwapRecoveryTest, ACopyInPlaceOfTheOriginalIsRefusedUntilItIsAdopted) {
  const DurableNode node = testing::MakeDurableNode(kSlotsBegin);
  ASSERT_OK(Open(Options()));
  ASSERT_OK(Commit(node));
  swap_.reset();
  std::filesystem::copy_file(a_ + "/forebay.swap", a_ + "/copy");
  std::filesystem::rename(a_ + "/forebay.swap", a_ + "/original");
  std::filesystem::rename(a_ + "/copy", a_ + "/forebay.swap");
  ExpectRefused(Options(), "swap path 0 (" + a_ +
                               "/forebay.swap) is another file than was last used there, as a "
                               "copy is; durable on it: 4 jobs");
  ExpectAdopted(Options(), node);
}

TEST_F(SwapRecoveryTest, OnAnotherMachineAVolumeIsRefusedUntilItIsAdopted) {
  const DurableNode node = testing::MakeDurableNode(kSlotsBegin);
  SwapSpaceOptions here = Options();
  here.machine = kMachine;
  SwapSpaceOptions there = Options();
  there.machine = kOtherMachine;
  ASSERT_OK(Open(here));
  ASSERT_OK(Commit(node));
  ExpectRefused(there, "the volume was last used on another machine; durable on it: 4 jobs");
  // If the machine is unknown, only the paths count, and the volume still belongs to its machine.
  ASSERT_OK(Open(Options()));
  ASSERT_OK(Commit(node));
  ExpectRefused(there, "another machine");
  ASSERT_OK(Open(here));
  ExpectAdopted(there, node);
  ExpectRefused(here, "another machine");
}

TEST_F(SwapRecoveryTest, AVolumeOfAMachineThatWasNotKnownBelongsToTheFirstThatIs) {
  const DurableNode node = testing::MakeDurableNode(kSlotsBegin);
  SwapSpaceOptions here = Options();
  here.machine = kMachine;
  SwapSpaceOptions there = Options();
  there.machine = kOtherMachine;
  ASSERT_OK(Open(Options()));
  ASSERT_OK(Commit(node));
  ASSERT_OK(Open(here));
  ExpectEqual(swap_->recovered(), node);
  ExpectRefused(there, "another machine");
}

TEST_F(SwapRecoveryTest, AVolumeOfAnOlderProgramBelongsWhereItIsFoundFirst) {
  const DurableNode node = testing::MakeDurableNode(kSlotsBegin);
  ASSERT_OK(Open(Options()));
  ASSERT_OK(CommitWithoutPlace(node));
  SwapSpaceOptions moved = Options();
  moved.paths[0].path = dir_.path() + "/c";
  swap_.reset();
  std::filesystem::rename(a_, moved.paths[0].path);
  ASSERT_OK(Open(moved));
  EXPECT_TRUE(swap_->adopted().empty());
  ExpectEqual(swap_->recovered(), node);
  swap_.reset();
  std::filesystem::rename(moved.paths[0].path, a_);
  ExpectRefused(Options(), "was last used as " + moved.paths[0].path);
}

// An older program's ledger fills its area, so that the volume's place does not fit into it.
TEST_F(SwapRecoveryTest, AFullLedgerOfAnOlderProgramComesBack) {
  ASSERT_OK(Open(Options()));
  DurableNode node = testing::MakeDurableNode(kSlotsBegin);
  ASSERT_OK_AND_ASSIGN(const auto ledger, EncodeLedger(node, swap_->nonce()));
  const uint64_t free_bytes = kLedgerBytes - ledger.size() - 24 * SlotsOf(node).size();
  ASSERT_GT(free_bytes, 2000U);
  DurableJob job = *node.jobs[0];
  auto states = *job.extra_states;
  states[0].resize(states[0].size() + free_bytes - 64);
  job.extra_states = std::make_shared<const std::vector<std::vector<std::byte>>>(states);
  node.jobs[0] = std::make_shared<const DurableJob>(std::move(job));
  ASSERT_OK(CommitWithoutPlace(node));
  for (int opening = 0; opening < 2; ++opening) {
    ASSERT_OK(Open(Options()));
    ExpectEqual(swap_->recovered(), node);
    EXPECT_TRUE(swap_->place().paths.empty());
    ASSERT_OK(Commit(node));
  }
}

// A volume without jobs that was moved is replaced by a new one.
TEST_F(SwapRecoveryTest, AVolumeWithoutJobsGoesWhereItsPathsGo) {
  ASSERT_OK(Open(Options()));
  ASSERT_OK(Commit({.last_job = 7, .jobs = {}}));
  swap_.reset();
  SwapSpaceOptions moved = Options();
  moved.paths[0].path = dir_.path() + "/c";
  std::filesystem::rename(a_, moved.paths[0].path);
  ASSERT_OK(Open(moved));
  EXPECT_TRUE(swap_->recovered().jobs.empty());
  EXPECT_EQ(swap_->durable_sequence(), 0U);
  const DurableNode node = testing::MakeDurableNode(kSlotsBegin);
  ASSERT_OK(Commit(node));
  ASSERT_OK(Open(moved));
  ExpectEqual(swap_->recovered(), node);
}

// A volume and its copy get different commits. A mixture of one path of the volume and one of the copy is refused, so that no
// slot is read as a slot of the other.
TEST_F(SwapRecoveryTest, PathsOfAVolumeAndOfItsCopyAreNotMixed) {
  ASSERT_OK(Open(Options()));
  ASSERT_OK(Commit(testing::MakeDurableNode(kSlotsBegin)));
  swap_.reset();
  SwapSpaceOptions copy = Options();
  copy.paths[0].path = dir_.Make("c");
  copy.paths[1].path = dir_.Make("d");
  std::filesystem::copy(a_, copy.paths[0].path);
  std::filesystem::copy(b_, copy.paths[1].path);
  const DurableNode of_copy = testing::MakeDurableNode(3 * kSlotsBegin);
  ExpectAdopted(copy, testing::MakeDurableNode(kSlotsBegin));
  ASSERT_OK(Commit(of_copy));
  ASSERT_OK(Open(Options()));
  ExpectEqual(swap_->recovered(), testing::MakeDurableNode(kSlotsBegin));
  for (size_t path = 0; path < 2; ++path) {
    SwapSpaceOptions mixed = Options();
    mixed.paths[path] = copy.paths[path];
    ExpectRefused(mixed, "was last used as");
  }
  ASSERT_OK(Open(copy));
  ExpectEqual(swap_->recovered(), of_copy);
}

// ----------------------------------------------------------------------------------- failed commits

TEST_F(SwapRecoveryTest, ALedgerThatIsTooLongIsRefused) {
  ASSERT_OK(Open(Options()));
  const std::vector<std::byte> longer(kLedgerBytes + 1);
  EXPECT_THAT(CommitBytes(longer, {}), HasError(ErrorId::kLimit));
}

TEST_F(SwapRecoveryTest, AFailedCommitIsAnErrorAndTheLedgerBeforeComesBack) {
  ASSERT_OK(Open(Options()));
  const DurableNode before = testing::MakeDurableNode(kSlotsBegin);
  ASSERT_OK(Commit(before));
  engine_->SetFault({.operation = 0, .count = testing::IoFault::kForEver, .error_number = EIO});
  EXPECT_THAT(Commit(testing::MakeDurableNode(3 * kSlotsBegin)), HasError(ErrorId::kSwapIo));
  EXPECT_GT(engine_->fired(), 0U);
  engine_->ClearFault();
  ASSERT_OK(Open(Options()));
  ExpectEqual(swap_->recovered(), before);
}

TEST_F(SwapRecoveryTest, CommitsComeOneAfterTheOther) {
  ASSERT_OK(Open(Options()));
  const DurableNode node = testing::MakeDurableNode(kSlotsBegin);
  ASSERT_OK_AND_ASSIGN(const auto ledger, EncodeLedger(node, swap_->nonce()));
  std::vector<SwapDone> first;
  swap_->CommitLedger(/*task=*/1, ledger, SlotsOf(node), first);
  ASSERT_TRUE(first.empty());
  EXPECT_EQ(swap_->in_flight(), 1U);
  std::vector<SwapDone> second;
  swap_->CommitLedger(/*task=*/2, ledger, SlotsOf(node), second);
  ASSERT_EQ(second.size(), 1U);
  EXPECT_EQ(second[0].task, 2U);
  EXPECT_THAT(second[0].status, HasCode(absl::StatusCode::kFailedPrecondition));
  const SwapDone ended = WaitFor(std::move(first));
  EXPECT_OK(ended.status);
  EXPECT_EQ(ended.task, 1U);
  EXPECT_EQ(swap_->stats().commits, 1U);
}

}  // namespace
}  // namespace forebay::daemon
