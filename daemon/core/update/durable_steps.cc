// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/update/durable_steps.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/core/blocks/block_ledger.h"
#include "daemon/core/blocks/durable_content.h"
#include "protocol/error.h"
#include "protocol/os/check.h"

namespace forebay::daemon {

bool DurableSteps::IsDue(uint64_t step) const {
  return spec_.plan.has_durable_steps() && step % spec_.plan.session.durability.steps == 0;
}

DurableJob DurableSteps::ValuesOf(Published published) const {
  return {
      .id = spec_.id,
      .name = spec_.name,
      .uid = spec_.uid,
      .run = std::move(published.run),
      .durability = spec_.plan.session.durability,
      .layout = spec_.layout,
      .world_size = spec_.world_size(),
      .block_elems = spec_.plan.block_elems,
      .slot_bytes = spec_.plan.block_bytes,
      .weights_on_swap = spec_.plan.weights_on_swap,
      .step = published.step,
      .param_updates = pipeline_.terms().updates(),
      .trace = std::move(published.trace),
      .extra_states = nullptr,
      .blocks = {},
      .weights = {},
  };
}

void DurableSteps::Begin(Published published) {
  FOREBAY_CHECK(!in_progress());
  if (is_abandoned_) return;
  std::vector<StatePart> extra_states = std::move(published.extra_states);
  next_ = std::make_shared<DurableJob>(ValuesOf(std::move(published)));
  // No step is decided while a durable step is in progress on the node, so no node is two durable steps behind. When the job
  // stops, the newest durable step may become durable a second time.
  if (spec_.is_over_nodes()) next_->before = replaces_last() ? last_->before : AsBefore(last_);
  FOREBAY_CHECK(next_->before == nullptr || next_->before->step < next_->step);
  unsaved_ = store_.ledger().BeginDurable();
  // A block on swap without a slot holds zeros that were never written.
  std::erase_if(unsaved_,
                [this](uint32_t entry) { return !is_part(entry) && !store_.is_resident(entry); });
  std::ranges::reverse(unsaved_);
  is_keeping_ = true;
  io_.Start(TaskKind::kKeepExtraStates, 0, KeepExtraStates{.parts = std::move(extra_states)});
}

StatePart DurableSteps::PartOf(uint32_t entry) const {
  if (is_part(entry)) return spec_.plan.WeightsPart(entry - store_.map().blocks());
  return {.offset_bytes = store_.placement().WhereBlock(entry).state.offset_bytes,
          .bytes = store_.map().bytes(entry)};
}

absl::Status DurableSteps::Describe(const absl::Status& status, uint32_t entry) const {
  if (!is_part(entry)) return store_.DescribeBlock(status, entry);
  return protocol::MakeError(
      protocol::IdOf(status),
      absl::StrCat(EntryName(store_.map().blocks(), entry), ": ", std::string(status.message())),
      protocol::HintOf(status));
}

void DurableSteps::Pump() {
  StartSaves();
  TryGather();
}

void DurableSteps::StartSaves() {
  // A block that moves holds one more slot until its move ends.
  if (!in_progress() || is_abandoned_ || store_.is_moving()) return;
  while (!unsaved_.empty() && saving_.size() < at_once()) {
    const uint32_t entry = unsaved_.back();
    const BlockLedger::Target target = store_.slots().AllocateSave(entry);
    unsaved_.pop_back();
    const StatePart part = PartOf(entry);
    const TaskId task = io_.Start(
        TaskKind::kSavePart, 0,
        SavePart{.arena = is_part(entry) ? SavedArena::kWeights : SavedArena::kStates,
                 .identity = EntryIdentity(spec_.id, store_.map().blocks(), entry, next_->step),
                 .offset_bytes = part.offset_bytes,
                 .bytes = part.bytes,
                 .slot = target.slot,
                 .pause = target.pause});
    saving_.emplace(task, Save{.entry = entry, .path = target.slot.path});
  }
}

void DurableSteps::OnSaved(const TaskDone& done) {
  const auto node = saving_.extract(done.task);
  FOREBAY_CHECK(!node.empty());
  const Save save = node.mapped();
  BlockLedger& ledger = store_.ledger();
  if (!done.status.ok()) {
    ledger.OnSaveFailed(save.entry);
    if (is_abandoned_) return;
    wait_ = Describe(done.status, save.entry);
    store_.slots().AddSpare();
    unsaved_.push_back(save.entry);
    return;
  }
  store_.path_table().AddTransfer({.path = save.path,
                                   .direction = Direction::kWrite,
                                   .bytes = PartOf(save.entry).bytes,
                                   .begin_ns = done.begin_ns,
                                   .end_ns = done.end_ns});
  ledger.EndSave(save.entry, done.checksum, next_->step);
  if (!is_saving() && !ledger.is_next_doubted()) wait_ = absl::OkStatus();
}

absl::Status DurableSteps::OnKept(const TaskDone& done) {
  is_keeping_ = false;
  next_->extra_states = done.extra_states;
  return done.status;
}

void DurableSteps::TryGather() {
  if (!in_progress() || is_gathered_ || is_abandoned_) return;
  if (is_keeping_ || is_saving() || store_.ledger().is_next_doubted()) return;
  const BlockLedger& ledger = store_.ledger();
  for (uint32_t block = 0; block < store_.map().blocks(); ++block) {
    const std::optional<BlockLedger::Version>& version = ledger.next_durable(block);
    next_->blocks.push_back(version ? BytesOf(*version) : std::nullopt);
  }
  for (uint32_t part = 0; part < spec_.plan.weights_parts; ++part) {
    next_->weights.push_back(*BytesOf(*ledger.next_durable(store_.map().blocks() + part)));
  }
  is_gathered_ = true;
}

void DurableSteps::OnCommitted(const absl::Status& status) {
  if (!is_gathered_) return;  // the ledger does not name this step
  wait_ = status;
  if (!status.ok()) return;
  const auto last =
      replaces_last() ? BlockLedger::Last::kReplaced : BlockLedger::Last::kBecomesBefore;
  last_ = std::exchange(next_, nullptr);
  is_gathered_ = false;
  store_.ledger().FinishDurable(last);
  if (!pipeline_.running()) store_.slots().ReturnFree();
}

void DurableSteps::OnReadFailed(const absl::Status& status) {
  if (in_progress() && store_.ledger().is_next_doubted()) wait_ = status;
}

void DurableSteps::OnDoubted(const std::vector<nvme::Slot>& slots, std::set<uint32_t>& paths) {
  BlockLedger& ledger = store_.ledger();
  ledger.Doubt(slots, paths);
  if (!in_progress() || !ledger.is_next_doubted()) return;
  if (is_abandoned_) {
    is_gathered_ = false;  // a ledger for other jobs then names the last durable step
    return;
  }
  const std::vector<uint32_t> dropped = ledger.DropDoubtedCopies();
  unsaved_.insert(unsaved_.end(), dropped.begin(), dropped.end());
  if (!is_gathered_) return;
  // The failed ledger may still hold the old DurableJob.
  next_ = std::make_shared<DurableJob>(*next_);
  next_->blocks.clear();
  next_->weights.clear();
  is_gathered_ = false;
}

// -------------------------------------------------------------------------------------------- restore

void DurableSteps::StartRestore() {
  const KeptMemory* const kept = spec_.kept();
  if (spec_.plan.has_durable_steps()) last_ = kept != nullptr ? kept->durable : spec_.recovered;
  pipeline_.terms().SetUpdates(spec_.recovered->param_updates);
  store_.Adopt(*spec_.recovered);
  if (kept != nullptr) return;
  for (uint32_t part = 0; part < spec_.plan.weights_parts; ++part) {
    to_restore_.push_back(store_.map().blocks() + part);
  }
  for (uint32_t block = 0; block < store_.map().blocks(); ++block) {
    if (last_->blocks[block] && store_.is_resident(block)) to_restore_.push_back(block);
  }
  for (const uint32_t entry : to_restore_) to_restore_bytes_ += PartOf(entry).bytes;
  StartRestores();
}

void DurableSteps::StartRestores() {
  for (; next_restore_ < to_restore_.size() && restoring_.size() < at_once(); ++next_restore_) {
    const uint32_t entry = to_restore_[next_restore_];
    const uint32_t blocks = store_.map().blocks();
    const DurableBytes& from =
        is_part(entry) ? last_->weights[entry - blocks] : *last_->blocks[entry];
    const StatePart part = PartOf(entry);
    const TaskId task =
        io_.Start(TaskKind::kRestore, 0,
                  RestorePart{.arena = is_part(entry) ? SavedArena::kWeights : SavedArena::kStates,
                              .identity = EntryIdentity(spec_.id, blocks, entry, from.written_step),
                              .checksum = from.checksum,
                              .offset_bytes = part.offset_bytes,
                              .bytes = part.bytes,
                              .slot = from.slot});
    restoring_.emplace(task, entry);
  }
}

absl::Status DurableSteps::OnRestored(const TaskDone& done) {
  const auto node = restoring_.extract(done.task);
  FOREBAY_CHECK(!node.empty());
  if (!done.status.ok()) {
    next_restore_ = to_restore_.size();
    return Describe(done.status, node.mapped());
  }
  restored_bytes_ += PartOf(node.mapped()).bytes;
  StartRestores();
  return absl::OkStatus();
}

}  // namespace forebay::daemon
