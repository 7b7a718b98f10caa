// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/update/relocation.h"

#include <utility>

#include "daemon/core/blocks/block_ledger.h"
#include "daemon/core/blocks/path_table.h"
#include "daemon/core/blocks/placement.h"
#include "daemon/core/blocks/staging.h"
#include "protocol/error.h"
#include "protocol/os/check.h"

namespace forebay::daemon {

using State = StagedBlocks::State;

void Relocation::Pump() {
  PumpDoubted();
  if (in_progress() || abandoned_ || !pipeline_.path_table().any_marked()) return;
  const std::optional<uint32_t> block = FindMarked();
  if (!block) return;
  StagedBlocks& staged = pipeline_.staged();
  const bool is_staged = staged.contains(*block);
  if (is_staged && staged.at(*block).state != State::kReady) return;
  std::optional<uint32_t> slot;
  if (!is_staged && !(slot = staged.AllocateFree(/*kept=*/0))) return;
  if (!pipeline_.AddSlotForMove(*block)) {
    if (slot) staged.Release(*slot);
    staying_.insert(*block);
    return;
  }
  if (is_staged) {
    staged.Drop(*block);
    slot = staged.AllocateUrgent();
  }
  if (slot) Start(*block, *slot);
}

void Relocation::PumpDoubted() {
  if (in_progress()) {
    if (phase_ == Phase::kWritten) End();
    return;
  }
  if (abandoned_) return;
  const BlockLedger& ledger = pipeline_.ledger();
  const std::optional<uint32_t> block = ledger.FindDoubted();
  if (!block) return;
  if (!ledger.has_free_slot()) pipeline_.DropEarlyUpdateOf(*block);
  StagedBlocks& staged = pipeline_.staged();
  if (!ledger.has_free_slot() && !pipeline_.AddNodeSlot()) {
    staged.set_waits();
    return;
  }
  if (staged.contains(*block)) {  // read ahead
    if (staged.at(*block).state != State::kReady) return;
    staged.Drop(*block);
  }
  const std::optional<uint32_t> slot = staged.AllocateUrgent();
  if (slot) Start(*block, *slot);
}

void Relocation::Start(uint32_t block, uint32_t staging_slot) {
  // An early update was computed from the block's old bytes, and holds the slot of the next version.
  pipeline_.DropEarlyUpdateOf(block);
  block_ = block;
  phase_ = Phase::kReading;
  pipeline_.set_relocating(true);
  pipeline_.StartRead(block, staging_slot, /*for_update=*/false);
}

std::optional<uint32_t> Relocation::FindMarked() {
  const PathTable& paths = pipeline_.path_table();
  if (std::exchange(marks_, paths.marks()) != paths.marks()) next_ = 0;
  const Placement& placement = pipeline_.placement();
  for (; next_ < placement.blocks(); ++next_) {
    const BlockLocation& location = placement.WhereBlock(next_);
    if (location.tier == Tier::kDram || location.move != BlockMove::kNone) continue;
    const std::optional<nvme::Slot>& slot = pipeline_.ledger().current(next_).slot;
    if (slot && paths.is_marked(slot->path) && !staying_.contains(next_)) return next_;
  }
  return std::nullopt;
}

void Relocation::Fail() {
  ++counters_.failed;
  if (!pipeline_.ledger().ForgetDoubt(*block_)) staying_.insert(*block_);
}

void Relocation::OnRead(const StepPipeline::ReadOutcome& outcome) {
  if (block_ != outcome.block || phase_ != Phase::kReading) return;
  StagedBlocks& staged = pipeline_.staged();
  if (!outcome.status.ok() || !staged.contains(*block_)) {
    Fail();
    End();
    return;
  }
  staged.at(*block_).state = State::kInUse;
  phase_ = Phase::kWriting;
  WriteBlock write =
      pipeline_.BeginWrite(*block_, pipeline_.IdentityOf(*block_), pipeline_.checksum(*block_));
  write.read_from = pipeline_.ledger().current(*block_).slot;
  io_.Start(TaskKind::kMoveBlock, 0, write);
}

absl::Status Relocation::OnWritten(const TaskDone& done) {
  FOREBAY_CHECK(in_progress() && phase_ == Phase::kWriting);
  BlockLedger& ledger = pipeline_.ledger();
  absl::Status fatal;
  pipeline_.staged().Drop(*block_);
  pipeline_.OnSwapped(*block_);
  if (done.status.ok()) {
    const BlockLedger::Version current = ledger.current(*block_);
    ledger.EndWrite(*block_, current.checksum, current.written_step, current.weights_digests);
    ++counters_.relocated;
  } else {
    if (protocol::IdOf(done.status) == protocol::ErrorId::kCorrupt) {
      ledger.DropWrite(*block_);
      // The disk has lost the block, and the job cannot continue with other bytes.
      if (ledger.IsInDoubt(*block_)) fatal = pipeline_.DescribeBlock(done.status, *block_);
    } else {
      ledger.OnWriteFailed(*block_);
    }
    Fail();
  }
  phase_ = Phase::kWritten;
  End();
  return fatal;
}

void Relocation::End() {
  const bool is_read = pipeline_.map().has_weights(*block_) && weights_.is_loading();
  if (phase_ == Phase::kWritten && is_read && !abandoned_) return;
  pipeline_.PublishBlock(*block_);
  pipeline_.ReturnSurplusSlots();
  pipeline_.set_relocating(false);
  block_.reset();
}

void Relocation::OnPublished() {
  staying_.clear();
  next_ = 0;
}

}  // namespace forebay::daemon
