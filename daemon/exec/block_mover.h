// SPDX-License-Identifier: Apache-2.0
// Moves a part of a job's arena to a swap slot and back: a block of states, its weights, or a page of gradient sums.
#pragma once

#include <functional>
#include <map>
#include <memory_resource>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/base/events.h"
#include "daemon/exec/arena_registry.h"
#include "daemon/exec/inplace_function.h"
#include "daemon/exec/swap_space.h"
#include "daemon/exec/task_runner.h"
#include "pinned_mem/pinned_arena.h"

namespace forebay::daemon {

// A block to be evicted is digested, written, then loses its memory. A block to be promoted gets memory, is read, then
// verified. Gradient sums and saved parts are digested and written, or read and verified; they retain their memory. Each move
// ends with its TaskDone.
//
// Threads  The loop thread. Workers of updates digest, verify, populate and free: a step may wait for the
//          move, and the pool that may block is busy for minutes while a large job is created.
class BlockMover {
 public:
  // Called with the transfers that ended during a call of SwapSpace.
  using EndTransfers = std::function<void(std::vector<SwapDone>&)>;
  using Raise = std::function<void(TaskDone)>;
  // Called when an evicted block is whole in its slot, before it loses its memory.
  using Evicted = std::function<void(const RecordBlock&)>;

  // `runner`, `swap` and `memory`, for what follows transfers, outlive the mover; without swap nothing is moved.
  BlockMover(TaskRunner& runner, SwapSpace* swap, EndTransfers end_transfers, Raise raise,
             std::pmr::memory_resource* memory = std::pmr::get_default_resource(),
             Evicted evicted = nullptr);

  // `state`: state arena of the action's job.
  void Evict(const EvictBlock& action, const ArenaRegistry::Arena& state);
  void Promote(const PromoteBlock& action, const ArenaRegistry::Arena& state);
  // `step`: step arena of the action's job.
  void Spill(const SpillSums& action, const ArenaRegistry::Arena& step);

  // `arena`: the arena that the action names. Saves start after all other transfers of their job.
  void Save(const SavePart& action, const ArenaRegistry::Arena& arena);
  // `action`: LoadSums or RestorePart.
  template <typename Action>
  void Load(const Action& action, const ArenaRegistry::Arena& arena) {
    Moved moved = PartOf(action, arena);
    moved.checksum = action.checksum;
    Read(moved);
  }

  // Continues the move that the transfer is part of. `end_ns`: end of the transfer. Returns false if the transfer is part of no
  // move.
  bool OnTransferred(const SwapDone& done, uint64_t end_ns);

 private:
  struct Transferred {
    absl::Status status;
    uint64_t begin_ns = 0;
    uint64_t end_ns = 0;
  };
  // A part of an arena that moves to or from a swap slot.
  struct Moved {
    TaskId task = 0;
    BlockIdentity identity;
    ArenaRegistry::Arena arena;
    pinned_mem::ArenaPart part;
    BlockPlace place;
    uint64_t checksum = 0;      // checksum that bytes from swap must have
    bool leaves_memory = true;  // the part has no memory while it is on swap
    bool pause = false;
    TransferQueue::Order order = TransferQueue::Order::kNormal;
  };

  using Next = InplaceFunction<void(const Transferred&), 256>;

  // Describes the move of the action's part of `arena`. The part retains its memory in the arena.
  template <typename Action>
  static Moved PartOf(const Action& action, const ArenaRegistry::Arena& arena) {
    return {.task = action.task,
            .identity = action.identity,
            .arena = arena,
            .part = {.offset_bytes = action.offset_bytes, .size_bytes = action.bytes},
            .place = {.resident = false, .slot = action.slot},
            .leaves_memory = false};
  }
  static SwapTransfer TransferOf(const Moved& moved);
  void DigestAndWrite(Moved moved);
  void Write(const Moved& moved, uint64_t checksum);
  void FreeWritten(const Moved& moved, uint64_t checksum);
  void Read(const Moved& moved);
  void Verify(const Moved& moved, const Transferred& read);

  TaskRunner& runner_;
  SwapSpace* swap_;
  EndTransfers end_transfers_;
  Raise raise_;
  Evicted evicted_;
  // Continuation of each transfer that has not ended, by task.
  std::pmr::map<TaskId, Next> next_;
};

}  // namespace forebay::daemon
