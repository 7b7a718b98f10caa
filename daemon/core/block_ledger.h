// The table of a job's blocks: of which step each is, in which swap slot, with which checksum. There is
// no other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <vector>

#include "daemon/core/events.h"
#include "nvme/slot_map.h"

namespace forebay::daemon {

// A block that is written to swap goes to a free slot, where it is pending: the one it had before
// stays current until Publish() makes all pending versions current at once. A job has two slots for
// each swapped block, so that there is always one for the next version; a block that is written
// twice before publication goes to its pending slot again.
//
// What an early update writes, before its step is decided, is neither: it becomes pending with AcceptEarly().
//
// A slot whose write failed is used again only when no other is free. A path on which a write failed
// gets new writes only when no other path has a free slot, until a write to it succeeds.
class BlockLedger {
 public:
  struct Version {
    // Empty: in DRAM, or zeros that were never written.
    std::optional<nvme::Slot> slot = {};
    uint64_t checksum = 0;
    // 0: as before the first step.
    uint64_t written_step = 0;
    WeightsDigests weights_digests = {};  // of a block with a plane of weights
  };

  // Where a block is written. `pause`: a write to its path failed a moment ago.
  struct Target {
    nvme::Slot slot;
    bool pause = false;
  };

  BlockLedger(uint32_t blocks, const std::vector<nvme::Slot>& slots);

  // What readers and checkpoints see.
  const Version& current(uint32_t block) const { return blocks_[block].current; }
  // What the running step has made of the block so far.
  const Version& newest(uint32_t block) const;

  // The slot for the block's next version, until EndWrite() or OnWriteFailed().
  //
  // Errors  nothing  no slot is left.
  std::optional<Target> BeginWrite(uint32_t block);
  void EndWrite(uint32_t block, uint64_t checksum, uint64_t step,
                WeightsDigests weights_digests = {});
  void OnWriteFailed(uint32_t block);

  // The write of an early update has ended; then the step is decided, or the update is of no use.
  void EndEarlyWrite(uint32_t block, uint64_t checksum, uint64_t step,
                     WeightsDigests weights_digests = {});
  void AcceptEarly(uint32_t block);
  void DropEarly(uint32_t block);
  // The write in flight has ended well, and is of no use.
  void CancelWrite(uint32_t block);

  // A block in DRAM was updated in place.
  void SetInPlace(uint32_t block, uint64_t step);

  // One event: every pending version becomes current, the slots of those before are free.
  void Publish();
  // The same for one block, between steps: it was moved to swap.
  void PublishBlock(uint32_t block);
  // Between steps: the block was moved to DRAM, its slot is free.
  void SetResident(uint32_t block);

  // Whether BeginWrite() would give a slot on a path that does not fail.
  bool has_working_slot() const;
  // Paths on which the last write failed.
  std::vector<bool> failing_paths() const;
  void AddSlots(const std::vector<nvme::Slot>& slots);
  // Takes up to `count` slots out of the table: free ones whose last write did not fail.
  std::vector<nvme::Slot> RemoveFreeSlots(size_t count);
  // All slots of the job.
  const std::set<nvme::Slot>& slots() const { return slots_; }

  // CHECKs that each slot has exactly one use.
  void CheckInvariants() const;

 private:
  struct Block {
    Version current;
    std::optional<Version> pending;
    std::optional<Version> early;  // of the step that is not decided yet
    // Of the write in flight.
    std::optional<nvme::Slot> writing;
  };
  struct Path {
    std::set<nvme::Slot> free;
    uint64_t slots = 0;
    bool failing = false;
  };

  // A free slot of the path with the largest free share, so that a step keeps every path busy; paths
  // that fail come last.
  std::optional<nvme::Slot> ChooseSlot() const;
  void Free(const nvme::Slot& slot) { paths_[slot.path].free.insert(slot); }

  std::set<nvme::Slot> slots_;
  std::vector<Path> paths_;
  // Slots whose last write failed, oldest first.
  std::vector<nvme::Slot> failed_;
  std::vector<Block> blocks_;
};

}  // namespace forebay::daemon
