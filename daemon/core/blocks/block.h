// SPDX-License-Identifier: Apache-2.0
// The life of a block of states: its phase, the purpose for which it is in that phase, and every transition between phases.
//
// A block on swap is read into a staging slot, updated there, and written to another swap slot. A block in DRAM is updated in
// place. Placement says where a block is between these phases, and BlockLedger says which slot has which version.
//
// Example: block 7 is on swap, in slot 112, and step 42 is announced. Each line has the transition, and the block after it.
//
//   kReadEarly        kReading, kEarly      the disk reads slot 112 into staging slot 3
//   kReadEnded        kReady, kEarly
//   kUpdateEarly      kUpdating, kEarly     all gradients have arrived; new weights go to weights slot 0
//   kWrite            kWriting, kEarly      the disk writes staging slot 3 to slot 205
//   kWritten          kWritten, kEarly      staging slot 3 is free; slots 112 and 205 both have a version
//
// If the decision has the announced scalars, the early update becomes part of step 42:
//
//   kAccepted         kWritten, kAccepted   slot 205 has the pending version
//   kInstall          kInstalling           a worker copies weights slot 0 to the weights arena
//   kInstalled        kIdle                 the publication of step 42 makes slot 205 current
//
// If the step clips, the decision has other scalars, and the block is updated from scratch:
//
//   kScalarsDiffer    kIdle                 slot 205 and weights slot 0 are free
//   kReadForStep      kReading, kStep       slot 112 is read again
//   kReadEnded        kReady, kStep
//   kUpdate           kUpdating, kStep
//   kWrite            kWriting, kStep
//   kWritten          kIdle
//
// Invariants (Blocks::CheckInvariants):
//
//   - A block has a purpose if it is not in kIdle, and no purpose in kIdle.
//   - A block in kReading, kCancelled, kReady, kWriting, kRewriting or kDropped has a staging slot.
//   - A block in kIdle, kWritten, kInstalling or kMoving has no staging slot.
//   - Only a block with an early update, or in kDropped, has a weights slot. No two blocks have the same weights slot.
//   - The sets staged() and early(), and the counts, agree with the states of the blocks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory_resource>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "daemon/core/blocks/staging.h"

namespace forebay::daemon {

enum class Phase : uint8_t {
  kIdle,        // no task uses the block, and its bytes are where Placement and BlockLedger say
  kReading,     // the disk reads the block into its staging slot
  kCancelled,   // the disk reads the block, and the bytes are discarded when the read ends
  kReady,       // the block is in its staging slot, not used yet: it may be dropped and read again
  kAccessing,   // a worker reads or sets elements of the block, in its staging slot or in DRAM
  kUpdating,    // a worker updates the block, in its staging slot or in DRAM
  kWriting,     // the disk writes the staging slot to a swap slot
  kRewriting,   // the disk writes the staging slot to another swap slot, because a write has failed
  kWritten,     // the new version is in a swap slot, and is not used yet
  kInstalling,  // a worker copies the new weights from the step arena to the weights arena
  kDropped,     // a task of a dropped early update runs, and has the block's slots until it ends
  kMoving,      // the block moves between DRAM and swap
};
inline constexpr size_t kPhases = 12;

enum class Purpose : uint8_t {
  kNone,       // only in kIdle
  kReadAhead,  // an update will use the block, and does not wait for it
  kEarly,      // the early update of a step that is not decided
  kStep,       // the decided step
  kAccepted,   // the decided step: the update was begun early, and the decision has accepted it
  kAccess,     // a read or write of states
  kBeside,  // a read of states from the old version, while an early update has written a new version
  kMove,    // a move to the other tier, or to another swap slot
};
inline constexpr size_t kPurposes = 8;

enum class Transition : uint8_t {
  // Reads.
  kReadAhead,      // the block is read ahead
  kReadEarly,      // the block is read for an early update
  kReadForStep,    // an update of the decided step waits for the block
  kReadForAccess,  // a read or write of states waits for the block
  kReadForMove,    // the block is read to be written to another swap slot
  kReadEnded,
  kReadFailed,
  kReadCancelled,  // the decided step does not update the block, or the client that wanted it has ended
  kReadWanted,     // the decided step updates a block whose read was cancelled before
  kReadDiscarded,  // a cancelled read has ended
  // A block in its staging slot is dropped before it is used.
  kReclaimed,     // another task needs the staging slot
  kNotNeeded,     // the decided step does not update the block
  kMovesInstead,  // the block is going to move
  kAbandoned,     // the job has failed
  // Updates.
  kUpdate,          // the update of the decided step begins in the staging slot
  kUpdateInPlace,   // the update of the decided step begins in DRAM
  kUpdateEarly,     // the early update begins
  kNormsSummed,     // the norms of the block are computed; the block has not changed
  kUpdatedInPlace,  // the update in DRAM has ended
  kUpdateFailed,    // the update after the decision has failed, and so has the job
  kWrite,           // the bytes in the staging slot are written
  kWriteRepeated,   // the write has failed, and is repeated in another swap slot
  kWriteAbandoned,  // the write has failed, and so has the job
  kWritten,
  // The decision accepts an early update.
  kAccepted,
  kInstall,    // a worker begins to copy the new weights
  kInstalled,  // the new weights are in the weights arena
  kCompleted,  // the new weights are in the written block: the update has ended
  // An early update is dropped. The block is then on swap as before.
  kSumsChanged,          // a gradient is added to a sum that counted as final
  kSumsForgotten,        // the gathered gradients are discarded: the attempt at the step has ended
  kAnnouncementsDiffer,  // two ranks have announced different scalars
  kStatesWritten,        // a client writes states
  kScalarsDiffer,        // the decision has other scalars than the announcement
  kGradientMissing,      // a parameter of the block has no gradient in the decided step
  kWeightsLeased,        // a reader has leased the weights of the block
  kMovedAway,            // the block is going to move
  kTaskFailed,           // the update or its write has failed
  kJobFailed,            // the job has failed while a task of the update ran
  kDropEnded,            // the task of a dropped early update has ended
  // Reads and writes of states.
  kAccess,         // a worker begins to access the block in its staging slot
  kAccessInPlace,  // a worker begins to access the block in DRAM
  kAccessEnded,
  kAccessFailed,
  // Moves.
  kMove,   // the block begins to move to the other tier
  kMoved,  // the move to the other tier, or to another slot, has ended or failed
  // A new daemon continues the update of a killed one.
  kRecovered,         // the killed daemon had the block in the staging slot
  kRecoveredWritten,  // the killed daemon had written the block for the decided step
  kResumed,           // the new daemon has adopted the staging slot, and may continue the update
};
inline constexpr size_t kTransitions = static_cast<size_t>(Transition::kResumed) + 1;

struct BlockState {
  Phase phase = Phase::kIdle;
  Purpose purpose = Purpose::kNone;
  bool operator==(const BlockState&) const = default;
};

// A set of enumerators.
template <typename Enum>
class SetOf {
 public:
  constexpr SetOf(std::initializer_list<Enum> members) {
    for (const Enum member : members) bits_ |= uint64_t{1} << static_cast<uint32_t>(member);
  }
  constexpr bool has(Enum member) const {
    return (bits_ >> static_cast<uint32_t>(member) & 1) == 1;
  }

 private:
  uint64_t bits_ = 0;
};

// A rule of the table: every block whose phase and purpose are in the sets may make every transition of `transitions`. The
// block retains its phase if `to` is nullopt, and its purpose if `becomes` is nullopt.
struct BlockRule {
  SetOf<Transition> transitions;
  SetOf<Phase> phases;
  SetOf<Purpose> purposes;
  std::optional<Phase> to;
  std::optional<Purpose> becomes = {};
};

// True if a block with this purpose is in its staging slot, or is being read into it, for an update.
bool IsForUpdate(Purpose purpose);

// The table of all transitions.
std::span<const BlockRule> BlockRules();
// Returns the state of a block after the transition, or nullopt if no rule allows the transition.
std::optional<BlockState> Next(BlockState state, Transition transition);

struct Block {
  BlockState state = {};
  std::optional<uint32_t> staging_slot = {};
  // Slot of the step arena for the new weights of an early update. nullopt: the new weights are in the block itself.
  std::optional<uint32_t> weights_slot = {};
  uint64_t overflows = 0;  // masters that became non-finite in the newest update that has ended
};

// All blocks of a job. A block may have a staging slot of the node, and a weights slot of the step arena. A transition to a
// phase or a purpose without such a slot frees the slot.
//
// Ownership  The pool outlives this object.
// Limits     A transition changes at most three sets. Only CheckInvariants() visits all blocks.
class Blocks {
 public:
  // `may_reclaim` returns true if the job does not need this kReady block now. `position` returns the block's position in the
  // order of update. `weights_slots`: number of slots of the step arena for new weights.
  struct Options {
    uint32_t blocks = 0;
    uint32_t weights_slots = 0;
    std::function<bool(uint32_t block)> may_reclaim;
    std::function<uint32_t(uint32_t block)> position;
  };
  Blocks(StagingPool& pool, Options options);
  Blocks(const Blocks&) = delete;
  Blocks& operator=(const Blocks&) = delete;
  ~Blocks();

  const Block& at(uint32_t block) const { return blocks_[block]; }
  Phase phase(uint32_t block) const { return blocks_[block].state.phase; }
  Purpose purpose(uint32_t block) const { return blocks_[block].state.purpose; }
  // Blocks that have a staging slot, ascending.
  const std::pmr::set<uint32_t>& staged() const { return staged_; }
  // Blocks with an early update that is begun, and neither dropped nor ended, ascending.
  const std::pmr::set<uint32_t>& early() const { return early_; }
  bool is_early(uint32_t block) const;
  uint32_t count(Phase phase, Purpose purpose) const {
    return counts_[static_cast<size_t>(phase)][static_cast<size_t>(purpose)];
  }
  uint32_t count(Purpose purpose) const;

  // CHECKs that the block may make the transition.
  void Apply(uint32_t block, Transition transition);
  // Gives the block a staging slot, and applies a transition that begins a read.
  void BeginRead(uint32_t block, Transition transition, uint32_t staging_slot);
  // Begins the early update of a block, with a weights slot if `weights` is kInSlot.
  enum class NewWeights : uint8_t { kInBlock, kInSlot };
  void BeginEarly(uint32_t block, NewWeights weights);
  bool has_free_weights_slot() const { return !free_weights_slots_.empty(); }
  // Gives an idle block the staging slot, or the weights slot of the written version, that it had in the previous daemon.
  // `transition`: kRecovered or kRecoveredWritten.
  void Adopt(uint32_t block, Transition transition, const Block& recorded);
  void SetOverflows(uint32_t block, uint64_t overflows) { blocks_[block].overflows = overflows; }

  // AllocateFree() allocates a staging slot for a read ahead, if more than `reserved` slots are free. AllocateUrgent() allocates
  // a staging slot for a read that a task waits for (StagingPool). Release() frees a slot that no block has.
  std::optional<uint32_t> AllocateFree(uint32_t reserved);
  std::optional<uint32_t> AllocateUrgent();
  void Release(uint32_t slot) { pool_.Release(slot); }
  // Drops the last kReady block, in the order of update, for which `may_drop` returns true. Returns the block's staging slot, or
  // nullopt if no such block exists. Reclaim() asks Options::may_reclaim.
  std::optional<uint32_t> ReclaimWhere(const std::function<bool(uint32_t block)>& may_drop);
  std::optional<uint32_t> Reclaim() { return ReclaimWhere(options_.may_reclaim); }
  // Number of blocks that were read and then lost their slots before they were used.
  uint64_t reclaimed() const { return reclaimed_; }

  // True if an allocation has failed, or a block was reclaimed, since SetWaits(Waits::kNo). The job must try again when staging
  // slots may have become free.
  bool waits_for_slot() const { return waits_for_slot_; }
  enum class Waits : uint8_t { kNo, kYes };
  void SetWaits(Waits waits) { waits_for_slot_ = waits == Waits::kYes; }
  // Returns the lowest position, in the order of update, of a block that has lost its staging slot since the last call.
  // UINT32_MAX if no block has.
  uint32_t DrainFirstDropped();

  void CheckInvariants() const;

 private:
  void Set(uint32_t block, BlockState state);

  StagingPool& pool_;
  Options options_;
  std::vector<Block> blocks_;
  std::pmr::set<uint32_t> staged_;
  std::pmr::set<uint32_t> early_;
  std::pmr::set<uint32_t> free_weights_slots_;
  std::array<std::array<uint32_t, kPurposes>, kPhases> counts_ = {};
  bool waits_for_slot_ = false;
  uint64_t reclaimed_ = 0;
  uint32_t first_dropped_ = UINT32_MAX;
};

}  // namespace forebay::daemon
