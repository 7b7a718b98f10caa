// SPDX-License-Identifier: Apache-2.0
// The node's staging slots, and the blocks of a job that these slots hold.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory_resource>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace forebay::daemon {

class StagedBlocks;

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
  // (StagedBlocks::Reclaim): first from the asking job, then from other jobs.
  std::optional<uint32_t> AllocateUrgent(StagedBlocks& asking);

  // Allocates this slot, which is free.
  void Take(uint32_t slot);
  void Release(uint32_t slot);

  // Marks a slot as one to which the disk may still write. After Release() such a slot is free only after Return().
  void Keep(uint32_t slot);
  void Return(uint32_t slot);

  void Join(StagedBlocks& blocks) { jobs_.push_back(&blocks); }
  void Leave(StagedBlocks& blocks);

  uint32_t slots() const { return slots_; }
  // Returns the number of slots that blocks use. Slots that were released while marked by Keep() are neither used nor free.
  uint32_t used() const { return slots_ - static_cast<uint32_t>(free_.size()) - kept(); }
  uint32_t kept() const;

 private:
  uint32_t slots_;
  std::pmr::set<uint32_t> free_;
  std::pmr::map<uint32_t, bool> kept_;  // slots marked by Keep(); true if released
  std::vector<StagedBlocks*> jobs_;     // in the order of Join(); not owned
};

// Blocks on swap of one job that have a staging slot.
//
// Ownership  The pool outlives it.
class StagedBlocks {
 public:
  enum class State : uint8_t {
    kReading,
    kReady,  // read, neither verified nor used yet: may be dropped
    kInUse,  // being copied, updated or written
  };

  struct Staged {
    uint32_t slot = 0;
    State state = State::kReading;
    bool cancelled = false;   // drop the block when its read is done
    bool prefetched = false;  // the read began before an update waited for the block
  };

  // `may_reclaim` returns true if the job does not need a kReady block now. `position` returns the block's place in the order
  // of update.
  StagedBlocks(StagingPool& pool, std::function<bool(uint32_t block)> may_reclaim,
               std::function<uint32_t(uint32_t block)> position)
      : pool_(pool),
        may_reclaim_(std::move(may_reclaim)),
        position_(std::move(position)),
        blocks_(pool.memory()) {
    pool_.Join(*this);
  }
  StagedBlocks(const StagedBlocks&) = delete;
  StagedBlocks& operator=(const StagedBlocks&) = delete;
  ~StagedBlocks();

  bool contains(uint32_t block) const { return blocks_.contains(block); }
  Staged& at(uint32_t block) { return blocks_.at(block); }
  const std::pmr::map<uint32_t, Staged>& all() const { return blocks_; }
  void Add(uint32_t block, uint32_t slot) { blocks_.emplace(block, Staged{.slot = slot}); }
  // Adds a block in use whose bytes the previous daemon had in the slot. Called on a new table.
  void Adopt(uint32_t block, uint32_t slot) {
    pool_.Take(slot);
    blocks_.emplace(block, Staged{.slot = slot, .state = State::kInUse});
  }
  void Drop(uint32_t block);  // frees the block's slot

  // AllocateFree() allocates a slot for a read ahead: a free slot, if more than `kept` slots are free. AllocateUrgent()
  // allocates a slot for a read that a task waits for (StagingPool).
  std::optional<uint32_t> AllocateFree(uint32_t kept) { return Waited(pool_.AllocateFree(kept)); }
  std::optional<uint32_t> AllocateUrgent() { return Waited(pool_.AllocateUrgent(*this)); }
  void Release(uint32_t slot) { pool_.Release(slot); }  // the slot holds no block of this table

  // True if an allocation has failed, or another job has reclaimed a block, since clear_waits_for_slot(). The job must try
  // again when slots may have become free.
  bool waits_for_slot() const { return waits_for_slot_; }
  void clear_waits_for_slot() { waits_for_slot_ = false; }
  // Records that the job waits for another resource of the node, so that waits_for_slot() is true.
  void set_waits() { waits_for_slot_ = true; }

  // Drops the last kReady block, in the order of update, that the job does not need now. Returns the block's slot, or nullopt
  // if no such block exists.
  std::optional<uint32_t> Reclaim();

  // Like Reclaim(), for a block for which `may_go` returns true.
  std::optional<uint32_t> ReclaimWhere(const std::function<bool(uint32_t block)>& may_go);

  // Returns the number of blocks that were read and then lost their slots before they were used.
  uint64_t reclaimed() const { return reclaimed_; }

  // Returns the lowest position of a block that was dropped since the last call, or UINT32_MAX if no block was dropped.
  uint32_t DrainFirstDropped();

 private:
  std::optional<uint32_t> Waited(std::optional<uint32_t> slot) {
    if (!slot) waits_for_slot_ = true;
    return slot;
  }

  StagingPool& pool_;
  std::function<bool(uint32_t)> may_reclaim_;
  std::function<uint32_t(uint32_t)> position_;
  std::pmr::map<uint32_t, Staged> blocks_;
  bool waits_for_slot_ = false;
  uint64_t reclaimed_ = 0;
  uint32_t first_dropped_ = UINT32_MAX;
};

}  // namespace forebay::daemon
