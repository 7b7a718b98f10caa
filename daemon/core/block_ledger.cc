#include "daemon/core/block_ledger.h"

#include <algorithm>
#include <map>
#include <utility>

#include "protocol/os/check.h"

namespace forebay::daemon {

BlockLedger::BlockLedger(uint32_t blocks, const std::vector<nvme::Slot>& slots) : blocks_(blocks) {
  AddSlots(slots);
}

void BlockLedger::AddSlots(const std::vector<nvme::Slot>& slots) {
  for (const nvme::Slot& slot : slots) {
    if (slot.path >= paths_.size()) paths_.resize(slot.path + 1);
    ++paths_[slot.path].slots;
    FOREBAY_CHECK(slots_.insert(slot).second);
    Free(slot);
  }
}

std::vector<nvme::Slot> BlockLedger::RemoveFreeSlots(size_t count) {
  std::vector<nvme::Slot> removed;
  while (removed.size() < count) {
    const std::optional<nvme::Slot> slot = ChooseSlot();
    if (!slot) break;
    paths_[slot->path].free.erase(*slot);
    --paths_[slot->path].slots;
    slots_.erase(*slot);
    removed.push_back(*slot);
  }
  return removed;
}

bool BlockLedger::has_working_slot() const {
  const std::optional<nvme::Slot> slot = ChooseSlot();
  return slot.has_value() && !paths_[slot->path].failing;
}

std::vector<bool> BlockLedger::failing_paths() const {
  std::vector<bool> failing;
  for (const Path& path : paths_) failing.push_back(path.failing);
  return failing;
}

const BlockLedger::Version& BlockLedger::newest(uint32_t block) const {
  const Block& of = blocks_[block];
  return of.pending ? *of.pending : of.current;
}

std::optional<nvme::Slot> BlockLedger::ChooseSlot() const {
  const Path* best = nullptr;
  for (const Path& path : paths_) {
    if (path.free.empty()) continue;
    const bool better = best == nullptr || (best->failing && !path.failing) ||
                        (best->failing == path.failing &&
                         path.free.size() * best->slots > best->free.size() * path.slots);
    if (better) best = &path;
  }
  if (best == nullptr) return std::nullopt;
  return *best->free.begin();
}

std::optional<BlockLedger::Target> BlockLedger::BeginWrite(uint32_t block) {
  Block& of = blocks_[block];
  FOREBAY_CHECK(!of.writing && !of.early);
  if (of.pending && of.pending->slot) {
    of.writing = of.pending->slot;
    return Target{.slot = *of.writing};
  }
  of.writing = ChooseSlot();
  if (of.writing) {
    paths_[of.writing->path].free.erase(*of.writing);
  } else if (!failed_.empty()) {
    of.writing = failed_.front();
    failed_.erase(failed_.begin());
  } else {
    return std::nullopt;
  }
  return Target{.slot = *of.writing, .pause = paths_[of.writing->path].failing};
}

void BlockLedger::EndWrite(uint32_t block, uint64_t checksum, uint64_t step,
                           WeightsDigests weights_digests) {
  Block& of = blocks_[block];
  FOREBAY_CHECK(of.writing.has_value());
  paths_[of.writing->path].failing = false;
  of.pending = Version{.slot = std::exchange(of.writing, std::nullopt),
                       .checksum = checksum,
                       .written_step = step,
                       .weights_digests = std::move(weights_digests)};
}

void BlockLedger::OnWriteFailed(uint32_t block) {
  Block& of = blocks_[block];
  FOREBAY_CHECK(of.writing.has_value());
  const nvme::Slot slot = *std::exchange(of.writing, std::nullopt);
  // A pending version that was being written again is lost with its slot; its bytes are in staging.
  if (of.pending && of.pending->slot == slot) of.pending.reset();
  failed_.push_back(slot);
  paths_[slot.path].failing = true;
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
  Free(*early->slot);
}

void BlockLedger::CancelWrite(uint32_t block) {
  Block& of = blocks_[block];
  FOREBAY_CHECK(of.writing && !of.pending);
  paths_[of.writing->path].failing = false;
  Free(*std::exchange(of.writing, std::nullopt));
}

void BlockLedger::SetInPlace(uint32_t block, uint64_t step) {
  blocks_[block].pending = Version{.written_step = step};
}

void BlockLedger::Publish() {
  for (uint32_t block = 0; block < blocks_.size(); ++block) PublishBlock(block);
}

void BlockLedger::PublishBlock(uint32_t block) {
  Block& of = blocks_[block];
  FOREBAY_CHECK(!of.writing);
  if (!of.pending) return;
  if (of.current.slot) Free(*of.current.slot);
  of.current = *std::exchange(of.pending, std::nullopt);
}

void BlockLedger::SetResident(uint32_t block) {
  FOREBAY_CHECK(!blocks_[block].pending);
  SetInPlace(block, blocks_[block].current.written_step);
  PublishBlock(block);
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
    const bool rewrites = block.pending && block.writing == block.pending->slot;
    if (block.writing && !rewrites) ++uses[*block.writing];
  }
  FOREBAY_CHECK(uses.size() == slots_.size());
  for (const auto& [slot, count] : uses) FOREBAY_CHECK(count == 1 && slots_.contains(slot));
}

}  // namespace forebay::daemon
