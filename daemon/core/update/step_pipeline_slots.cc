// SPDX-License-Identifier: Apache-2.0
// Functions of StepPipeline that exchange swap slots between the job and the node.
#include <algorithm>
#include <optional>

#include "daemon/core/blocks/block_ledger.h"
#include "daemon/core/blocks/path_table.h"
#include "daemon/core/update/step_pipeline.h"
#include "nvme/slot_map.h"
#include "protocol/os/check.h"

namespace forebay::daemon {

// Moves free slots of the job to paths that the job's next writes need: takes a free slot of the node on such a path, and
// returns another slot to the node.
void StepPipeline::ExchangeSlots() {
  if (const std::optional<uint32_t> lacking = ledger_.LackingPath()) ExchangeSlot(*lacking);
  for (uint32_t path = 0; path < path_table_.paths() && ledger_.must_use_marked_path(); ++path) {
    if (path_table_.works(path)) ExchangeSlot(path);
  }
}

BlockLedger::Target StepPipeline::AllocateTarget(uint32_t block) {
  return AllocateSlot(&BlockLedger::BeginWrite, block);
}

BlockLedger::Target StepPipeline::AllocateSave(uint32_t entry) {
  return AllocateSlot(&BlockLedger::BeginSave, entry);
}

BlockLedger::Target StepPipeline::AllocateSlot(
    std::optional<BlockLedger::Target> (BlockLedger::*begin)(uint32_t), uint32_t entry) {
  ExchangeSlots();
  std::optional<BlockLedger::Target> target = (ledger_.*begin)(entry);
  if (!target && AddNodeSlot()) target = (ledger_.*begin)(entry);
  FOREBAY_CHECK(target.has_value());  // the job has Placement::slots_needed() slots
  return *target;
}

// Takes a slot from the node. With durable steps, a block that has moved or was written between steps needs an additional slot
// until the next durable step.
bool StepPipeline::AddNodeSlot(NodeSlot which) {
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
uint32_t StepPipeline::slots_wanted(uint32_t block) const {
  return ledger_.slots_held(block) + (map_.has_states(block) ? 1 : 0);
}

// Returns the number of slots that the job needs. Blocks may need more slots than Placement::slots_of().
uint64_t StepPipeline::slots_wanted() const {
  uint64_t wanted = placement_.slots_needed();
  for (uint32_t block = 0; ledger_.is_durable() && block < map_.blocks(); ++block) {
    const uint32_t of_block = slots_wanted(block);
    wanted += of_block - std::min(of_block, placement_.slots_of(block));
  }
  return wanted;
}

bool StepPipeline::AddSlotForVersion(uint32_t block, NodeSlot which) {
  if (!ledger_.KeepsCurrent(block)) return true;
  if (slots_wanted(block) < placement_.slots_of(block)) return true;
  // A slot that was added for an earlier version is still free if that version was not written.
  const uint64_t slots = ledger_.slots().size();
  if (slots > placement_.slots_needed() && slots > slots_wanted()) return true;
  return AddNodeSlot(which);
}

// Exchanges a free slot of the job for a slot of the node on `path`, if the job and the node each have such a slot.
void StepPipeline::ExchangeSlot(uint32_t path) {
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

void StepPipeline::AddSpareSlot() {
  if (ledger_.has_working_slot()) return;
  const auto spare = path_table_.AllocateOnWorking(swap_, plan_.swap_slot_bytes);
  if (spare) ledger_.AddSlot(*spare);
}

bool StepPipeline::AddSlotForMove(uint32_t block) {
  if (!AddSlotForVersion(block, NodeSlot::kOnWorkingPath)) return false;
  AddSpareSlot();
  return ledger_.has_working_slot();
}

void StepPipeline::ReturnSurplusSlots() {
  // A block that has moved needs more slots until the next durable step.
  if (!ledger_.is_durable()) ReturnFreeSlots();
}

void StepPipeline::FinishDurable(BlockLedger::Last last) {
  ledger_.FinishDurable(last);
  if (!running_) ReturnFreeSlots();
}

void StepPipeline::ReturnFreeSlots() {
  const uint64_t slots = ledger_.slots().size();
  swap_.Free(ledger_.RemoveFreeSlots(slots - std::min(slots, slots_wanted())));
}

}  // namespace forebay::daemon
