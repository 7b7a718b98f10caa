// SPDX-License-Identifier: Apache-2.0
// The node's staging slots.
#pragma once

#include <cstdint>
#include <map>
#include <memory_resource>
#include <optional>
#include <set>
#include <vector>

namespace forebay::daemon {

class Blocks;

// Slots of one size, shared by all jobs of the node.
class StagingPool {
 public:
  // `memory` outlives the pool.
  explicit StagingPool(uint32_t slots,
                       std::pmr::memory_resource* memory = std::pmr::get_default_resource());

  std::pmr::memory_resource* memory() const { return free_.get_allocator().resource(); }

  // Allocates the lowest free slot, if more than `kept` slots are free. Otherwise returns nullopt.
  std::optional<uint32_t> AllocateFree(uint32_t kept = 0);

  // Allocates a free slot. If no slot is free, takes the slot of a block that its job does not need now
  // (Blocks::Reclaim): first from the asking job, then from other jobs.
  std::optional<uint32_t> AllocateUrgent(Blocks& asking);

  // Allocates this slot, which is free.
  void Take(uint32_t slot);
  void Release(uint32_t slot);

  // Marks a slot as one to which the disk may still write. After Release() such a slot is free only after Return().
  void Keep(uint32_t slot);
  void Return(uint32_t slot);

  void Join(Blocks& blocks) { jobs_.push_back(&blocks); }
  void Leave(Blocks& blocks);

  uint32_t slots() const { return slots_; }
  // Returns the number of slots that blocks use. Slots that were released while marked by Keep() are neither used nor free.
  uint32_t used() const { return slots_ - static_cast<uint32_t>(free_.size()) - kept(); }
  uint32_t kept() const;

 private:
  uint32_t slots_;
  std::pmr::set<uint32_t> free_;
  std::pmr::map<uint32_t, bool> kept_;  // slots marked by Keep(); true if released
  std::vector<Blocks*> jobs_;           // in the order of Join(); not owned
};

}  // namespace forebay::daemon
