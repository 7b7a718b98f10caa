// SPDX-License-Identifier: Apache-2.0
// The node's staging slots, and which blocks of a job they hold.
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
  // `memory` outlives it.
  explicit StagingPool(uint32_t slots,
                       std::pmr::memory_resource* memory = std::pmr::get_default_resource());

  std::pmr::memory_resource* memory() const { return free_.get_allocator().resource(); }

  // Allocates the lowest free slot, if more than `kept` slots are free.
  std::optional<uint32_t> AllocateFree(uint32_t kept = 0);

  // Allocates a free slot, or else the slot of a block that its job can do without now (StagedBlocks::Reclaim). Blocks of the
  // asking job go first.
  std::optional<uint32_t> AllocateUrgent(StagedBlocks& asking);

  // Allocates this slot, which is free.
  void Take(uint32_t slot);
  void Release(uint32_t slot);

  // Keeps a slot that the disk may still write to. Once released, the slot is free only after Return().
  void Keep(uint32_t slot);
  void Return(uint32_t slot);

  void Join(StagedBlocks& blocks) { jobs_.push_back(&blocks); }
  void Leave(StagedBlocks& blocks);

  uint32_t slots() const { return slots_; }
  // Number of slots that blocks use. Slots that are released and kept are neither used nor free.
  uint32_t used() const { return slots_ - static_cast<uint32_t>(free_.size()) - kept(); }
  uint32_t kept() const;

 private:
  uint32_t slots_;
  std::pmr::set<uint32_t> free_;
  std::pmr::map<uint32_t, bool> kept_;  // true: it was released meanwhile
  std::vector<StagedBlocks*> jobs_;     // in the order of joining; borrowed
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
    bool cancelled = false;   // drop it when its read is done
    bool prefetched = false;  // its read was begun before an update waited for it
  };

  // `may_reclaim` is true if the job can do without a block that is kReady. `position` is the block's place in the order of
  // update.
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
  // Adds a block in use that the previous daemon left in the slot. Called on a new table.
  void Adopt(uint32_t block, uint32_t slot) {
    pool_.Take(slot);
    blocks_.emplace(block, Staged{.slot = slot, .state = State::kInUse});
  }
  void Drop(uint32_t block);  // frees its slot

  // Allocates a slot for a read ahead: a free one, if more than `kept` slots are free. AllocateUrgent() is for a read that is
  // waited for: see StagingPool.
  std::optional<uint32_t> AllocateFree(uint32_t kept) { return Waited(pool_.AllocateFree(kept)); }
  std::optional<uint32_t> AllocateUrgent() { return Waited(pool_.AllocateUrgent(*this)); }
  void Release(uint32_t slot) { pool_.Release(slot); }  // the slot holds no block of this table

  // True if an allocation has failed, or a block was reclaimed for another job, since the flag was cleared. The job must try
  // again when anything changes.
  bool waits_for_slot() const { return waits_for_slot_; }
  void clear_waits_for_slot() { waits_for_slot_ = false; }
  // Records that the job waits for something else of the node, and must try again in the same way.
  void set_waits() { waits_for_slot_ = true; }

  // Drops the last block, in the order of update, that is kReady and that the job can do without;
  // returns its slot, nothing if there is no such block.
  std::optional<uint32_t> Reclaim();

  // Like Reclaim(), for a block that `may_go` says can go.
  std::optional<uint32_t> ReclaimWhere(const std::function<bool(uint32_t block)>& may_go);

  // Number of times that a block that had been read lost its slot to another use before it was used.
  uint64_t reclaimed() const { return reclaimed_; }

  // Returns the first position of a block that was dropped since the last call; UINT32_MAX: none was.
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
