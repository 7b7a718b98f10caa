// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/blocks/staging.h"

#include <algorithm>
#include <utility>

#include "protocol/os/check.h"

namespace forebay::daemon {

StagingPool::StagingPool(uint32_t slots, std::pmr::memory_resource* memory)
    : slots_(slots), free_(memory), kept_(memory) {
  for (uint32_t slot = 0; slot < slots; ++slot) free_.insert(slot);
}

std::optional<uint32_t> StagingPool::AllocateFree(uint32_t kept) {
  if (free_.size() <= kept) return std::nullopt;
  return free_.extract(free_.begin()).value();
}

std::optional<uint32_t> StagingPool::AllocateUrgent(StagedBlocks& asking) {
  if (!free_.empty()) return AllocateFree();
  if (const std::optional<uint32_t> own = asking.Reclaim()) return own;
  for (StagedBlocks* other : jobs_) {
    if (const std::optional<uint32_t> slot = other->Reclaim()) return slot;
  }
  return std::nullopt;
}

void StagingPool::Take(uint32_t slot) { FOREBAY_CHECK(free_.erase(slot) == 1); }

void StagingPool::Release(uint32_t slot) {
  FOREBAY_CHECK(slot < slots_);
  if (const auto kept = kept_.find(slot); kept != kept_.end()) {
    FOREBAY_CHECK(!std::exchange(kept->second, true));
    return;
  }
  FOREBAY_CHECK(free_.insert(slot).second);
}

void StagingPool::Keep(uint32_t slot) {
  FOREBAY_CHECK(slot < slots_ && !free_.contains(slot));
  FOREBAY_CHECK(kept_.emplace(slot, false).second);
}

void StagingPool::Return(uint32_t slot) {
  const auto kept = kept_.extract(slot);
  FOREBAY_CHECK(!kept.empty());
  if (kept.mapped()) Release(slot);
}

uint32_t StagingPool::kept() const {
  return static_cast<uint32_t>(
      std::ranges::count_if(kept_, [](const auto& entry) { return entry.second; }));
}

void StagingPool::Leave(StagedBlocks& blocks) { std::erase(jobs_, &blocks); }

StagedBlocks::~StagedBlocks() {
  for (const auto& [block, staged] : blocks_) pool_.Release(staged.slot);
  pool_.Leave(*this);
}

void StagedBlocks::Drop(uint32_t block) {
  pool_.Release(blocks_.at(block).slot);
  blocks_.erase(block);
  first_dropped_ = std::min(first_dropped_, position_(block));
}

std::optional<uint32_t> StagedBlocks::Reclaim() { return ReclaimWhere(may_reclaim_); }

std::optional<uint32_t> StagedBlocks::ReclaimWhere(
    const std::function<bool(uint32_t block)>& may_go) {
  auto last = blocks_.end();
  for (auto it = blocks_.begin(); it != blocks_.end(); ++it) {
    if (it->second.state != State::kReady || !may_go(it->first)) continue;
    if (last == blocks_.end() || position_(it->first) > position_(last->first)) last = it;
  }
  if (last == blocks_.end()) return std::nullopt;
  const uint32_t slot = last->second.slot;
  waits_for_slot_ = true;
  ++reclaimed_;
  first_dropped_ = std::min(first_dropped_, position_(last->first));
  blocks_.erase(last);
  return slot;
}

uint32_t StagedBlocks::DrainFirstDropped() { return std::exchange(first_dropped_, UINT32_MAX); }

}  // namespace forebay::daemon
