#include "daemon/core/block_ledger.h"

#include <algorithm>
#include <utility>

#include "protocol/os/check.h"

namespace forebay::daemon {

BlockLedger::BlockLedger(uint32_t blocks, const std::vector<nvme::Slot>& slots) : blocks_(blocks) {
  for (const nvme::Slot& slot : slots) AddSlot(slot);
}

void BlockLedger::AddSlot(const nvme::Slot& slot) {
  if (slot.path >= paths_.size()) paths_.resize(slot.path + 1);
  ++paths_[slot.path].slots;
  slots_.push_back(slot);
  Free(static_cast<uint32_t>(slots_.size() - 1));
}

bool BlockLedger::has_working_slot() const {
  const std::optional<uint32_t> slot = Choose();
  return slot.has_value() && !paths_[slots_[*slot].path].failing;
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

// The path with the largest free share, so that a step keeps every path busy; paths that fail come
// last.
std::optional<uint32_t> BlockLedger::Choose() const {
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
  FOREBAY_CHECK(!of.writing);
  if (of.pending_slot) {
    of.writing = of.pending_slot;
    return Target{.slot = slots_[*of.writing]};
  }
  of.writing = Choose();
  if (of.writing) {
    Path& path = paths_[slots_[*of.writing].path];
    path.free.erase(*of.writing);
    return Target{.slot = slots_[*of.writing], .pause = path.failing};
  }
  if (failed_.empty()) return std::nullopt;
  of.writing = failed_.front();
  failed_.erase(failed_.begin());
  const nvme::Slot& slot = slots_[*of.writing];
  return Target{.slot = slot, .pause = paths_[slot.path].failing};
}

void BlockLedger::EndWrite(uint32_t block, uint64_t checksum, uint64_t step) {
  Block& of = blocks_[block];
  FOREBAY_CHECK(of.writing.has_value());
  of.pending_slot = std::exchange(of.writing, std::nullopt);
  of.pending =
      Version{.slot = slots_[*of.pending_slot], .checksum = checksum, .written_step = step};
  paths_[of.pending->slot->path].failing = false;
}

void BlockLedger::OnWriteFailed(uint32_t block) {
  Block& of = blocks_[block];
  FOREBAY_CHECK(of.writing.has_value());
  const uint32_t slot = *std::exchange(of.writing, std::nullopt);
  // A pending version that was being written again is lost with its slot; its bytes are in staging.
  if (of.pending_slot == slot) {
    of.pending_slot.reset();
    of.pending.reset();
  }
  failed_.push_back(slot);
  paths_[slots_[slot].path].failing = true;
}

void BlockLedger::SetInPlace(uint32_t block, uint64_t step) {
  blocks_[block].pending = Version{.written_step = step};
}

void BlockLedger::Publish() {
  for (Block& block : blocks_) {
    FOREBAY_CHECK(!block.writing);
    if (!block.pending) continue;
    if (block.current_slot) Free(*block.current_slot);
    block.current = *std::exchange(block.pending, std::nullopt);
    block.current_slot = std::exchange(block.pending_slot, std::nullopt);
  }
}

uint32_t BlockLedger::free_slots() const {
  size_t count = 0;
  for (const Path& path : paths_) count += path.free.size();
  return static_cast<uint32_t>(count);
}

void BlockLedger::CheckInvariants() const {
  std::vector<uint32_t> uses(slots_.size(), 0);
  for (const Path& path : paths_) {
    for (const uint32_t slot : path.free) ++uses[slot];
  }
  for (const uint32_t slot : failed_) ++uses[slot];
  for (const Block& block : blocks_) {
    if (block.current_slot) ++uses[*block.current_slot];
    if (block.pending_slot) ++uses[*block.pending_slot];
    if (block.writing && block.writing != block.pending_slot) ++uses[*block.writing];
  }
  FOREBAY_CHECK(std::all_of(uses.begin(), uses.end(), [](uint32_t count) { return count == 1; }));
}

}  // namespace forebay::daemon
