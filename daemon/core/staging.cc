#include "daemon/core/staging.h"

#include <algorithm>
#include <utility>

#include "protocol/os/check.h"

namespace forebay::daemon {

StagingPool::StagingPool(uint32_t slots) : slots_(slots) {
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

void StagingPool::Release(uint32_t slot) {
  FOREBAY_CHECK(slot < slots_);
  FOREBAY_CHECK(free_.insert(slot).second);
}

void StagingPool::Leave(StagedBlocks& blocks) { std::erase(jobs_, &blocks); }

StagedBlocks::~StagedBlocks() {
  for (const auto& [block, staged] : blocks_) pool_.Release(staged.slot);
  pool_.Leave(*this);
}

void StagedBlocks::Drop(uint32_t block) {
  pool_.Release(blocks_.at(block).slot);
  blocks_.erase(block);
  lowest_dropped_ = std::min(lowest_dropped_, block);
}

std::optional<uint32_t> StagedBlocks::Reclaim() {
  for (auto it = blocks_.rbegin(); it != blocks_.rend(); ++it) {
    if (it->second.state != State::kReady || !may_reclaim_(it->first)) continue;
    const uint32_t slot = it->second.slot;
    waits_for_slot_ = true;
    lowest_dropped_ = std::min(lowest_dropped_, it->first);
    blocks_.erase(std::next(it).base());
    return slot;
  }
  return std::nullopt;
}

uint32_t StagedBlocks::DrainLowestDropped() { return std::exchange(lowest_dropped_, UINT32_MAX); }

}  // namespace forebay::daemon
