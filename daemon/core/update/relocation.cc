// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/update/relocation.h"

#include <utility>

#include "daemon/core/blocks/block.h"
#include "daemon/core/blocks/block_ledger.h"
#include "daemon/core/blocks/path_table.h"
#include "daemon/core/blocks/placement.h"
#include "protocol/error.h"
#include "protocol/os/check.h"

namespace forebay::daemon {

void Relocation::Pump() {
  PumpDoubted();
  if (in_progress() || abandoned_ || !store_.path_table().any_marked()) return;
  const std::optional<uint32_t> block = FindMarked();
  if (!block) return;
  Blocks& blocks = store_.blocks();
  const bool is_staged = blocks.at(*block).staging_slot.has_value();
  if (is_staged && blocks.phase(*block) != Phase::kReady) return;
  std::optional<uint32_t> slot;
  if (!is_staged && !(slot = blocks.AllocateFree(/*reserved=*/0))) return;
  if (!store_.slots().AddForMove(*block)) {
    if (slot) blocks.Release(*slot);
    staying_.insert(*block);
    return;
  }
  if (is_staged) {
    blocks.Apply(*block, Transition::kMovesInstead);
    slot = blocks.AllocateUrgent();
  }
  if (slot) Start(*block, *slot);
}

void Relocation::PumpDoubted() {
  if (in_progress()) {
    if (store_.blocks().phase(*block_) == Phase::kWritten) TryEnd();
    return;
  }
  if (abandoned_) return;
  const BlockLedger& ledger = store_.ledger();
  const std::optional<uint32_t> block = ledger.FindDoubted();
  if (!block) return;
  if (!ledger.has_free_slot()) pipeline_.early().DropFor(*block);
  Blocks& blocks = store_.blocks();
  if (!ledger.has_free_slot() && !store_.slots().AddNodeSlot()) {
    blocks.SetWaits(Blocks::Waits::kYes);
    return;
  }
  if (blocks.at(*block).staging_slot) {  // read ahead
    if (blocks.phase(*block) != Phase::kReady) return;
    blocks.Apply(*block, Transition::kMovesInstead);
  }
  const std::optional<uint32_t> slot = blocks.AllocateUrgent();
  if (slot) Start(*block, *slot);
}

void Relocation::Start(uint32_t block, uint32_t staging_slot) {
  // An early update was computed from the block's old bytes, and holds the slot of the next version.
  pipeline_.early().DropFor(block);
  block_ = block;
  pipeline_.tasks().StartRead(block, staging_slot, Transition::kReadForMove);
}

std::optional<uint32_t> Relocation::FindMarked() {
  const PathTable& paths = store_.path_table();
  if (std::exchange(marks_, paths.marks()) != paths.marks()) next_ = 0;
  const Placement& placement = store_.placement();
  for (; next_ < placement.blocks(); ++next_) {
    const BlockLocation& location = placement.WhereBlock(next_);
    if (location.tier == Tier::kDram || location.move != BlockMove::kNone) continue;
    const std::optional<nvme::Slot>& slot = store_.ledger().current(next_).slot;
    if (slot && paths.is_marked(slot->path) && !staying_.contains(next_)) return next_;
  }
  return std::nullopt;
}

void Relocation::Fail() {
  ++counters_.failed;
  if (!store_.ledger().ForgetDoubt(*block_)) staying_.insert(*block_);
}

void Relocation::OnRead(const StepPipeline::ReadOutcome& outcome) {
  if (block_ != outcome.block) return;
  Blocks& blocks = store_.blocks();
  if (blocks.phase(*block_) != Phase::kReady) {
    Fail();
    End();
    return;
  }
  blocks.Apply(*block_, Transition::kWrite);
  WriteBlock write =
      store_.BeginWrite(*block_, store_.IdentityOf(*block_), store_.checksum(*block_));
  write.read_from = store_.ledger().current(*block_).slot;
  io_.Start(TaskKind::kMoveBlock, 0, write);
}

absl::Status Relocation::OnWritten(const TaskDone& done) {
  FOREBAY_CHECK(in_progress());
  Blocks& blocks = store_.blocks();
  BlockLedger& ledger = store_.ledger();
  if (done.status.ok()) {
    const BlockLedger::Version current = ledger.current(*block_);
    ledger.EndWrite(*block_, current.checksum, current.written_step, current.weights_digests);
    ++counters_.relocated;
    blocks.Apply(*block_, Transition::kWritten);
    TryEnd();
    return absl::OkStatus();
  }
  absl::Status fatal;
  if (protocol::IdOf(done.status) == protocol::ErrorId::kCorrupt) {
    ledger.DropWrite(*block_);
    // The disk has lost the block, and the job cannot continue with other bytes.
    if (ledger.IsInDoubt(*block_)) fatal = store_.DescribeBlock(done.status, *block_);
  } else {
    ledger.OnWriteFailed(*block_);
  }
  Fail();
  blocks.Apply(*block_, Transition::kMoved);
  End();
  return fatal;
}

// Ends a move whose block is written, unless weights are being read from the block's old slot.
void Relocation::TryEnd() {
  const bool is_read = store_.map().has_weights(*block_) && weights_.is_loading();
  if (is_read && !abandoned_) return;
  store_.blocks().Apply(*block_, Transition::kMoved);
  End();
}

void Relocation::End() {
  pipeline_.read_ahead().OnSwapped(*block_);
  store_.PublishBlock(*block_);
  store_.slots().ReturnSurplus();
  block_.reset();
}

void Relocation::OnPublished() {
  staying_.clear();
  next_ = 0;
}

}  // namespace forebay::daemon
