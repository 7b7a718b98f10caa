// SPDX-License-Identifier: Apache-2.0
// The table of a job's blocks: of which step each is, in which swap slot, with which checksum. There is
// no other.
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

// A block that is written to swap goes to a free slot, where it is pending: the one it had before
// stays current until Publish() makes all pending versions current at once. A job has two slots for
// each swapped block, so that there is always one for the next version.
//
// What an early update writes, before its step is decided, is neither: it becomes pending with AcceptEarly().
//
// Writes go to the paths by their shares (PathTable), in turns, so that any run of blocks uses every path. A
// path from which more is read than its share gets fewer writes meanwhile: it was slower than expected when
// these blocks were written.
//
// Of a job with durable steps, slots that one of the last two of them names keep their bytes. Such a step is what
// BeginDurable() finds: of an entry on swap its current version, of one in DRAM a copy (BeginSave). Entries behind
// the blocks are parts of the weights arena: they are in DRAM, and have copies alone.
//
// A slot is in doubt where a flush has failed since its last write: whatever is read from it, a power cut may take it. It
// is not named by a ledger; what it holds is written to another one.
//
// A slot whose write failed is used again only when no other is free. A suspect path gets new writes only
// when no other has a free slot, a marked one after it.
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

  // Where a block is written. `pause`: its path is suspect.
  struct Target {
    nvme::Slot slot;
    bool pause = false;
  };

  // `weights_parts`: of a job with durable steps. `path_table` and `memory` outlive it.
  BlockLedger(uint32_t blocks, const std::vector<nvme::Slot>& slots, PathTable& path_table,
              std::pmr::memory_resource* memory = std::pmr::get_default_resource(),
              std::optional<uint32_t> weights_parts = {});

  // What readers and checkpoints see.
  const Version& current(uint32_t block) const { return blocks_[block].current; }
  // What the running step has made of the block so far.
  const Version& newest(uint32_t block) const;

  // The slot for the block's next version, until EndWrite() or OnWriteFailed().
  //
  // Errors  nothing  no slot is left.
  std::optional<Target> BeginWrite(uint32_t block);
  // A block is read from this path.
  void CountRead(uint32_t path) { Count(path, kReadWeight); }
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
  // The write was not begun.
  void DropWrite(uint32_t block);

  // A block in DRAM was updated in place.
  void SetInPlace(uint32_t block, uint64_t step);

  // One event: every pending version becomes current, the slots of those before are free.
  void Publish();
  // Null: the running step has not made one.
  const Version* pending(uint32_t block) const {
    return blocks_[block].pending ? &*blocks_[block].pending : nullptr;
  }
  // The same for one block, between steps: it was moved to swap.
  void PublishBlock(uint32_t block);
  // The same, or on swap in this version, whatever is durable of it.
  void RecoverKilled(uint32_t block, const Version& version);

  // Beside it, what an early update has written, or one of the step that another daemon did not end.
  void RecoverEarly(uint32_t block, const Version& version);

  // Between steps: the block was moved to DRAM, its slot is free.
  void SetResident(uint32_t block);

  // A step is going to be durable, with all entries as they are now: those that have no slot and have changed since
  // they were saved, ascending.
  std::vector<uint32_t> BeginDurable();
  // As BeginWrite() and what follows, of a copy of what is in DRAM.
  std::optional<Target> BeginSave(uint32_t entry);
  void EndSave(uint32_t entry, uint64_t checksum, uint64_t step);
  void OnSaveFailed(uint32_t entry);
  // Of the step that is going to be durable, when all is saved; nothing: zeros that were never written.
  const std::optional<Version>& next_durable(uint32_t entry) const { return durable_[entry].next; }
  // The ledger with it is durable. `replaced`: the last one was of the same step; the one before it stays.
  enum class Last : uint8_t { kBecomesBefore, kReplaced };
  void FinishDurable(Last last);
  // An entry in DRAM, or a part of the weights, is not what was saved of it last.
  void SetChanged(uint32_t entry);
  bool is_durable() const { return !durable_.empty(); }

  // A flush has failed, and these slots are in doubt, as far as they hold something of this job. Of one without durable
  // steps none is.
  // `paths`: those of slots that were not in doubt before are added.
  void Doubt(const std::vector<nvme::Slot>& slots, std::set<uint32_t>& paths);
  bool is_doubted(const nvme::Slot& slot) const { return doubted_.contains(slot); }
  bool has_doubted() const { return !doubted_.empty(); }
  // Of a block on swap, and the first such block.
  bool IsInDoubt(uint32_t block) const { return IsInDoubt(blocks_[block].current); }
  std::optional<uint32_t> FindDoubted() const;
  // It could not be written elsewhere: the next ledger names it, is refused, and says so again. False: it was not in
  // doubt.
  bool ForgetDoubt(uint32_t block);
  // Of the step that is going to be durable: copies in doubt are no more, and their entries are to be saved again.
  std::vector<uint32_t> DropDoubtedCopies();
  // Some of it is in a slot in doubt; without DropDoubtedCopies() copies too.
  bool is_next_doubted() const;
  // Slots of the entry: of its current version, and those that durable steps name.
  uint32_t slots_held(uint32_t entry) const;
  // One of these names the current version too: its slot is not free when another one is current.
  bool KeepsCurrent(uint32_t entry) const;
  // Of a new ledger: what a durable step says of the entry, whose slot the job has. A block in DRAM is going
  // to be read back from it.
  enum class Home : uint8_t { kDram, kSwap };
  void Recover(uint32_t entry, const Version& version, Home home);
  // Then: what the durable step before that one says of it.
  void RecoverBefore(uint32_t entry, const Version& version);
  // Of one: a block is in DRAM since before.
  void RecoverInPlace(uint32_t block, uint64_t step) {
    blocks_[block].current = {.written_step = step};
  }

  // Whether BeginWrite() would give a slot, and one on a path that works.
  bool has_free_slot() const { return ChoosePath().has_value() || !failed_.empty(); }
  bool has_working_slot() const;
  // Whether it would give one on a marked path, or has none.
  bool must_use_marked_path() const;
  // The path that works and is to have the next write, where it has no free slot here and has gone without
  // before.
  std::optional<uint32_t> LackingPath() const;
  void AddSlots(const std::vector<nvme::Slot>& slots);
  void AddSlot(const nvme::Slot& slot);
  // Takes up to `count` slots out of the table: those on marked paths first, then free ones whose last write
  // did not fail, of the path that has most of them for its share. `kept`: none of a suspect path.
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
    std::optional<Version> early;  // of the step that is not decided yet
    // Of the write in flight.
    std::optional<nvme::Slot> writing;
  };
  // Of an entry of a job with durable steps.
  struct Durable {
    // Of the step that is going to be durable, of the last that is, and of the one before it.
    std::optional<Version> next;
    std::optional<Version> last;
    std::optional<Version> before;
    std::optional<nvme::Slot> saving;
    bool is_changed = true;  // in DRAM, since it was saved
  };
  struct Path {
    std::pmr::set<nvme::Slot> free;
    // Blocks that it should have had by its share beyond those it was given, kCreditMax at most.
    double credit = 0;
  };
  static constexpr double kCreditMax = 2;
  // Of a read, beside a write. With less blocks follow more slowly, with 1 they would never come to rest.
  static constexpr double kReadWeight = 0.5;
  // Of a path that lacks slots: fewer blocks go elsewhere, and later ones make up for them.
  static constexpr double kCreditMin = 1.5;

  // A free slot on the path whose turn it is; of those that do not work, where no other has any.
  std::optional<uint32_t> ChoosePath() const;
  std::optional<uint32_t> ChooseSurplus(Suspects suspects) const;
  void Count(uint32_t path, double blocks);
  // Sets `slot` to a free one, or the oldest whose write failed; nothing: there is none.
  std::optional<Target> AllocateSlot(std::optional<nvme::Slot>& slot);
  // Frees the slot unless the entry has another use for it.
  void Release(uint32_t entry, const nvme::Slot& slot);
  void Free(const nvme::Slot& slot);
  // Without doubles; those that are set come first.
  using EntrySlots = std::array<std::optional<nvme::Slot>, 4>;
  static void AddTo(EntrySlots& slots, const std::optional<nvme::Slot>& slot);
  EntrySlots DurableSlots(uint32_t entry) const;
  bool IsInDoubt(const Version& version) const { return version.slot && is_doubted(*version.slot); }

  PathTable& table_;
  std::pmr::set<nvme::Slot> slots_;
  std::vector<Path> paths_;
  // Slots whose last write failed, oldest first.
  std::vector<nvme::Slot> failed_;
  // Of those that hold a version.
  std::set<nvme::Slot> doubted_;
  std::vector<Block> blocks_;
  std::vector<Durable> durable_;  // by entry; of a job without durable steps none
};

}  // namespace forebay::daemon
