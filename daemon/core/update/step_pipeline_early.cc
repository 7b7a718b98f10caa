// SPDX-License-Identifier: Apache-2.0
// Update at arrival: the part of StepPipeline between the announcement of a step and its decision.

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "daemon/core/update/step_pipeline.h"
#include "protocol/os/check.h"

namespace forebay::daemon {

using State = StagedBlocks::State;

void StepPipeline::BeginEarly(StepOrder order) {
  FOREBAY_CHECK(!running_ && !is_early_);
  if (needs_norms() || abandoned_) return;
  order_ = std::move(order);
  order_.params.assign(layout_->params().size(), true);
  pass_ = UpdatePass::kWhole;
  scalars_.clear();
  is_early_ = true;
  early_failed_ = false;
  early_prefetch_left_ = map_.blocks();
}

void StepPipeline::CountSums(uint32_t partition, uint64_t begin, uint64_t end, bool is_last) {
  const std::vector<uint32_t> stale = early_.CountSums(partition, begin, end, is_last);
  FOREBAY_CHECK(stale.empty() || !running_);
  DropEarly(stale);
}

void StepPipeline::ForgetSums() {
  if (!running_) DropEarly();
  early_.ForgetSums();
  sums_.ForgetGathered();
}

void StepPipeline::DropEarly() {
  if (!std::exchange(is_early_, false)) return;
  std::pmr::vector<uint32_t> blocks(io_.memory());
  for (const auto& [block, early] : early_.all()) blocks.push_back(block);
  DropEarly(blocks);
  ForgetPrefetchErrors();  // the blocks that backward was to need first were read ahead
}

void StepPipeline::DropEarlyUpdateOf(uint32_t block) {
  if (early_.has(block)) DropEarly({&block, 1});
}

void StepPipeline::DropEarly(std::span<const uint32_t> blocks) {
  if (blocks.empty()) return;
  EarlyUpdatesDropped dropped{.job = io_.job(), .blocks = {blocks.begin(), blocks.end()}};
  for (const uint32_t block : blocks) {
    if (early_.at(block).written) {
      ledger_.DropEarly(block);
      sums_.SetUpdatedEarly(block, false);
      early_.Remove(block);
    } else {
      staged_.at(block).cancelled = true;
      early_.RemoveRunning(block);
    }
    ++counters_.dropped_updates;
  }
  io_.actions().Emit(std::move(dropped));
}

// Frees the slots of a dropped early update whose task has ended.
void StepPipeline::EndDropped(uint32_t block) {
  staged_.Drop(block);
  early_.EndRemoved(block);
}

// Drops early updates that the decision cannot accept: updates with other scalars than the decided ones, updates
// of a parameter that has no gradient in the step, and updates of weights that a reader has leased.
void StepPipeline::AdoptEarly(bool is_as_announced) {
  const bool same = is_early_ && is_as_announced;
  std::pmr::vector<uint32_t> dropped(io_.memory());
  for (const auto& [block, early] : early_.all()) {
    const std::pmr::vector<BlockRun> runs = map_.Runs(block, io_.memory());
    const bool is_whole =
        std::ranges::all_of(runs, [this](const BlockRun& run) { return order_.params[run.param]; });
    if (!same || !is_whole || IsLeased(block)) dropped.push_back(block);
  }
  DropEarly(dropped);
  is_early_ = false;
  early_.ForgetSums();
}

// Treats blocks that the previous daemon has written as early updates that the decision has accepted. Blocks that the previous
// daemon had in staging slots become ready, even if part of their update was done.
void StepPipeline::AdoptKept(const KeptUpdate& update) {
  for (uint32_t block = 0; block < map_.blocks(); ++block) {
    const KeptUpdate::Block& of = update.blocks[block];
    if (of.staging_slot) staged_.at(block).state = State::kReady;
    if (!of.written) continue;
    early_.Adopt(block, {.weights_slot = of.weights_slot,
                         .updated = true,
                         .written = true,
                         .overflows = of.overflows});
  }
}

// Makes the early update of a block part of the running step.
void StepPipeline::AcceptEarly(uint32_t block) {
  const EarlyUpdates::Block early = early_.at(block);
  ++counters_.early_updates;
  overflowed_masters_ += early.overflows;
  if (!early.written) return;
  ledger_.AcceptEarly(block);
  RecordWritten(block, early.overflows, early.weights_slot);
  if (early.weights_slot) AddInstall(block);
  --blocks_left_;
  if (early.weights_slot) return;
  FinishPartitionsOf(block);
  early_.Remove(block);
}

void StepPipeline::AddInstall(uint32_t block) {
  ++blocks_left_;
  to_install_.insert(position_[block]);
}

void StepPipeline::StartInstall(uint32_t block) {
  ++updating_;
  to_install_.erase(position_[block]);
  InstallWeights action{.block = block, .copies = std::pmr::vector<BytesCopy>(io_.memory())};
  const uint32_t slot = *early_.at(block).weights_slot;
  const uint64_t width = protocol::SizeBytes(layout_->spec().dtype);
  for (const BlockRun& run : map_.Runs(block, io_.memory())) {
    action.copies.push_back(
        {.from_bytes = early_.NewWeightsOffset(slot, run.block_elem),
         .to_bytes = PlaceOfWeights(run.partition, run.partition_elem).offset_bytes,
         .size_bytes = run.elems * width});
  }
  tasks_.emplace(io_.Start(TaskKind::kInstallWeights, 0, std::move(action)),
                 Running{.block = block});
}

void StepPipeline::OnInstalled(const TaskDone& done) {
  const uint32_t block = FinishTask(done.task).block;
  --updating_;
  if (is_recorded_) io_.actions().Emit(RecordInstalled{.job = io_.job(), .block = block});
  early_.Remove(block);
  FinishPartitionsOf(block);
  --blocks_left_;
}

void StepPipeline::PumpEarly() {
  if (!is_early_ || running_ || abandoned_ || early_failed_) return;
  StartEarlyReads();
  StartEarlyUpdates();
}

// True while early updates are allowed and the job has tasks. Gradients may wait for early updates then.
bool StepPipeline::HasEarlyWork() const { return is_early_ && !early_failed_ && !io_.idle(); }

bool StepPipeline::MayReadEarly(uint32_t block) const {
  return MayReadAhead(block) && early_.HasPlace(block) && !early_.has(block);
}

void StepPipeline::StartEarlyReads() {
  if (AreAllPathsBusy()) return;
  for (const uint32_t position : early_.waiting()) {
    const uint32_t block = in_order_[position];
    if (!MayReadEarly(block) || IsPathBusy(PathOf(block)) || !sums_.IsThere(block)) continue;
    std::optional<uint32_t> slot = AllocateForReadAhead();
    // A block that was read ahead for gradients that do not arrive must not hold its slot permanently.
    const auto waits = [this](uint32_t other) {
      return early_.waiting().contains(position_[other]) && early_.HasPlace(other) &&
             sums_.IsThere(other);
    };
    const bool goes_on =
        early_tasks_ > 0 ||
        std::ranges::any_of(staged_.all(), [&](const auto& entry) { return waits(entry.first); });
    if (!slot && !goes_on) {
      slot = staged_.ReclaimWhere([&](uint32_t other) { return !waits(other); });
    }
    if (!slot) return;
    StartRead(block, *slot, /*for_update=*/true);
  }
}

void StepPipeline::StartEarlyUpdates() {
  while (updating_ < workers_) {
    std::optional<uint32_t> first;
    for (const auto& [block, staged] : staged_.all()) {
      if (staged.state != State::kReady || !early_.waiting().contains(position_[block])) continue;
      if (placement_.WhereBlock(block).comes_to_dram() || !early_.HasPlace(block) ||
          !sums_.IsThere(block)) {
        continue;
      }
      if (!first || position_[block] < position_[*first]) first = block;
    }
    if (!first) return;
    early_.Begin(*first);
    early_.AddReader(*first);
    ++early_tasks_;
    StartUpdate(*first);
  }
}

// Reads blocks ahead from the last position to the first, because backward delivers the gradients of the last block first.
void StepPipeline::PrefetchEarly() {
  for (; early_prefetch_left_ > 0; --early_prefetch_left_) {
    const uint32_t block = in_order_[early_prefetch_left_ - 1];
    if (MayReadEarly(block) && !ReadAhead(block)) return;
  }
}

}  // namespace forebay::daemon
