// SPDX-License-Identifier: Apache-2.0
// The table of a job's blocks: the step, the swap slot and the checksum of each. No other table has them.
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

// A block that is written to swap goes to a free slot, where it is pending. The version before stays current until Publish()
// makes all pending versions current at once. A job has two slots for each block on swap, so that there is always one for the
// next version.
//
// A version that an early update writes is neither current nor pending before its step is decided. AcceptEarly() makes it
// pending.
//
// Writes go to the paths by their shares (PathTable), in turns, so that any run of blocks uses every path. A path with more
// reads than its share gets fewer writes meanwhile: it was slower than expected when these blocks were written.
//
// In a job with durable steps, slots that one of the last two of these steps names retain their bytes. BeginDurable() defines
// such a step: it has the current version of an entry on swap, and a copy (BeginSave) of an entry in DRAM. Entries behind the
// blocks are parts of the weights arena: they are in DRAM, and have copies only.
//
// A slot is in doubt if a flush has failed since its last write: a power cut may take its bytes, whatever is read from it. A
// ledger does not name such a slot. Its bytes are written to another slot.
//
// A slot whose write failed is used again only if no other slot is free. A suspect path gets new writes only if no other path
// has a free slot. A marked path comes after suspect paths.
class BlockLedger {
 public:
  struct Version {
    // Empty: in DRAM, or zeros that were never written.
    std::optional<nvme::Slot> slot = {};
    uint64_t checksum = 0;
    // 0: before the first step.
    uint64_t written_step = 0;
    WeightsDigests weights_digests = {};  // of a block with a plane of weights
  };

  // Slot to which a block is written. `pause`: the slot's path is suspect.
  struct Target {
    nvme::Slot slot;
    bool pause = false;
  };

  // `weights_parts`: number of parts of the weights arena; empty: the job has no durable steps. `path_table` and `memory`
  // outlive this object.
  BlockLedger(uint32_t blocks, const std::vector<nvme::Slot>& slots, PathTable& path_table,
              std::pmr::memory_resource* memory = std::pmr::get_default_resource(),
              std::optional<uint32_t> weights_parts = {});

  // The block's current version, which readers and checkpoints see.
  const Version& current(uint32_t block) const { return blocks_[block].current; }
  // The block's newest version: the pending one of the running step, or else the current one.
  const Version& newest(uint32_t block) const;

  // Allocates the slot for the block's next version, until EndWrite() or OnWriteFailed().
  //
  // Errors  nothing  no slot is left.
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
  // Frees the slot of a write that has succeeded and is of no use.
  void CancelWrite(uint32_t block);
  // Frees the slot of a write that was not begun.
  void DropWrite(uint32_t block);

  // Records that a block in DRAM was updated in place.
  void SetInPlace(uint32_t block, uint64_t step);

  // Makes every pending version current, as one event. Frees the slots of the versions before, unless durable steps name them.
  void Publish();
  // The block's pending version; null: the running step has not made one.
  const Version* pending(uint32_t block) const {
    return blocks_[block].pending ? &*blocks_[block].pending : nullptr;
  }
  // Makes the pending version of one block current, between steps.
  void PublishBlock(uint32_t block);
  // Sets the version that a killed daemon had of the block on swap, whatever is durable of the block. Called after Recover(). A
  // version without a slot changes nothing. The block counts as changed since it was saved.
  void RecoverKilled(uint32_t block, const Version& version);

  // Adds a version that a killed daemon wrote beside the current one, in an early update or in a step that it did not end.
  void RecoverEarly(uint32_t block, const Version& version);

  // Records that the block was moved to DRAM between steps. Frees its slot, unless a durable step names it.
  void SetResident(uint32_t block);

  // Begins to make a step durable, with all entries as they are now. Returns the entries that have no slot and have changed
  // since they were saved, ascending.
  std::vector<uint32_t> BeginDurable();
  // Like BeginWrite(), EndWrite() and OnWriteFailed(), for a copy of an entry in DRAM.
  std::optional<Target> BeginSave(uint32_t entry);
  void EndSave(uint32_t entry, uint64_t checksum, uint64_t step);
  void OnSaveFailed(uint32_t entry);
  // The entry's version in the step that is going to be durable, once everything is saved; nothing: zeros that were never
  // written.
  const std::optional<Version>& next_durable(uint32_t entry) const { return durable_[entry].next; }
  // Records that the ledger with the step is durable. kReplaced: the last durable step has the same number, so the step before
  // it stays.
  enum class Last : uint8_t { kBecomesBefore, kReplaced };
  void FinishDurable(Last last);
  // Records that an entry in DRAM, or a part of the weights, differs from its last saved copy.
  void SetChanged(uint32_t entry);
  bool is_durable() const { return !durable_.empty(); }

  // Records that a flush has failed, so that these slots are in doubt if they hold something of this job. Without durable steps
  // no slot is in doubt. Adds the paths of slots that were not in doubt before to `paths`.
  void Doubt(const std::vector<nvme::Slot>& slots, std::set<uint32_t>& paths);
  bool is_doubted(const nvme::Slot& slot) const { return doubted_.contains(slot); }
  bool has_doubted() const { return !doubted_.empty(); }
  // True if the current version of a block is in a slot in doubt. FindDoubted() returns the first such block.
  bool IsInDoubt(uint32_t block) const { return IsInDoubt(blocks_[block].current); }
  std::optional<uint32_t> FindDoubted() const;
  // Ends the doubt about a block that could not be written elsewhere. The next ledger names its slot, is refused, and reports
  // the doubt again. False: the slot was not in doubt.
  bool ForgetDoubt(uint32_t block);
  // Drops the copies in doubt of the step that is going to be durable. Returns their entries, which are to be saved again.
  std::vector<uint32_t> DropDoubtedCopies();
  // True if some of the step that is going to be durable is in a slot in doubt. Copies count until DropDoubtedCopies().
  bool is_next_doubted() const;
  // Number of slots of the entry: of its current version, and those that durable steps name.
  uint32_t slots_held(uint32_t entry) const;
  // True if a durable step names the slot of the current version too: the slot is not freed when another version becomes
  // current.
  bool KeepsCurrent(uint32_t entry) const;
  // Sets an entry of a new ledger to its version in a durable step. The job has the slot. A block in DRAM is read back from the
  // slot later.
  enum class Home : uint8_t { kDram, kSwap };
  void Recover(uint32_t entry, const Version& version, Home home);
  // Sets, after Recover(), the version of the entry in the durable step before.
  void RecoverBefore(uint32_t entry, const Version& version);
  // Sets a block of a new ledger whose bytes were retained in DRAM.
  void RecoverInPlace(uint32_t block, uint64_t step) {
    blocks_[block].current = {.written_step = step};
  }

  // True if BeginWrite() would find a slot. has_working_slot(): a slot on a path that works.
  bool has_free_slot() const { return ChoosePath().has_value() || !failed_.empty(); }
  bool has_working_slot() const;
  // True if a path is marked, and BeginWrite() would find no free slot on an unmarked path.
  bool must_use_marked_path() const;
  // The working path that is to have the next write, if it has no free slot here and has been passed over before.
  std::optional<uint32_t> LackingPath() const;
  void AddSlots(const std::vector<nvme::Slot>& slots);
  void AddSlot(const nvme::Slot& slot);
  // Removes up to `count` free slots from the table. Slots on marked paths go first. Then free slots whose last write did not
  // fail go, of the path that has most of them for its share. kKept: no slot of a suspect path is removed.
  enum class Suspects : uint8_t { kIncluded, kKept };
  std::pmr::vector<nvme::Slot> RemoveFreeSlots(size_t count,
                                               Suspects suspects = Suspects::kIncluded);
  // All slots of the job.
  const std::pmr::set<nvme::Slot>& slots() const { return slots_; }

  // CHECKs that each slot has exactly one use.
  void CheckInvariants() const;

 private:
  struct Block {
    Version current;
    std::optional<Version> pending;
    std::optional<Version> early;  // of a step that is not decided yet
    // Slot of the write in flight.
    std::optional<nvme::Slot> writing;
  };
  // State of an entry in a job with durable steps.
  struct Durable {
    // Versions of the entry in the step that is going to be durable, in the last durable step, and in the one before.
    std::optional<Version> next;
    std::optional<Version> last;
    std::optional<Version> before;
    std::optional<nvme::Slot> saving;
    bool is_changed = true;  // in DRAM, since the entry was saved
  };
  struct Path {
    std::pmr::set<nvme::Slot> free;
    // Blocks that the path should have been given by its share, minus those that it was given; between -kCreditMax and
    // kCreditMax.
    double credit = 0;
  };
  static constexpr double kCreditMax = 2;
  // Weight of a read, compared with a write. With a smaller weight, writes follow reads more slowly. With 1, writes would swing
  // between the paths without end.
  static constexpr double kReadWeight = 0.5;
  // Credit from which a path lacks slots. With less credit only a few blocks went to other paths, and later blocks make up for
  // them.
  static constexpr double kCreditMin = 1.5;

  // The path with free slots whose turn it is. A path that does not work is chosen only if no other has a free slot.
  std::optional<uint32_t> ChoosePath() const;
  std::optional<uint32_t> ChooseSurplus(Suspects suspects) const;
  void Count(uint32_t path, double blocks);
  // Sets `slot` to a free slot, or to the oldest slot whose write failed; nothing: there is none.
  std::optional<Target> AllocateSlot(std::optional<nvme::Slot>& slot);
  // Frees the slot unless the entry has another use for it.
  void Release(uint32_t entry, const nvme::Slot& slot);
  void Free(const nvme::Slot& slot);
  // Distinct slots of an entry, before empty elements.
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
  std::vector<Durable> durable_;  // by entry; empty without durable steps
};

}  // namespace forebay::daemon
