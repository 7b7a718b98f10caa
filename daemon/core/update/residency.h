// SPDX-License-Identifier: Apache-2.0
// Moves blocks of states between DRAM and swap, and off marked swap paths, one at a time, between steps.
#pragma once

#include <cstdint>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/job_tasks.h"
#include "daemon/core/base/views.h"
#include "daemon/core/update/relocation.h"
#include "daemon/core/update/step_pipeline.h"
#include "daemon/core/update/weights_cache.h"
#include "nvme/slot_map.h"

namespace forebay::daemon {

// A block that is to leave DRAM, or whose promotion is cancelled, and the swap slots that the block gets. `slots` is empty if
// the block still has slots.
struct Eviction {
  uint32_t block = 0;
  uint64_t bytes = 0;
  std::vector<nvme::Slot> slots;
};

// Placement and BlockLedger have the place of each block. This class changes both when a move has ended. A failed write is
// repeated in another slot, on another path. Without such a slot the block stays in DRAM. A read that fails leaves the block on
// swap. No move loses bytes. Blocks on marked paths are moved last.
//
// Ownership  The arguments of the constructor outlive this object.
class Residency {
 public:
  // `slot_bytes`: bytes of one swap slot of the job, 0 if blocks of the job cannot be on swap.
  Residency(JobTasks& io, StepPipeline& pipeline, const WeightsCache& weights, nvme::SlotMap& swap,
            uint64_t slot_bytes)
      : io_(io),
        pipeline_(pipeline),
        store_(pipeline.store()),
        swap_(swap),
        slot_bytes_(slot_bytes),
        relocation_(io, pipeline, weights, counters_) {}

  // Returns the highest blocks that are in DRAM or being promoted and that together have `bytes`, or as many blocks as `swap`
  // has slots for. Allocates these slots in `swap`.
  std::vector<Eviction> PlanEvictions(uint64_t bytes, nvme::SlotMap& swap) const;
  // Returns the bytes of DRAM granted for states that can be on swap.
  uint64_t movable_bytes() const;
  // Marks a planned block for eviction, which frees DRAM. A block whose promotion has not begun stays on swap.
  void Evict(const Eviction& eviction);
  bool makes_room() const { return !for_room_.empty(); }
  // Removes the eviction marks of blocks that together have at most `bytes`, lowest blocks first, because their DRAM is not
  // needed.
  void Keep(uint64_t bytes);
  // Marks a block for a move to the other tier. Does nothing if the block is marked, if swap has no slots for it, or if it
  // needs more than `free_bytes` of DRAM. A block with weights on swap is never promoted.
  void Move(uint32_t block, uint64_t free_bytes);

  // Begins to return blocks without weights from swap to free DRAM, lowest blocks first. Each call of ReturnNext() marks one
  // block.
  void BeginReturns() { next_return_ = 0; }
  void EndReturns() { next_return_ = UINT32_MAX; }
  bool returns() const { return next_return_ < store_.placement().blocks(); }
  bool is_promoting() const { return store_.placement().has_promotions(); }
  // Marks the next block that has at most `free_bytes` for its return to DRAM. False if no such block remains: the returns have
  // then ended.
  bool ReturnNext(uint64_t free_bytes);

  // Starts the next move, or continues the move in progress. Called between steps, while no states are read.
  void Pump();
  void OnRead(const StepPipeline::ReadOutcome& outcome) { relocation_.OnRead(outcome); }
  // Errors  as Relocation::OnWritten.
  absl::Status OnMoved(const TaskDone& done);
  void OnPublished() { relocation_.OnPublished(); }
  void PumpDoubted() { relocation_.PumpDoubted(); }
  bool in_progress() const { return store_.is_moving(); }
  // True if a move is in progress, or an eviction is marked. Promotions do not count, because no job waits for a promotion.
  bool has_urgent_moves() const {
    return in_progress() || (!abandoned_ && store_.placement().has_evictions());
  }

  // Begins no more moves, because the job failed.
  void Abandon();

  // Returns the error of the last eviction that was abandoned. OK if none was.
  const absl::Status& error() const { return error_; }
  const ResidencyCounters& counters() const { return counters_; }

 private:
  uint32_t SlotsToLeaveAgain(uint32_t block) const;
  void MarkWithSlots(const Eviction& eviction);
  void StartEviction(uint32_t block);
  bool MayPromote(uint32_t block);
  void StartPromotion(uint32_t block);
  enum class Ends : uint8_t { kInOtherTier, kWhereItWas };
  void EndMove(uint32_t block, Ends ends);
  void OnEvicted(uint32_t block, const TaskDone& done);
  void OnPromoted(uint32_t block, const TaskDone& done);

  JobTasks& io_;
  StepPipeline& pipeline_;
  BlockStore& store_;
  nvme::SlotMap& swap_;
  uint64_t slot_bytes_;
  std::set<uint32_t> for_room_;  // blocks marked by Evict() whose moves have not begun
  bool abandoned_ = false;
  // Next block that ReturnNext() considers. Lower blocks have returned to DRAM or cannot return.
  uint32_t next_return_ = UINT32_MAX;
  absl::Status error_;
  ResidencyCounters counters_;
  Relocation relocation_;
};

}  // namespace forebay::daemon
