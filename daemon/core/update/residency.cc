// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/update/residency.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "daemon/core/base/limits.h"
#include "daemon/core/blocks/block.h"
#include "daemon/core/blocks/block_ledger.h"
#include "daemon/core/blocks/placement.h"
#include "protocol/os/check.h"

namespace forebay::daemon {

std::vector<Eviction> Residency::PlanEvictions(uint64_t bytes, nvme::SlotMap& swap) const {
  std::vector<Eviction> evictions;
  if (slot_bytes_ == 0 || abandoned_) return evictions;
  const Placement& placement = store_.placement();
  uint64_t planned_bytes = 0;
  for (uint32_t block = placement.blocks(); block-- > 0 && planned_bytes < bytes;) {
    const BlockLocation& location = placement.WhereBlock(block);
    const bool stays = location.tier == Tier::kDram && location.move == BlockMove::kNone;
    const bool comes_back = location.move == BlockMove::kPromote;
    if (!stays && !comes_back) continue;
    const uint32_t slots_needed = comes_back ? SlotsToLeaveAgain(block) : kSwapSlotsPerBlock;
    std::optional<std::vector<nvme::Slot>> slots = swap.Allocate(slots_needed, slot_bytes_);
    if (!slots) break;
    evictions.push_back(
        {.block = block, .bytes = location.state.bytes, .slots = *std::move(slots)});
    planned_bytes += location.state.bytes;
  }
  return evictions;
}

// Returns the number of new slots for the eviction of a block that is marked for promotion. Such a block still has its swap
// slots. If the promotion has begun and the job has durable steps, durable steps retain these slots. The block then needs new
// slots.
uint32_t Residency::SlotsToLeaveAgain(uint32_t block) const {
  const bool is_moving = store_.placement().moving() == block;
  return is_moving && store_.ledger().is_durable() ? kSwapSlotsPerBlock : 0;
}

uint64_t Residency::movable_bytes() const {
  return slot_bytes_ == 0 ? 0 : store_.placement().granted_bytes();
}

void Residency::Evict(const Eviction& eviction) {
  Placement& placement = store_.placement();
  const BlockLocation& location = placement.WhereBlock(eviction.block);
  if (location.move == BlockMove::kPromote && placement.moving() != eviction.block) {
    placement.Unmark(eviction.block);
    return;
  }
  MarkWithSlots(eviction);
  if (location.tier == Tier::kDram) for_room_.insert(eviction.block);
}

void Residency::Keep(uint64_t bytes) {
  while (!for_room_.empty()) {
    const uint32_t block = *for_room_.begin();
    const uint64_t block_bytes = store_.placement().WhereBlock(block).state.bytes;
    if (block_bytes > bytes) break;
    bytes -= block_bytes;
    store_.placement().Unmark(block);
    for_room_.erase(block);
  }
  if (!pipeline_.running()) store_.slots().ReturnSurplus();  // otherwise Finish() returns them
}

void Residency::MarkWithSlots(const Eviction& eviction) {
  store_.ledger().AddSlots(eviction.slots);
  store_.placement().Mark(eviction.block);
}

void Residency::Move(uint32_t block, uint64_t free_bytes) {
  const BlockLocation& location = store_.placement().WhereBlock(block);
  if (location.move != BlockMove::kNone || slot_bytes_ == 0) return;
  if (location.tier == Tier::kNvme) {
    if (store_.map().has_weights(block)) return;  // a block with weights stays on swap
    if (location.state.bytes <= free_bytes) store_.placement().Mark(block);
    return;
  }
  std::optional<std::vector<nvme::Slot>> slots = swap_.Allocate(kSwapSlotsPerBlock, slot_bytes_);
  if (!slots) return;
  MarkWithSlots({.block = block, .bytes = location.state.bytes, .slots = *std::move(slots)});
}

bool Residency::ReturnNext(uint64_t free_bytes) {
  while (returns()) {
    const uint32_t block = next_return_++;
    const BlockLocation& location = store_.placement().WhereBlock(block);
    if (location.tier == Tier::kDram || location.state.bytes == 0) continue;
    Move(block, free_bytes);
    if (location.move == BlockMove::kPromote) return true;
  }
  EndReturns();
  return false;
}

void Residency::Pump() {
  if (relocation_.in_progress()) relocation_.Pump();
  if (in_progress() || abandoned_) return;
  const std::optional<uint32_t> block = store_.placement().NextMarked();
  if (!block) {
    relocation_.Pump();
    return;
  }
  if (store_.is_resident(*block)) {
    store_.placement().BeginMove(*block);
    for_room_.erase(*block);
    store_.blocks().Apply(*block, Transition::kMove);
    StartEviction(*block);
  } else if (MayPromote(*block)) {
    StartPromotion(*block);
  }
}

void Residency::StartEviction(uint32_t block) {
  BlockPlace place = store_.PlaceOf(block);
  place.slot = store_.slots().AllocateTarget(block).slot;
  io_.Start(TaskKind::kMoveBlock, 0,
            EvictBlock{.place = place,
                       .bytes = store_.map().bytes(block),
                       .identity = store_.IdentityOf(block)});
}

// False while a read ahead of the block runs. Drops a block that was read ahead.
bool Residency::MayPromote(uint32_t block) {
  Blocks& blocks = store_.blocks();
  if (!blocks.at(block).staging_slot) return true;
  if (blocks.phase(block) != Phase::kReady) return false;
  blocks.Apply(block, Transition::kMovesInstead);
  return true;
}

void Residency::StartPromotion(uint32_t block) {
  store_.placement().BeginMove(block);
  pipeline_.early().DropFor(block);
  store_.blocks().Apply(block, Transition::kMove);
  io_.Start(TaskKind::kMoveBlock, 0,
            PromoteBlock{.place = {.resident = true,
                                   .state_offset_bytes =
                                       store_.placement().WhereBlock(block).state.offset_bytes,
                                   .slot = store_.ledger().current(block).slot},
                         .bytes = store_.map().bytes(block),
                         .identity = store_.IdentityOf(block),
                         .checksum = store_.checksum(block)});
}

absl::Status Residency::OnMoved(const TaskDone& done) {
  FOREBAY_CHECK(in_progress());
  if (relocation_.in_progress()) return relocation_.OnWritten(done);
  const uint32_t block = *store_.placement().moving();
  if (!done.status.ok()) ++counters_.failed;
  if (store_.is_resident(block)) {
    OnEvicted(block, done);
  } else {
    OnPromoted(block, done);
  }
  return absl::OkStatus();
}

void Residency::EndMove(uint32_t block, Ends ends) {
  store_.blocks().Apply(block, Transition::kMoved);
  if (ends == Ends::kInOtherTier) {
    store_.placement().FinishMove();
  } else {
    store_.placement().CancelMove();
  }
}

void Residency::OnEvicted(uint32_t block, const TaskDone& done) {
  BlockLedger& ledger = store_.ledger();
  if (done.status.ok()) {
    ledger.EndWrite(block, done.checksum, ledger.current(block).written_step);
    store_.PublishBlock(block);
    EndMove(block, Ends::kInOtherTier);
    pipeline_.read_ahead().OnSwapped(block);
    store_.slots().ReturnSurplus();
    ++counters_.evicted;
    return;
  }
  ledger.OnWriteFailed(block);
  store_.slots().AddSpare();
  if (ledger.has_working_slot() && !abandoned_) {
    StartEviction(block);
    return;
  }
  error_ = store_.DescribeBlock(done.status, block);
  EndMove(block, Ends::kWhereItWas);
  store_.slots().ReturnSurplus();
}

void Residency::OnPromoted(uint32_t block, const TaskDone& done) {
  if (!done.status.ok()) {
    EndMove(block, Ends::kWhereItWas);
    pipeline_.read_ahead().OnSwapped(block);  // the block may be read ahead again
    return;
  }
  store_.SetResident(block);
  EndMove(block, Ends::kInOtherTier);
  if (store_.placement().WhereBlock(block).move == BlockMove::kEvict) {
    if (abandoned_) {
      store_.placement().Unmark(block);
    } else {
      for_room_.insert(block);
    }
  }
  store_.slots().ReturnSurplus();
  ++counters_.promoted;
}

void Residency::Abandon() {
  abandoned_ = true;
  relocation_.Abandon();
  for_room_.clear();
  EndReturns();
  Placement& placement = store_.placement();
  for (uint32_t block = 0; block < placement.blocks(); ++block) {
    const bool is_marked = placement.WhereBlock(block).move != BlockMove::kNone;
    if (is_marked && placement.moving() != block) placement.Unmark(block);
  }
}

}  // namespace forebay::daemon
