// SPDX-License-Identifier: Apache-2.0
// The table of a job's blocks. Only this table has the step, the swap slot and the checksum of each block.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <optional>
#include <set>
#include <vector>

#include "daemon/core/base/events.h"
#include "daemon/core/blocks/path_table.h"
#include "nvme/slot_map.h"

namespace forebay::daemon {

// A block is written to a free swap slot, and this version of the block is pending. The previous version stays current until
// Publish() makes all pending versions current at once. A job has two slots for each block on swap, so that one slot is always
// free for the next version.
//
// A version that an early update writes is neither current nor pending before its step is decided. AcceptEarly() makes it
// pending.
//
// Writes go to the paths by their shares (PathTable), in turns, so that any run of blocks uses every path. A path with more
// reads than its share gets fewer writes, because the path was slower than expected when these blocks were written.
//
// In a job with durable steps, the bytes in slots of the last two durable steps do not change. BeginDurable() defines such a
// step. The step has the current version of each entry on swap, and a copy (BeginSave) of each entry in DRAM. Entries behind
// the blocks are parts of the weights arena, which are in DRAM and have copies only.
//
// A slot is in doubt if a flush has failed since its last write: a power cut may destroy the bytes, even if reads return them
// now. A ledger does not name a slot in doubt. The bytes of such a slot are written to another slot.
//
// A slot to which the last write failed is used again only if no other slot is free. A suspect path gets new writes only if no
// other path has a free slot. A marked path gets new writes only if no suspect path has a free slot either.
//
// Invariants (CheckInvariants):
//
//   - Each slot of the job has exactly one use: it is free, its last write failed, it is being written, or it holds versions of
//     one entry.
//   - A slot in doubt has a use.
class BlockLedger {
 public:
  struct Version {
    // nullopt if the block is in DRAM, or has zeros that were never written.
    std::optional<nvme::Slot> slot = {};
    uint64_t checksum = 0;
    // Step that wrote the block. 0 if no step has written it.
    uint64_t written_step = 0;
    WeightsDigests weights_digests = {};  // set if the block has a plane of weights
  };

  // Slot to which a block is written. `pause`: the slot's path is suspect.
  struct Target {
    nvme::Slot slot;
    bool pause = false;
  };

  // `weights_parts`: number of parts of the weights arena, nullopt if the job has no durable steps. `path_table` and `memory`
  // outlive this object.
  BlockLedger(uint32_t blocks, const std::vector<nvme::Slot>& slots, PathTable& path_table,
              std::pmr::memory_resource* memory = std::pmr::get_default_resource(),
              std::optional<uint32_t> weights_parts = {});

  // Returns the block's current version, which readers and checkpoints see.
  const Version& current(uint32_t block) const { return blocks_[block].current; }
  // Returns the pending version of the running step if the block has one, otherwise the current version.
  const Version& newest(uint32_t block) const;

  // Allocates the slot to which the block's next version is written, until EndWrite() or OnWriteFailed().
  //
  // Errors  nothing  no slot is free.
  std::optional<Target> BeginWrite(uint32_t block);
  // Counts a read of a block from this path.
  void CountRead(uint32_t path) { Count(path, kReadWeight); }
  void EndWrite(uint32_t block, uint64_t checksum, uint64_t step,
                WeightsDigests weights_digests = {});
  void OnWriteFailed(uint32_t block);

  // Ends the write of an early update. AcceptEarly() then makes its version part of the decided step. DropEarly() drops it.
  void EndEarlyWrite(uint32_t block, uint64_t checksum, uint64_t step,
                     WeightsDigests weights_digests = {});
  void AcceptEarly(uint32_t block);
  void DropEarly(uint32_t block);
  // Frees the slot of a write that has succeeded but whose version is not needed.
  void CancelWrite(uint32_t block);
  // Frees the slot of a write that was not begun.
  void DropWrite(uint32_t block);

  // Records that a block in DRAM was updated in place.
  void SetInPlace(uint32_t block, uint64_t step);

  // Makes every pending version current at once. Frees the slots of the previous versions, unless durable steps name these
  // slots.
  void Publish();
  // Returns the block's pending version, or null if the running step has not written the block.
  const Version* pending(uint32_t block) const {
    return blocks_[block].pending ? &*blocks_[block].pending : nullptr;
  }
  // Makes the pending version of one block current, between steps.
  void PublishBlock(uint32_t block);
  // Records that the block was moved to DRAM between steps. Frees its slot, unless a durable step names it.
  void SetResident(uint32_t block);

  // Begins to make a step durable, with all entries as they are now. Returns the entries that have no slot and have changed
  // since they were saved, ascending.
  std::vector<uint32_t> BeginDurable();
  // Like BeginWrite(), EndWrite() and OnWriteFailed(), for a copy of an entry in DRAM.
  std::optional<Target> BeginSave(uint32_t entry);
  void EndSave(uint32_t entry, uint64_t checksum, uint64_t step);
  void OnSaveFailed(uint32_t entry);
  // Returns the entry's version in the step that is being made durable, once all entries are saved. nullopt if the entry has
  // zeros that were never written.
  const std::optional<Version>& next_durable(uint32_t entry) const { return durable_[entry].next; }
  // Records that the ledger with the step is durable. kReplaced: the last durable step has the same number and is replaced, and
  // the step before that stays.
  enum class Last : uint8_t { kBecomesBefore, kReplaced };
  void FinishDurable(Last last);
  // Records that an entry in DRAM, or a part of the weights, differs from its last saved copy.
  void SetChanged(uint32_t entry);
  bool is_durable() const { return !durable_.empty(); }

  // Records that a flush has failed, so that those of `slots` that hold bytes of this job are in doubt. Without durable steps
  // no slot is in doubt. Adds the paths of slots that were not in doubt before to `paths`.
  void Doubt(const std::vector<nvme::Slot>& slots, std::set<uint32_t>& paths);
  bool is_doubted(const nvme::Slot& slot) const { return doubted_.contains(slot); }
  bool has_doubted() const { return !doubted_.empty(); }
  // True if the current version of a block is in a slot in doubt. FindDoubted() returns the first such block.
  bool IsInDoubt(uint32_t block) const { return IsInDoubt(blocks_[block].current); }
  std::optional<uint32_t> FindDoubted() const;
  // Ends the doubt about a block that could not be written to another slot. The next ledger names the block's slot, is refused,
  // and reports the doubt again. False if the slot was not in doubt.
  bool ForgetDoubt(uint32_t block);
  // Drops copies in doubt from the step that is being made durable. Returns the entries of these copies, which must be saved
  // again.
  std::vector<uint32_t> DropDoubtedCopies();
  // True if the step that is being made durable has bytes in a slot in doubt. Copies count until DropDoubtedCopies().
  bool is_next_doubted() const;
  // Returns the number of slots that hold the entry's current version or its versions in durable steps.
  uint32_t slots_held(uint32_t entry) const;
  // True if a durable step names the slot of the current version too: the slot is not freed when another version becomes
  // current.
  bool KeepsCurrent(uint32_t entry) const;
  // Versions that an entry had in the previous daemon. Without a slot `current` is in DRAM, or has zeros that were never written.
  struct Recorded {
    Version current = {};
    std::optional<Version> early = {};   // written in a step that is not published
    std::optional<Version> last = {};    // in the last durable step
    std::optional<Version> before = {};  // in the durable step before
    bool is_changed = true;              // the bytes in DRAM may differ from those of `last`
  };
  // Sets an entry of a new BlockLedger. The slots belong to the job already.
  void Adopt(uint32_t entry, Recorded recorded);

  // True if BeginWrite() would find a free slot. has_working_slot() is true if it would find a slot on a path that works.
  bool has_free_slot() const { return ChoosePath().has_value() || !failed_.empty(); }
  bool has_working_slot() const;
  // True if a path is marked, and BeginWrite() would find no free slot on an unmarked path.
  bool must_use_marked_path() const;
  // Returns the working path whose turn the next write is, if the job has no free slot on that path and writes have passed over
  // the path before.
  std::optional<uint32_t> LackingPath() const;
  void AddSlots(const std::vector<nvme::Slot>& slots);
  void AddSlot(const nvme::Slot& slot);
  // Removes up to `count` free slots from the table. Slots on marked paths go first. Then free slots whose last write did not
  // fail go, from the path with the most free slots for its share. kKept: slots of a suspect, unmarked path stay.
  enum class Suspects : uint8_t { kIncluded, kKept };
  std::pmr::vector<nvme::Slot> RemoveFreeSlots(size_t count,
                                               Suspects suspects = Suspects::kIncluded);
  // Returns all slots of the job.
  const std::pmr::set<nvme::Slot>& slots() const { return slots_; }

  void CheckInvariants() const;

 private:
  struct Block {
    Version current;
    std::optional<Version> pending;
    std::optional<Version> early;  // written in a step that is not decided yet
    // Slot of the write in flight.
    std::optional<nvme::Slot> writing;
  };
  // State of an entry in a job with durable steps.
  struct Durable {
    // Versions of the entry in the step that is being made durable, in the last durable step, and in the durable step before.
    std::optional<Version> next;
    std::optional<Version> last;
    std::optional<Version> before;
    std::optional<nvme::Slot> saving;
    bool is_changed = true;  // the bytes in DRAM have changed since the entry was saved
  };
  struct Path {
    std::pmr::set<nvme::Slot> free;
    // Number of blocks that the path should have got by its share, minus the number of blocks that it got. Limited to the range
    // from -kCreditMax to kCreditMax.
    double credit = 0;
  };
  static constexpr double kCreditMax = 2;
  // Weight of a read, compared with a write. With a smaller weight, the places of blocks adapt to reads more slowly. With
  // weight 1, blocks would change their paths without end.
  static constexpr double kReadWeight = 0.5;
  // Minimum credit of a path that lacks slots. With less credit only a few of the path's blocks went to other paths, and later
  // blocks compensate for these.
  static constexpr double kCreditMin = 1.5;

  // Returns the path with free slots whose turn it is. Chooses a path that does not work only if no working path has a free
  // slot.
  std::optional<uint32_t> ChoosePath() const;
  std::optional<uint32_t> ChooseSurplus(Suspects suspects) const;
  void Count(uint32_t path, double blocks);
  // Sets `slot` to a free slot, or else to the slot whose write failed the longest ago. Returns nullopt if neither exists.
  std::optional<Target> AllocateSlot(std::optional<nvme::Slot>& slot);
  // Frees the slot, unless another version of the entry is in the slot.
  void Release(uint32_t entry, const nvme::Slot& slot);
  void Free(const nvme::Slot& slot);
  // Distinct slots of an entry. Unused elements at the end are nullopt.
  using EntrySlots = std::array<std::optional<nvme::Slot>, 4>;
  static void AddTo(EntrySlots& slots, const std::optional<nvme::Slot>& slot);
  EntrySlots DurableSlots(uint32_t entry) const;
  bool IsInDoubt(const Version& version) const { return version.slot && is_doubted(*version.slot); }

  PathTable& table_;
  std::pmr::set<nvme::Slot> slots_;
  std::vector<Path> paths_;
  // Slots whose last write failed, oldest first.
  std::vector<nvme::Slot> failed_;
  // Slots in doubt that hold a version.
  std::set<nvme::Slot> doubted_;
  std::vector<Block> blocks_;
  std::vector<Durable> durable_;  // by entry; empty if the job has no durable steps
};

}  // namespace forebay::daemon
