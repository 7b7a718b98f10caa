// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/update/swap_slots.h"

#include <algorithm>

#include "protocol/os/check.h"

namespace forebay::daemon {

// Moves free slots of the job to paths that the job's next writes need: takes a free slot of the node on such a path, and
// returns another slot to the node.
void SwapSlots::Exchange() {
  if (const std::optional<uint32_t> lacking = ledger_.LackingPath()) ExchangeOn(*lacking);
  for (uint32_t path = 0; path < path_table_.paths() && ledger_.must_use_marked_path(); ++path) {
    if (path_table_.works(path)) ExchangeOn(path);
  }
}

BlockLedger::Target SwapSlots::AllocateTarget(uint32_t block) {
  return Allocate(&BlockLedger::BeginWrite, block);
}

BlockLedger::Target SwapSlots::AllocateSave(uint32_t entry) {
  return Allocate(&BlockLedger::BeginSave, entry);
}

BlockLedger::Target SwapSlots::Allocate(
    std::optional<BlockLedger::Target> (BlockLedger::*begin)(uint32_t), uint32_t entry) {
  Exchange();
  std::optional<BlockLedger::Target> target = (ledger_.*begin)(entry);
  if (!target && AddNodeSlot()) target = (ledger_.*begin)(entry);
  FOREBAY_CHECK(target.has_value());  // the job has at least Placement::slots_needed() slots
  return *target;
}

// Takes a slot from the node, in a job with durable steps. A block that has moved or was written between steps needs an additional
// slot until the next durable step.
bool SwapSlots::AddNodeSlot(NodeSlot which) {
  if (!ledger_.is_durable()) return false;
  auto slot = path_table_.AllocateOnWorking(swap_, plan_.swap_slot_bytes);
  if (!slot && which == NodeSlot::kAny) {
    const auto any = swap_.Allocate(1, plan_.swap_slot_bytes);
    if (any) slot = any->front();
  }
  if (slot) ledger_.AddSlot(*slot);
  return slot.has_value();
}

// Returns the number of slots that the block holds in a job with durable steps, plus one for the version that the next step
// writes.
uint32_t SwapSlots::WantedBy(uint32_t block) const {
  return ledger_.slots_held(block) + (map_.has_states(block) ? 1 : 0);
}

// Returns the number of slots that the job needs. Blocks may need more slots than Placement::slots_of().
uint64_t SwapSlots::Wanted() const {
  uint64_t wanted = placement_.slots_needed();
  for (uint32_t block = 0; ledger_.is_durable() && block < map_.blocks(); ++block) {
    const uint32_t of_block = WantedBy(block);
    wanted += of_block - std::min(of_block, placement_.slots_of(block));
  }
  return wanted;
}

bool SwapSlots::AddForVersion(uint32_t block, NodeSlot which) {
  if (!ledger_.KeepsCurrent(block)) return true;
  if (WantedBy(block) < placement_.slots_of(block)) return true;
  // A slot that was added for an earlier version is still free if that version was not written.
  const uint64_t slots = ledger_.slots().size();
  if (slots > placement_.slots_needed() && slots > Wanted()) return true;
  return AddNodeSlot(which);
}

// Exchanges a free slot of the job for a slot of the node on `path`, if both have one.
void SwapSlots::ExchangeOn(uint32_t path) {
  const std::optional<nvme::Slot> slot = swap_.AllocateOn(path, plan_.swap_slot_bytes);
  if (!slot) return;
  const auto given = ledger_.RemoveFreeSlots(1, BlockLedger::Suspects::kKept);
  if (given.empty()) {
    swap_.Free({&*slot, 1});
    return;
  }
  swap_.Free(given);
  ledger_.AddSlot(*slot);
}

void SwapSlots::AddSpare() {
  if (ledger_.has_working_slot()) return;
  const auto spare = path_table_.AllocateOnWorking(swap_, plan_.swap_slot_bytes);
  if (spare) ledger_.AddSlot(*spare);
}

bool SwapSlots::AddForMove(uint32_t block) {
  if (!AddForVersion(block, NodeSlot::kOnWorkingPath)) return false;
  AddSpare();
  return ledger_.has_working_slot();
}

void SwapSlots::ReturnSurplus() {
  // A block that has moved needs more slots until the next durable step.
  if (!ledger_.is_durable()) ReturnFree();
}

void SwapSlots::ReturnFree() {
  const uint64_t slots = ledger_.slots().size();
  swap_.Free(ledger_.RemoveFreeSlots(slots - std::min(slots, Wanted())));
}

}  // namespace forebay::daemon
