// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/update/read_ahead.h"

#include <algorithm>

#include "daemon/core/base/limits.h"

namespace forebay::daemon {

void ReadAhead::Pump() {
  next_ = std::min(next_, store_.blocks().DrainFirstDropped());
  for (; next_ < store_.map().blocks(); ++next_) {
    const uint32_t block = order_.blocks()[next_];
    if (MayRead(block) && !Read(block)) return;
  }
}

void ReadAhead::PumpBackward(const std::function<bool(uint32_t block)>& may_read) {
  for (; backward_left_ > 0; --backward_left_) {
    const uint32_t block = order_.blocks()[backward_left_ - 1];
    if (may_read(block) && !Read(block)) return;
  }
}

bool ReadAhead::MayRead(uint32_t block) const {
  const BlockLocation& location = store_.placement().WhereBlock(block);
  return store_.map().has_states(block) && location.tier != Tier::kDram &&
         !location.comes_to_dram() && store_.blocks().phase(block) == Phase::kIdle &&
         !failed_.contains(block);
}

// Leaves staging slots free for weights on swap, which backward fetches. Without free slots, fetches would drop blocks that were
// read ahead.
std::optional<uint32_t> ReadAhead::AllocateSlot() {
  return store_.blocks().AllocateFree(plan_.has_weights_on_swap() ? kStagingSlotsForWeights : 0);
}

// Begins to read a block ahead. False if the block's path is busy or no staging slot is free.
bool ReadAhead::Read(uint32_t block) {
  if (tasks_.IsPathBusy(block)) return false;
  const std::optional<uint32_t> slot = AllocateSlot();
  if (!slot) return false;
  tasks_.StartRead(block, *slot, Transition::kReadAhead);
  return true;
}

void ReadAhead::OnSwapped(uint32_t block) { next_ = std::min(next_, order_.position(block)); }

void ReadAhead::Fail(uint32_t block, const absl::Status& status) {
  failed_.insert(block);
  error_.Update(store_.DescribeBlock(status, block));
}

void ReadAhead::ForgetErrors() {
  failed_.clear();
  error_ = absl::OkStatus();
  next_ = 0;
}

}  // namespace forebay::daemon
