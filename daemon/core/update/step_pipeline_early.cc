// SPDX-License-Identifier: Apache-2.0
// Update at arrival: the part of StepPipeline between the announcement of a step and its decision.

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "daemon/core/update/step_pipeline.h"
#include "protocol/os/check.h"

namespace forebay::daemon {

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
  const std::vector<uint32_t> stale = gathered_.CountSums(partition, begin, end, is_last);
  FOREBAY_CHECK(stale.empty() || !running_);
  DropEarly(stale, Transition::kSumsChanged);
}

void StepPipeline::ForgetSums() {
  if (!running_) DropEarly(Transition::kSumsForgotten);
  gathered_.ForgetSums();
  sums_.ForgetGathered();
}

void StepPipeline::DropEarly(Transition reason) {
  if (!std::exchange(is_early_, false)) return;
  const std::pmr::vector<uint32_t> blocks(blocks_.early().begin(), blocks_.early().end(),
                                          io_.memory());
  DropEarly(blocks, reason);
  ForgetPrefetchErrors();  // the blocks that backward was to need first were read ahead
}

void StepPipeline::DropEarlyUpdateOf(uint32_t block) {
  if (blocks_.is_early(block)) DropEarly({&block, 1}, Transition::kMovedAway);
}

void StepPipeline::DropEarly(std::span<const uint32_t> blocks, Transition reason) {
  EarlyUpdatesDropped dropped{.job = io_.job(), .blocks = {}};
  for (const uint32_t block : blocks) Drop(block, reason, dropped);
  if (!dropped.blocks.empty()) io_.actions().Emit(std::move(dropped));
}

void StepPipeline::Drop(uint32_t block, Transition reason, EarlyUpdatesDropped& dropped) {
  const BlockState before = blocks_.at(block).state;
  if (before.phase == Phase::kWritten || before.purpose == Purpose::kBeside) {
    ledger_.DropEarly(block);
    sums_.SetUpdatedEarly(block, false);
  }
  blocks_.Apply(block, reason);
  gathered_.OnEnded(block);
  dropped.blocks.push_back(block);
  ++counters_.dropped_updates;
}

// Drops early updates that the decision cannot accept: updates with other scalars than the decided ones, updates
// of a parameter that has no gradient in the step, and updates of weights that a reader has leased.
void StepPipeline::AdoptEarly(bool is_as_announced) {
  const bool same = is_early_ && is_as_announced;
  const std::pmr::vector<uint32_t> blocks(blocks_.early().begin(), blocks_.early().end(),
                                          io_.memory());
  EarlyUpdatesDropped dropped{.job = io_.job(), .blocks = {}};
  for (const uint32_t block : blocks) {
    const std::pmr::vector<BlockRun> runs = map_.Runs(block, io_.memory());
    const bool is_whole =
        std::ranges::all_of(runs, [this](const BlockRun& run) { return order_.params[run.param]; });
    if (!same) {
      Drop(block, Transition::kScalarsDiffer, dropped);
    } else if (!is_whole) {
      Drop(block, Transition::kGradientMissing, dropped);
    } else if (IsLeased(block)) {
      Drop(block, Transition::kWeightsLeased, dropped);
    }
  }
  if (!dropped.blocks.empty()) io_.actions().Emit(std::move(dropped));
  is_early_ = false;
  gathered_.ForgetSums();
}

// Treats blocks that the previous daemon has written as early updates that the decision has accepted. Blocks that the previous
// daemon had in staging slots become ready, even if part of their update was done.
void StepPipeline::AdoptKept(const KeptUpdate& update) {
  for (uint32_t block = 0; block < map_.blocks(); ++block) {
    const KeptUpdate::Block& of = update.blocks[block];
    if (of.staging_slot) blocks_.Apply(block, Transition::kResumed);
    if (of.written) blocks_.RecoverWritten(block, of.weights_slot, of.overflows);
  }
}

// Makes the early update of a block part of the running step.
void StepPipeline::AcceptEarly(uint32_t block) {
  blocks_.Apply(block, Transition::kAccepted);
  ++counters_.early_updates;
  overflowed_masters_ += blocks_.at(block).overflows;
  if (blocks_.phase(block) != Phase::kWritten) return;
  ledger_.AcceptEarly(block);
  RecordWritten(block);
  EndAccepted(block);
}

// Ends the update of a block that was begun early and is written, or lets its new weights be installed.
void StepPipeline::EndAccepted(uint32_t block) {
  if (blocks_.at(block).weights_slot) {
    to_install_.insert(position_[block]);
    return;
  }
  blocks_.Apply(block, Transition::kCompleted);
  EndAcceptedUpdate(block);
}

uint64_t StepPipeline::NewWeightsOffset(uint32_t slot, uint64_t block_elem) const {
  return plan_.early_weights_offset + (uint64_t{slot} * plan_.block_elems + block_elem) *
                                          protocol::SizeBytes(layout_->spec().dtype);
}

void StepPipeline::StartInstall(uint32_t block) {
  ++updating_;
  to_install_.erase(position_[block]);
  blocks_.Apply(block, Transition::kInstall);
  InstallWeights action{.block = block, .copies = std::pmr::vector<BytesCopy>(io_.memory())};
  const uint32_t slot = *blocks_.at(block).weights_slot;
  const uint64_t width = protocol::SizeBytes(layout_->spec().dtype);
  for (const BlockRun& run : map_.Runs(block, io_.memory())) {
    action.copies.push_back(
        {.from_bytes = NewWeightsOffset(slot, run.block_elem),
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
  blocks_.Apply(block, Transition::kInstalled);
  EndAcceptedUpdate(block);
}

void StepPipeline::EndAcceptedUpdate(uint32_t block) {
  gathered_.OnEnded(block);
  FinishPartitionsOf(block);
  --blocks_left_;
}

bool StepPipeline::has_early_tasks() const {
  return blocks_.count(Phase::kUpdating, Purpose::kEarly) +
             blocks_.count(Phase::kWriting, Purpose::kEarly) +
             blocks_.count(Phase::kDropped, Purpose::kEarly) >
         0;
}

void StepPipeline::PumpEarly() {
  if (!is_early_ || running_ || abandoned_ || early_failed_) return;
  StartEarlyReads();
  StartEarlyUpdates();
}

// True while early updates are allowed and the job has tasks. Gradients may wait for early updates then.
bool StepPipeline::HasEarlyWork() const { return is_early_ && !early_failed_ && !io_.idle(); }

bool StepPipeline::MayReadEarly(uint32_t block) const {
  return MayReadAhead(block) && gathered_.HasPlace(block);
}

void StepPipeline::StartEarlyReads() {
  if (AreAllPathsBusy()) return;
  for (const uint32_t position : gathered_.waiting()) {
    const uint32_t block = in_order_[position];
    if (!MayReadEarly(block) || IsPathBusy(PathOf(block)) || !sums_.IsThere(block)) continue;
    std::optional<uint32_t> slot = AllocateForReadAhead();
    // A block that was read ahead for gradients that do not arrive must not hold its slot permanently.
    const auto waits = [this](uint32_t other) {
      return gathered_.waiting().contains(position_[other]) && gathered_.HasPlace(other) &&
             sums_.IsThere(other);
    };
    const bool goes_on = has_early_tasks() || std::ranges::any_of(blocks_.staged(), waits);
    if (!slot && !goes_on) {
      slot = blocks_.ReclaimWhere([&](uint32_t other) { return !waits(other); });
    }
    if (!slot) return;
    StartRead(block, *slot, Transition::kReadEarly);
  }
}

void StepPipeline::StartEarlyUpdates() {
  while (updating_ < workers_) {
    std::optional<uint32_t> first;
    for (const uint32_t block : blocks_.staged()) {
      if (blocks_.phase(block) != Phase::kReady || !gathered_.waiting().contains(position_[block]))
        continue;
      if (placement_.WhereBlock(block).comes_to_dram() || !gathered_.HasPlace(block) ||
          !sums_.IsThere(block)) {
        continue;
      }
      if (!first || position_[block] < position_[*first]) first = block;
    }
    if (!first) return;
    CountUpdate(*first);
    gathered_.OnBegun(*first);
    blocks_.BeginEarly(*first, gathered_.NewWeightsOf(*first));
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
