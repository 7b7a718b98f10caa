// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/blocks/staging.h"

#include <algorithm>
#include <utility>

#include "daemon/core/blocks/block.h"
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

std::optional<uint32_t> StagingPool::AllocateUrgent(Blocks& asking) {
  if (!free_.empty()) return AllocateFree();
  if (const std::optional<uint32_t> own = asking.Reclaim()) return own;
  for (Blocks* other : jobs_) {
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

void StagingPool::Leave(Blocks& blocks) { std::erase(jobs_, &blocks); }

}  // namespace forebay::daemon
