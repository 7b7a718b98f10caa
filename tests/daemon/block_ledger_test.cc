// SPDX-License-Identifier: Apache-2.0
// Goal    The block ledger gives each write a free slot, spreads writes over the swap paths, reuses no published slot before
//         Publish(), and uses failing slots and failing paths last.
// Method  Values computed by hand; invariants are checked after each call.

#include "daemon/core/blocks/block_ledger.h"

#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <optional>
#include <set>
#include <vector>

#include "daemon/core/blocks/path_table.h"
#include "gtest/gtest.h"
#include "nvme/slot_map.h"

namespace forebay::daemon::block_ledger_test {
namespace {

constexpr uint64_t kSlotBytes = 4096;

// Returns slots of kSlotBytes, end to end on each path: `counts[path]` of them.
std::vector<nvme::Slot> Slots(const std::vector<uint32_t>& counts) {
  std::vector<nvme::Slot> slots;
  for (uint32_t path = 0; path < counts.size(); ++path) {
    for (uint32_t i = 0; i < counts[path]; ++i) {
      slots.push_back({.path = path, .offset_bytes = i * kSlotBytes, .size_bytes = kSlotBytes});
    }
  }
  return slots;
}

nvme::Slot Write(BlockLedger& ledger, uint32_t block, uint64_t step) {
  const std::optional<BlockLedger::Target> target = ledger.BeginWrite(block);
  EXPECT_TRUE(target.has_value());
  EXPECT_FALSE(target->pause);
  ledger.EndWrite(block, /*checksum=*/100 * step + block, step);
  ledger.CheckInvariants();
  return target->slot;
}

// Number of free slots in `ledger`. The free slots are removed from a copy to count them.
size_t FreeSlots(BlockLedger ledger) { return ledger.RemoveFreeSlots(SIZE_MAX).size(); }

TEST(BlockLedger, KeepsThePublishedVersionUntilPublish) {
  PathTable paths(2, {});
  BlockLedger ledger(2, Slots({4}), paths);
  EXPECT_FALSE(ledger.current(0).slot.has_value());
  const nvme::Slot first = Write(ledger, 0, 1);
  EXPECT_EQ(ledger.current(0).written_step, 0u);
  EXPECT_EQ(ledger.newest(0).written_step, 1u);
  EXPECT_EQ(ledger.newest(0).slot, first);
  ledger.Publish();
  EXPECT_EQ(ledger.current(0).slot, first);
  EXPECT_EQ(ledger.current(0).checksum, 100u);
  EXPECT_EQ(ledger.current(1).written_step, 0u);
  const nvme::Slot second = Write(ledger, 0, 2);
  EXPECT_NE(second, first);
  EXPECT_EQ(ledger.current(0).slot, first);
  ledger.Publish();
  EXPECT_EQ(ledger.current(0).slot, second);
  EXPECT_EQ(FreeSlots(ledger), 3u);
}

TEST(BlockLedger, TwoSlotsABlockAreEnoughForEveryStep) {
  constexpr uint32_t kBlocks = 7;
  PathTable paths(2, {});
  BlockLedger ledger(kBlocks, Slots({kBlocks, kBlocks}), paths);
  for (uint64_t step = 1; step <= 4; ++step) {
    std::set<nvme::Slot> used;
    std::vector<uint32_t> of_path(2, 0);
    for (uint32_t block = 0; block < kBlocks; ++block) {
      const nvme::Slot slot = Write(ledger, block, step);
      EXPECT_TRUE(used.insert(slot).second);
      ++of_path[slot.path];
    }
    EXPECT_LE(of_path[0], of_path[1] + 1) << "both paths are busy";
    EXPECT_LE(of_path[1], of_path[0] + 1);
    EXPECT_EQ(FreeSlots(ledger), step == 1 ? kBlocks : 0u);
    ledger.Publish();
    EXPECT_EQ(FreeSlots(ledger), kBlocks);
  }
}

TEST(BlockLedger, AWriteThatFailsIsTriedAgainInTheSlotThatIsLeft) {
  PathTable paths(2, {});
  BlockLedger ledger(1, Slots({2}), paths);
  const nvme::Slot published = Write(ledger, 0, 1);
  ledger.Publish();
  // The other slot holds the published version, so a retry uses the failed slot again, after a pause.
  const std::optional<BlockLedger::Target> first = ledger.BeginWrite(0);
  ASSERT_TRUE(first.has_value());
  EXPECT_NE(first->slot, published);
  ledger.OnWriteFailed(0);
  ledger.CheckInvariants();
  const std::optional<BlockLedger::Target> again = ledger.BeginWrite(0);
  ASSERT_TRUE(again.has_value());
  EXPECT_EQ(again->slot, first->slot);
  EXPECT_TRUE(again->pause);
  ledger.EndWrite(0, 5, 2);
  ledger.Publish();
  EXPECT_EQ(ledger.current(0).checksum, 5u);
}

TEST(BlockLedger, AFailingPathIsUsedLastUntilAWriteToItSucceeds) {
  PathTable paths(2, {});
  BlockLedger ledger(4, Slots({4, 2}), paths);
  ASSERT_EQ(ledger.BeginWrite(0)->slot.path, 0u);
  ledger.OnWriteFailed(0);
  for (const uint32_t block : {0u, 1u}) {
    const std::optional<BlockLedger::Target> target = ledger.BeginWrite(block);
    EXPECT_EQ(target->slot.path, 1u);
    EXPECT_FALSE(target->pause);
  }
  // The other path is full. The retry returns to the failing path after a pause, and uses a slot that has not failed.
  std::optional<BlockLedger::Target> target = ledger.BeginWrite(2);
  EXPECT_EQ(target->slot.path, 0u);
  EXPECT_NE(target->slot.offset_bytes, 0u);
  EXPECT_TRUE(target->pause);
  ledger.EndWrite(2, 1, 1);
  target = ledger.BeginWrite(3);
  EXPECT_EQ(target->slot.path, 0u);
  EXPECT_FALSE(target->pause) << "the path works again";
  ledger.CheckInvariants();
}

TEST(BlockLedger, WhatIsInDoubtIsNotNamedByALedger) {
  PathTable paths(1, {});
  constexpr uint32_t kOnSwap = 0;
  constexpr uint32_t kInDram = 1;
  constexpr uint32_t kWeights = 2;
  BlockLedger ledger(2, Slots({9}), paths, std::pmr::get_default_resource(), /*weights_parts=*/1);
  const nvme::Slot written = Write(ledger, kOnSwap, 1);
  ledger.SetInPlace(kInDram, 1);
  ledger.Publish();
  EXPECT_EQ(ledger.BeginDurable(), (std::vector<uint32_t>{kInDram, kWeights}));
  std::vector<nvme::Slot> saved;
  for (const uint32_t entry : {kInDram, kWeights}) {
    saved.push_back(ledger.BeginSave(entry)->slot);
    ledger.EndSave(entry, /*checksum=*/entry, /*step=*/1);
  }
  // A free slot is not doubted.
  const nvme::Slot free{.path = 0, .offset_bytes = 8 * kSlotBytes, .size_bytes = kSlotBytes};
  std::set<uint32_t> doubted_paths;
  ledger.Doubt({written, saved[1], free}, doubted_paths);
  EXPECT_EQ(doubted_paths, std::set<uint32_t>{0});
  doubted_paths.clear();
  ledger.Doubt({written, free}, doubted_paths);
  EXPECT_TRUE(doubted_paths.empty()) << "known before";
  ledger.CheckInvariants();
  EXPECT_TRUE(ledger.is_doubted(written));
  EXPECT_FALSE(ledger.is_doubted(free));
  EXPECT_EQ(ledger.FindDoubted(), kOnSwap);
  // The ledger saves the weights' copy again in another slot. The block on swap is rewritten unchanged in another slot.
  EXPECT_EQ(ledger.DropDoubtedCopies(), (std::vector<uint32_t>{kWeights}));
  EXPECT_EQ(ledger.next_durable(kInDram)->slot, saved[0]);
  EXPECT_NE(ledger.BeginSave(kWeights)->slot, saved[1]);
  ledger.EndSave(kWeights, 2, 1);
  EXPECT_TRUE(ledger.is_next_doubted());
  const nvme::Slot moved = ledger.BeginWrite(kOnSwap)->slot;
  ledger.EndWrite(kOnSwap, /*checksum=*/100, /*step=*/1);
  ledger.PublishBlock(kOnSwap);
  EXPECT_NE(moved, written);
  EXPECT_EQ(ledger.next_durable(kOnSwap)->slot, moved);
  EXPECT_FALSE(ledger.has_doubted());
  EXPECT_EQ(ledger.slots_held(kOnSwap), 1u);
  EXPECT_TRUE(ledger.KeepsCurrent(kOnSwap));
  ledger.FinishDurable(BlockLedger::Last::kBecomesBefore);
  ledger.CheckInvariants();
  EXPECT_EQ(FreeSlots(ledger), 5u);
  // The new version of the swapped block takes a second slot. After BeginDurable() the ledger retains both slots.
  Write(ledger, kOnSwap, 2);
  ledger.Publish();
  EXPECT_EQ(ledger.slots_held(kOnSwap), 2u);
  EXPECT_FALSE(ledger.KeepsCurrent(kOnSwap));
  (void)ledger.BeginDurable();
  EXPECT_TRUE(ledger.KeepsCurrent(kOnSwap));
}

TEST(BlockLedger, WithoutDurableStepsNothingIsInDoubt) {
  PathTable paths(1, {});
  BlockLedger ledger(1, Slots({2}), paths);
  std::set<uint32_t> doubted_paths;
  ledger.Doubt({Write(ledger, 0, 1)}, doubted_paths);
  EXPECT_TRUE(doubted_paths.empty());
  EXPECT_FALSE(ledger.has_doubted());
}

// Measures every path: `seconds[path]` is the duration of each transfer of one slot.
void Measure(PathTable& paths, const std::vector<double>& seconds) {
  for (uint32_t path = 0; path < seconds.size(); ++path) {
    for (const Direction direction : {Direction::kRead, Direction::kWrite}) {
      uint64_t now_ns = 1;
      for (int i = 0; i < 100; ++i) {
        const auto end_ns = now_ns + static_cast<uint64_t>(seconds[path] * 1e9);
        paths.AddTransfer({.path = path,
                           .direction = direction,
                           .bytes = kSlotBytes,
                           .begin_ns = now_ns,
                           .end_ns = end_ns});
        now_ns = end_ns;
      }
    }
  }
}

TEST(BlockLedger, PathsHaveTurnsByTheirShares) {
  PathTable paths(2, {});
  Measure(paths, {1, 3});
  BlockLedger ledger(8, Slots({8, 8}), paths);
  std::vector<uint32_t> turns;
  for (uint32_t block = 0; block < 8; ++block) turns.push_back(Write(ledger, block, 1).path);
  EXPECT_EQ(turns, (std::vector<uint32_t>{0, 0, 1, 0, 0, 0, 1, 0}));
}

TEST(BlockLedger, APathThatLacksSlotsGetsThemFromWhereMostAreFree) {
  PathTable paths(2, {});
  Measure(paths, {1, 3});
  BlockLedger ledger(16, Slots({8, 24}), paths);
  std::vector<uint32_t> exchanged;
  std::vector<uint32_t> of_path(2, 0);
  for (uint32_t block = 0; block < 16; ++block) {
    if (ledger.LackingPath() == 0U) {
      exchanged.push_back(block);
      const auto removed = ledger.RemoveFreeSlots(1);
      ASSERT_EQ(removed.size(), 1U);
      EXPECT_EQ(removed[0].path, 1U);
      ledger.AddSlots(
          {{.path = 0, .offset_bytes = (100 + block) * kSlotBytes, .size_bytes = kSlotBytes}});
    }
    ++of_path[Write(ledger, block, 1).path];
  }
  // By its share of 3/4, path 0 would hold 12 of the 16 blocks. It holds 10: its own 8 slots and the 2 exchanged ones.
  EXPECT_EQ(of_path, (std::vector<uint32_t>{10, 6}));
  EXPECT_EQ(exchanged, (std::vector<uint32_t>{13, 14}));
  EXPECT_EQ(ledger.slots().size(), 32U);
}

TEST(BlockLedger, APathThatMoreIsReadFromGetsFewerWrites) {
  PathTable paths(2, {});
  BlockLedger ledger(8, Slots({8, 8}), paths);
  ledger.CountRead(0);
  ledger.CountRead(0);
  std::vector<uint32_t> turns;
  for (uint32_t block = 0; block < 4; ++block) turns.push_back(Write(ledger, block, 1).path);
  EXPECT_EQ(turns, (std::vector<uint32_t>{1, 0, 1, 0}));
  ledger.CountRead(1);
  ledger.CountRead(1);
  EXPECT_EQ(Write(ledger, 4, 1).path, 0U) << "else it would be the other's turn";
}

TEST(BlockLedger, FailedSlotsAreTheLastResort) {
  PathTable paths(2, {});
  BlockLedger ledger(1, Slots({3}), paths);
  std::vector<uint64_t> offsets;
  for (int i = 0; i < 6; ++i) {
    offsets.push_back(ledger.BeginWrite(0)->slot.offset_bytes / kSlotBytes);
    ledger.OnWriteFailed(0);
    ledger.CheckInvariants();
  }
  EXPECT_EQ(offsets, (std::vector<uint64_t>{0, 1, 2, 0, 1, 2}));
}

TEST(BlockLedger, ASpareSlotServesWhileAllOthersFail) {
  PathTable paths(2, {});
  BlockLedger ledger(1, Slots({2}), paths);
  ledger.BeginWrite(0);
  ledger.OnWriteFailed(0);
  EXPECT_FALSE(ledger.has_working_slot());
  EXPECT_TRUE(paths.is_suspect(0));
  EXPECT_FALSE(paths.is_marked(0));
  ledger.AddSlots({{.path = 1, .offset_bytes = 0, .size_bytes = kSlotBytes}});
  EXPECT_TRUE(ledger.has_working_slot());
  EXPECT_EQ(Write(ledger, 0, 1).path, 1u);
  ledger.Publish();
  ledger.CheckInvariants();
  EXPECT_EQ(ledger.slots().size(), 3u);
}

TEST(BlockLedger, BlocksInDramArePublishedWithTheOthers) {
  PathTable paths(2, {});
  BlockLedger ledger(2, Slots({2}), paths);
  ledger.SetInPlace(0, 3);
  Write(ledger, 1, 3);
  EXPECT_EQ(ledger.current(0).written_step, 0u);
  EXPECT_EQ(ledger.newest(0).written_step, 3u);
  ledger.Publish();
  EXPECT_EQ(ledger.current(0).written_step, 3u);
  EXPECT_EQ(ledger.current(1).written_step, 3u);
}

TEST(BlockLedger, ABlockMovesBetweenTiersAloneAndItsSlotsComeAndGo) {
  PathTable paths(2, {});
  BlockLedger ledger(3, Slots({2}), paths);
  ledger.SetInPlace(0, 1);
  ledger.SetInPlace(1, 1);
  Write(ledger, 2, 1);
  ledger.Publish();

  ledger.AddSlots({{.path = 1, .offset_bytes = 0, .size_bytes = kSlotBytes},
                   {.path = 1, .offset_bytes = kSlotBytes, .size_bytes = kSlotBytes}});
  Write(ledger, 0, 1);
  ledger.SetInPlace(1, 2);
  ledger.PublishBlock(0);
  ledger.CheckInvariants();
  EXPECT_TRUE(ledger.current(0).slot.has_value());
  EXPECT_EQ(ledger.current(0).written_step, 1u);
  EXPECT_EQ(ledger.current(1).written_step, 1u) << "the others are not published";
  ledger.Publish();

  ledger.SetResident(2);
  EXPECT_FALSE(ledger.current(2).slot.has_value());
  EXPECT_EQ(ledger.current(2).checksum, 0u);
  EXPECT_EQ(ledger.current(2).written_step, 1u);
  EXPECT_EQ(FreeSlots(ledger), 3u);
  const auto removed = ledger.RemoveFreeSlots(2);
  EXPECT_EQ(removed.size(), 2u);
  ledger.CheckInvariants();
  EXPECT_EQ(ledger.slots().size(), 2u);
  EXPECT_EQ(FreeSlots(ledger), 1u);
  EXPECT_TRUE(ledger.slots().contains(*ledger.current(0).slot));
  EXPECT_EQ(ledger.RemoveFreeSlots(5).size(), 1u) << "what is in use stays";
}

TEST(BlockLedger, SlotsWhoseWriteFailedStayWithTheJob) {
  PathTable paths(2, {});
  BlockLedger ledger(1, Slots({2}), paths);
  ASSERT_TRUE(ledger.BeginWrite(0).has_value());
  ledger.OnWriteFailed(0);
  EXPECT_EQ(ledger.RemoveFreeSlots(2).size(), 1u);
  ledger.CheckInvariants();
  EXPECT_EQ(ledger.slots().size(), 1u);
  EXPECT_TRUE(ledger.BeginWrite(0).has_value());
}

}  // namespace
}  // namespace forebay::daemon::block_ledger_test
