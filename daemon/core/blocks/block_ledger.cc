// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/blocks/block_ledger.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

#include "protocol/os/check.h"

namespace forebay::daemon {

BlockLedger::BlockLedger(uint32_t blocks, const std::vector<nvme::Slot>& slots,
                         PathTable& path_table, std::pmr::memory_resource* memory,
                         std::optional<uint32_t> weights_parts)
    : table_(path_table), slots_(memory), blocks_(blocks + weights_parts.value_or(0)) {
  if (weights_parts) durable_.resize(blocks_.size());
  for (uint32_t path = 0; path < path_table.paths(); ++path) {
    paths_.push_back({.free = std::pmr::set<nvme::Slot>(memory)});
  }
  AddSlots(slots);
}

void BlockLedger::AddSlots(const std::vector<nvme::Slot>& slots) {
  for (const nvme::Slot& slot : slots) AddSlot(slot);
}

void BlockLedger::AddSlot(const nvme::Slot& slot) {
  FOREBAY_CHECK(slot.path < paths_.size() && slots_.insert(slot).second);
  Free(slot);
}

std::pmr::vector<nvme::Slot> BlockLedger::RemoveFreeSlots(size_t count, Suspects suspects) {
  std::pmr::vector<nvme::Slot> removed(slots_.get_allocator());
  for (auto failed = failed_.begin(); failed != failed_.end() && removed.size() < count;) {
    if (!table_.is_marked(failed->path)) {
      ++failed;
      continue;
    }
    removed.push_back(*failed);
    failed = failed_.erase(failed);
  }
  while (removed.size() < count) {
    const std::optional<uint32_t> path = ChooseSurplus(suspects);
    if (!path) break;
    // The last free slot goes: the first ones are used again and again.
    std::pmr::set<nvme::Slot>& free = paths_[*path].free;
    removed.push_back(*std::prev(free.end()));
    free.erase(removed.back());
  }
  for (const nvme::Slot& slot : removed) slots_.erase(slot);
  return removed;
}

std::optional<uint32_t> BlockLedger::ChooseSurplus(Suspects suspects) const {
  std::optional<uint32_t> best;
  const auto is_better = [this](uint32_t path, uint32_t than) {
    if (table_.is_marked(path) != table_.is_marked(than)) return table_.is_marked(path);
    return static_cast<double>(paths_[path].free.size()) * table_.share(than) >
           static_cast<double>(paths_[than].free.size()) * table_.share(path);
  };
  for (uint32_t path = 0; path < paths_.size(); ++path) {
    if (paths_[path].free.empty()) continue;
    if (suspects == Suspects::kKept && table_.is_suspect(path) && !table_.is_marked(path)) continue;
    if (!best || is_better(path, *best)) best = path;
  }
  return best;
}

bool BlockLedger::has_working_slot() const {
  const std::optional<uint32_t> path = ChoosePath();
  return path.has_value() && table_.works(*path);
}

const BlockLedger::Version& BlockLedger::newest(uint32_t block) const {
  const Block& of = blocks_[block];
  return of.pending ? *of.pending : of.current;
}

std::optional<uint32_t> BlockLedger::ChoosePath() const {
  std::optional<uint32_t> best;
  const auto is_better = [this](uint32_t path, uint32_t than) {
    if (table_.is_marked(path) != table_.is_marked(than)) return table_.is_marked(than);
    if (table_.is_suspect(path) != table_.is_suspect(than)) return table_.is_suspect(than);
    return paths_[path].credit + table_.share(path) > paths_[than].credit + table_.share(than);
  };
  for (uint32_t path = 0; path < paths_.size(); ++path) {
    if (!paths_[path].free.empty() && (!best || is_better(path, *best))) best = path;
  }
  return best;
}

bool BlockLedger::must_use_marked_path() const {
  const std::optional<uint32_t> path = ChoosePath();
  return table_.any_marked() && (!path || table_.is_marked(*path));
}

std::optional<uint32_t> BlockLedger::LackingPath() const {
  std::optional<uint32_t> next;
  for (uint32_t path = 0; path < paths_.size(); ++path) {
    if (!table_.works(path)) continue;
    const bool is_better = !next || paths_[path].credit + table_.share(path) >
                                        paths_[*next].credit + table_.share(*next);
    if (is_better) next = path;
  }
  const bool lacks = next && paths_[*next].free.empty() && paths_[*next].credit >= kCreditMin;
  return lacks ? next : std::nullopt;
}

// Adds its share of `blocks` to the credit of each working path, and subtracts `blocks` from the credit of `path`, which got
// all of them.
void BlockLedger::Count(uint32_t path, double blocks) {
  if (!table_.works(path)) return;
  double sum = 0;
  for (uint32_t i = 0; i < paths_.size(); ++i) sum += table_.works(i) ? table_.share(i) : 0;
  for (uint32_t i = 0; i < paths_.size(); ++i) {
    if (!table_.works(i)) continue;
    const double credit = paths_[i].credit + blocks * (table_.share(i) / sum - (i == path ? 1 : 0));
    paths_[i].credit = std::clamp(credit, -kCreditMax, kCreditMax);
  }
}

std::optional<BlockLedger::Target> BlockLedger::BeginWrite(uint32_t block) {
  Block& of = blocks_[block];
  FOREBAY_CHECK(!of.writing && !of.early && !of.pending);
  return AllocateSlot(of.writing);
}

std::optional<BlockLedger::Target> BlockLedger::AllocateSlot(std::optional<nvme::Slot>& slot) {
  if (const std::optional<uint32_t> path = ChoosePath()) {
    slot = *paths_[*path].free.begin();
    paths_[*path].free.erase(paths_[*path].free.begin());
    Count(*path, 1);
  } else if (!failed_.empty()) {
    slot = failed_.front();
    failed_.erase(failed_.begin());
  } else {
    return std::nullopt;
  }
  return Target{.slot = *slot, .pause = table_.is_suspect(slot->path)};
}

void BlockLedger::Free(const nvme::Slot& slot) {
  doubted_.erase(slot);
  paths_[slot.path].free.insert(slot);
}

void BlockLedger::Release(uint32_t entry, const nvme::Slot& slot) {
  const auto names = [&slot](const std::optional<Version>& version) {
    return version && version->slot == slot;
  };
  const Block& of = blocks_[entry];
  if (of.current.slot == slot || names(of.pending) || names(of.early)) return;
  if (!durable_.empty()) {
    const Durable& durable = durable_[entry];
    if (names(durable.next) || names(durable.last) || names(durable.before)) return;
  }
  Free(slot);
}

void BlockLedger::EndWrite(uint32_t block, uint64_t checksum, uint64_t step,
                           WeightsDigests weights_digests) {
  Block& of = blocks_[block];
  FOREBAY_CHECK(of.writing.has_value());
  table_.OnSucceeded(of.writing->path, Direction::kWrite);
  of.pending = Version{.slot = std::exchange(of.writing, std::nullopt),
                       .checksum = checksum,
                       .written_step = step,
                       .weights_digests = std::move(weights_digests)};
}

void BlockLedger::OnWriteFailed(uint32_t block) {
  Block& of = blocks_[block];
  FOREBAY_CHECK(of.writing.has_value());
  const nvme::Slot slot = *std::exchange(of.writing, std::nullopt);
  failed_.push_back(slot);
  table_.OnFailed(slot.path, Direction::kWrite);
}

void BlockLedger::EndEarlyWrite(uint32_t block, uint64_t checksum, uint64_t step,
                                WeightsDigests weights_digests) {
  EndWrite(block, checksum, step, std::move(weights_digests));
  blocks_[block].early = std::exchange(blocks_[block].pending, std::nullopt);
}

void BlockLedger::AcceptEarly(uint32_t block) {
  Block& of = blocks_[block];
  FOREBAY_CHECK(of.early && !of.pending && !of.writing);
  of.pending = std::exchange(of.early, std::nullopt);
}

void BlockLedger::DropEarly(uint32_t block) {
  const std::optional<Version> early = std::exchange(blocks_[block].early, std::nullopt);
  FOREBAY_CHECK(early && early->slot);
  Release(block, *early->slot);
}

void BlockLedger::CancelWrite(uint32_t block) {
  FOREBAY_CHECK(blocks_[block].writing.has_value());
  table_.OnSucceeded(blocks_[block].writing->path, Direction::kWrite);
  DropWrite(block);
}

void BlockLedger::DropWrite(uint32_t block) {
  Block& of = blocks_[block];
  FOREBAY_CHECK(of.writing && !of.pending);
  Free(*std::exchange(of.writing, std::nullopt));
}

void BlockLedger::SetInPlace(uint32_t block, uint64_t step) {
  blocks_[block].pending = Version{.written_step = step};
  SetChanged(block);
}

void BlockLedger::Publish() {
  for (uint32_t block = 0; block < blocks_.size(); ++block) PublishBlock(block);
}

// ---------------------------------------------------------------------------------- durable steps

void BlockLedger::SetChanged(uint32_t entry) {
  if (!durable_.empty()) durable_[entry].is_changed = true;
}

std::vector<uint32_t> BlockLedger::BeginDurable() {
  std::vector<uint32_t> unsaved;
  for (uint32_t entry = 0; entry < durable_.size(); ++entry) {
    Durable& durable = durable_[entry];
    FOREBAY_CHECK(!durable.next && !durable.saving);
    const Version& current = blocks_[entry].current;
    if (current.slot) {
      durable.next = current;
    } else if (!durable.is_changed) {
      durable.next = durable.last;
    } else {
      unsaved.push_back(entry);
    }
  }
  return unsaved;
}

std::optional<BlockLedger::Target> BlockLedger::BeginSave(uint32_t entry) {
  Durable& durable = durable_[entry];
  FOREBAY_CHECK(!durable.saving && !durable.next);
  return AllocateSlot(durable.saving);
}

void BlockLedger::EndSave(uint32_t entry, uint64_t checksum, uint64_t step) {
  Durable& durable = durable_[entry];
  FOREBAY_CHECK(durable.saving.has_value());
  table_.OnSucceeded(durable.saving->path, Direction::kWrite);
  durable.next = Version{.slot = std::exchange(durable.saving, std::nullopt),
                         .checksum = checksum,
                         .written_step = step};
  durable.is_changed = false;
}

void BlockLedger::OnSaveFailed(uint32_t entry) {
  const nvme::Slot slot = *std::exchange(durable_[entry].saving, std::nullopt);
  failed_.push_back(slot);
  table_.OnFailed(slot.path, Direction::kWrite);
}

void BlockLedger::Doubt(const std::vector<nvme::Slot>& slots, std::set<uint32_t>& paths) {
  if (!is_durable()) return;
  const std::set<nvme::Slot> all(slots.begin(), slots.end());
  for (uint32_t entry = 0; entry < durable_.size(); ++entry) {
    const Block& of = blocks_[entry];
    const auto doubt = [&](const Version& version) {
      if (!version.slot || !all.contains(*version.slot)) return;
      if (doubted_.insert(*version.slot).second) paths.insert(version.slot->path);
    };
    doubt(of.current);
    if (of.pending) doubt(*of.pending);
    if (of.early) doubt(*of.early);
    if (durable_[entry].next) doubt(*durable_[entry].next);
  }
}

void BlockLedger::AddTo(EntrySlots& slots, const std::optional<nvme::Slot>& slot) {
  if (!slot || std::ranges::find(slots, slot) != slots.end()) return;
  *std::find(slots.begin(), slots.end(), std::nullopt) = slot;
}

BlockLedger::EntrySlots BlockLedger::DurableSlots(uint32_t entry) const {
  EntrySlots slots;
  if (durable_.empty()) return slots;
  const Durable& durable = durable_[entry];
  for (const std::optional<Version>* version : {&durable.next, &durable.last, &durable.before}) {
    if (*version) AddTo(slots, (*version)->slot);
  }
  return slots;
}

uint32_t BlockLedger::slots_held(uint32_t entry) const {
  EntrySlots slots = DurableSlots(entry);
  AddTo(slots, blocks_[entry].current.slot);
  return static_cast<uint32_t>(std::find(slots.begin(), slots.end(), std::nullopt) - slots.begin());
}

bool BlockLedger::KeepsCurrent(uint32_t entry) const {
  const std::optional<nvme::Slot>& current = blocks_[entry].current.slot;
  const EntrySlots slots = DurableSlots(entry);
  return current && std::ranges::find(slots, current) != slots.end();
}

std::vector<uint32_t> BlockLedger::DropDoubtedCopies() {
  std::vector<uint32_t> dropped;
  for (uint32_t entry = 0; entry < durable_.size(); ++entry) {
    Durable& durable = durable_[entry];
    if (!durable.next || !IsInDoubt(*durable.next) || blocks_[entry].current.slot) continue;
    const nvme::Slot slot = *durable.next->slot;
    durable.next.reset();
    durable.is_changed = true;
    doubted_.erase(slot);
    failed_.push_back(slot);
    dropped.push_back(entry);
  }
  return dropped;
}

std::optional<uint32_t> BlockLedger::FindDoubted() const {
  if (!has_doubted()) return std::nullopt;
  for (uint32_t block = 0; block < blocks_.size(); ++block) {
    if (IsInDoubt(block)) return block;
  }
  return std::nullopt;
}

bool BlockLedger::ForgetDoubt(uint32_t block) {
  const std::optional<nvme::Slot>& slot = blocks_[block].current.slot;
  return slot && doubted_.erase(*slot) > 0;
}

bool BlockLedger::is_next_doubted() const {
  return has_doubted() && std::ranges::any_of(durable_, [this](const Durable& durable) {
           return durable.next && IsInDoubt(*durable.next);
         });
}

void BlockLedger::FinishDurable(Last last) {
  for (uint32_t entry = 0; entry < durable_.size(); ++entry) {
    Durable& durable = durable_[entry];
    std::optional<Version> gone = durable.last;
    if (last == Last::kBecomesBefore) std::swap(gone, durable.before);
    durable.last = std::exchange(durable.next, std::nullopt);
    if (gone && gone->slot) Release(entry, *gone->slot);
  }
}

void BlockLedger::Adopt(uint32_t entry, Recorded recorded) {
  EntrySlots slots;
  AddTo(slots, recorded.current.slot);
  for (const auto* version : {&recorded.early, &recorded.last, &recorded.before}) {
    if (*version) AddTo(slots, (*version)->slot);
  }
  for (const std::optional<nvme::Slot>& slot : slots) {
    FOREBAY_CHECK(!slot || paths_[slot->path].free.erase(*slot) == 1);
  }
  blocks_[entry].current = std::move(recorded.current);
  blocks_[entry].early = std::move(recorded.early);
  if (!is_durable()) return;
  durable_[entry].last = std::move(recorded.last);
  durable_[entry].before = std::move(recorded.before);
  durable_[entry].is_changed = recorded.is_changed;
}

void BlockLedger::PublishBlock(uint32_t block) {
  Block& of = blocks_[block];
  FOREBAY_CHECK(!of.writing);
  if (!of.pending) return;
  const std::optional<nvme::Slot> before = of.current.slot;
  of.current = *std::exchange(of.pending, std::nullopt);
  if (!before) return;
  if (is_durable() && of.current.slot) {
    // The step that is being made durable now names the new slot, which has the same bytes.
    std::optional<Version>& next = durable_[block].next;
    if (next && next->slot == before) next = of.current;
  }
  Release(block, *before);
}

void BlockLedger::SetResident(uint32_t block) {
  FOREBAY_CHECK(!blocks_[block].pending);
  const std::optional<nvme::Slot> slot = blocks_[block].current.slot;
  SetInPlace(block, blocks_[block].current.written_step);
  PublishBlock(block);
  if (durable_.empty()) return;
  const std::optional<Version>& last = durable_[block].last;
  durable_[block].is_changed = !last || last->slot != slot;
}

void BlockLedger::CheckInvariants() const {
  std::map<nvme::Slot, uint32_t> uses;
  for (const Path& path : paths_) {
    for (const nvme::Slot& slot : path.free) ++uses[slot];
  }
  for (const nvme::Slot& slot : failed_) ++uses[slot];
  for (const Block& block : blocks_) {
    if (block.current.slot) ++uses[*block.current.slot];
    if (block.pending && block.pending->slot) ++uses[*block.pending->slot];
    if (block.early) ++uses[*block.early->slot];
    if (block.writing) ++uses[*block.writing];
  }
  for (uint32_t entry = 0; entry < durable_.size(); ++entry) {
    const Durable& durable = durable_[entry];
    for (const std::optional<nvme::Slot>& slot : DurableSlots(entry)) {
      if (slot && slot != blocks_[entry].current.slot) ++uses[*slot];
    }
    if (durable.saving) ++uses[*durable.saving];
  }
  for (const nvme::Slot& slot : doubted_) FOREBAY_CHECK(uses.contains(slot));
  FOREBAY_CHECK(uses.size() == slots_.size());
  for (const auto& [slot, count] : uses) FOREBAY_CHECK(count == 1 && slots_.contains(slot));
}

}  // namespace forebay::daemon
