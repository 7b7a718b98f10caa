// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/update/early_updater.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "protocol/os/check.h"

namespace forebay::daemon {

EarlyUpdater::EarlyUpdater(JobTasks& io, const protocol::Layout& layout, Parts parts,
                           uint32_t workers)
    : io_(io),
      layout_(layout),
      parts_(parts),
      workers_(workers),
      gathered_(layout, parts.store.map(), parts.store.blocks(), parts.order, io.memory()) {}

void EarlyUpdater::Begin(StepOrder order) {
  FOREBAY_CHECK(!is_on_);
  if (parts_.terms.needs_norms() || is_abandoned_) return;
  order.params.assign(layout_.params().size(), true);
  parts_.terms.Set(std::move(order), UpdatePass::kWhole);
  is_on_ = true;
  has_failed_ = false;
  parts_.read_ahead.BeginBackward();
}

void EarlyUpdater::CountSums(uint32_t partition, uint64_t begin, uint64_t end, bool is_last) {
  Drop(gathered_.CountSums(partition, begin, end, is_last), Transition::kSumsChanged);
}

void EarlyUpdater::ForgetSums() {
  Drop(Transition::kSumsForgotten);
  gathered_.ForgetSums();
  parts_.sums.ForgetGathered();
}

// ---------------------------------------------------------------------------------------------- drop

void EarlyUpdater::Drop(Transition reason) {
  if (!std::exchange(is_on_, false)) return;
  const std::pmr::set<uint32_t>& early = parts_.store.blocks().early();
  Drop(std::pmr::vector<uint32_t>(early.begin(), early.end(), io_.memory()), reason);
  parts_.read_ahead.ForgetErrors();  // reads blocks ahead from the first one again
}

void EarlyUpdater::DropFor(uint32_t block) {
  if (parts_.store.blocks().is_early(block)) Drop({&block, 1}, Transition::kMovedAway);
}

void EarlyUpdater::Drop(std::span<const uint32_t> blocks, Transition reason) {
  EarlyUpdatesDropped dropped{.job = io_.job(), .blocks = {}};
  for (const uint32_t block : blocks) Drop(block, reason, dropped);
  if (!dropped.blocks.empty()) io_.actions().Emit(std::move(dropped));
}

void EarlyUpdater::Drop(uint32_t block, Transition reason, EarlyUpdatesDropped& dropped) {
  const BlockState before = parts_.store.blocks().at(block).state;
  if (before.phase == Phase::kWritten || before.purpose == Purpose::kBeside) {
    parts_.store.ledger().DropEarly(block);
    parts_.sums.SetUpdatedEarly(block, false);
  }
  parts_.store.blocks().Apply(block, reason);
  gathered_.OnEnded(block);
  dropped.blocks.push_back(block);
  ++parts_.tasks.counters().dropped_updates;
}

void EarlyUpdater::End(bool is_as_announced, const std::function<bool(uint32_t block)>& is_leased) {
  const bool same = std::exchange(is_on_, false) && is_as_announced;
  const std::pmr::set<uint32_t>& early = parts_.store.blocks().early();
  const std::pmr::vector<uint32_t> blocks(early.begin(), early.end(), io_.memory());
  EarlyUpdatesDropped dropped{.job = io_.job(), .blocks = {}};
  for (const uint32_t block : blocks) {
    if (!same) {
      Drop(block, Transition::kScalarsDiffer, dropped);
    } else if (!parts_.terms.IsWhole(block)) {
      Drop(block, Transition::kGradientMissing, dropped);
    } else if (is_leased(block)) {
      Drop(block, Transition::kWeightsLeased, dropped);
    }
  }
  if (!dropped.blocks.empty()) io_.actions().Emit(std::move(dropped));
  gathered_.ForgetSums();
}

void EarlyUpdater::DropFailed(uint32_t block, const absl::Status& status) {
  Drop({&block, 1}, status.ok() ? Transition::kJobFailed : Transition::kTaskFailed);
}

void EarlyUpdater::OnUpdateFailed(uint32_t block, const absl::Status& status) {
  DropFailed(block, status);
  parts_.store.blocks().Apply(block, Transition::kDropEnded);
  if (!status.ok()) parts_.read_ahead.Fail(block, status);
}

void EarlyUpdater::EndDroppedWrite(uint32_t block, const absl::Status& status) {
  if (status.ok()) {
    parts_.store.ledger().CancelWrite(block);
  } else {
    parts_.store.ledger().OnWriteFailed(block);
    has_failed_ = true;
  }
  parts_.store.blocks().Apply(block, Transition::kDropEnded);
}

// ---------------------------------------------------------------------------------------------- pump

bool EarlyUpdater::has_tasks() const {
  const Blocks& blocks = std::as_const(parts_.store).blocks();
  return blocks.count(Phase::kUpdating, Purpose::kEarly) +
             blocks.count(Phase::kWriting, Purpose::kEarly) +
             blocks.count(Phase::kDropped, Purpose::kEarly) >
         0;
}

void EarlyUpdater::Pump() {
  if (!is_on_ || is_abandoned_ || has_failed_) return;
  StartReads();
  StartUpdates();
}

void EarlyUpdater::Prefetch() {
  parts_.read_ahead.PumpBackward([this](uint32_t block) { return MayRead(block); });
}

bool EarlyUpdater::MayRead(uint32_t block) const {
  return parts_.read_ahead.MayRead(block) && gathered_.HasPlace(block);
}

// True if the block waits for its early update, and everything but the block itself is in DRAM.
bool EarlyUpdater::Waits(uint32_t block) const {
  return gathered_.waiting().contains(parts_.order.position(block)) && gathered_.HasPlace(block) &&
         parts_.sums.IsThere(block);
}

void EarlyUpdater::StartReads() {
  if (parts_.tasks.AreAllPathsBusy()) return;
  Blocks& blocks = parts_.store.blocks();
  for (const uint32_t position : gathered_.waiting()) {
    const uint32_t block = parts_.order.blocks()[position];
    if (!MayRead(block) || parts_.tasks.IsPathBusy(block) || !parts_.sums.IsThere(block)) continue;
    std::optional<uint32_t> slot = parts_.read_ahead.AllocateSlot();
    // A block that was read ahead for gradients that do not arrive must not hold its slot permanently.
    const auto waits = [this](uint32_t other) { return Waits(other); };
    const bool goes_on = has_tasks() || std::ranges::any_of(blocks.staged(), waits);
    if (!slot && !goes_on) {
      slot = blocks.ReclaimWhere([&](uint32_t other) { return !waits(other); });
    }
    if (!slot) return;
    parts_.tasks.StartRead(block, *slot, Transition::kReadEarly);
  }
}

void EarlyUpdater::StartUpdates() {
  Blocks& blocks = parts_.store.blocks();
  const auto position = [this](uint32_t block) { return parts_.order.position(block); };
  while (parts_.tasks.updating() < workers_) {
    std::optional<uint32_t> first;
    for (const uint32_t block : blocks.staged()) {
      if (blocks.phase(block) != Phase::kReady || !Waits(block)) continue;
      if (parts_.store.placement().WhereBlock(block).comes_to_dram()) continue;
      if (!first || position(block) < position(*first)) first = block;
    }
    if (!first) return;
    parts_.tasks.CountUpdate(*first);
    gathered_.OnBegun(*first);
    blocks.BeginEarly(*first, gathered_.NewWeightsOf(*first));
    parts_.tasks.StartUpdate(*first, UpdateTasks::Recorded::kNo);
  }
}

}  // namespace forebay::daemon
