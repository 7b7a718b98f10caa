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

// A block that is to leave DRAM, or not to be promoted, and the swap slots that it gets. `slots` is empty if the block still
// has its own.
struct Eviction {
  uint32_t block = 0;
  uint64_t bytes = 0;
  std::vector<nvme::Slot> slots;
};

// Placement and ledger say where a block is. This class changes both when a move has ended. A write that fails is tried in
// another slot, on another path; if there is none, the block stays in DRAM. A read that fails leaves the block on swap. No move
// loses bytes. Blocks on marked paths are moved last.
//
// Ownership  What the constructor gets outlives it.
class Residency {
 public:
  // `slot_bytes`: bytes of each of the job's swap slots; 0: its blocks cannot be on swap.
  Residency(JobTasks& io, StepPipeline& pipeline, const WeightsCache& weights, nvme::SlotMap& swap,
            uint64_t slot_bytes)
      : io_(io),
        pipeline_(pipeline),
        swap_(swap),
        slot_bytes_(slot_bytes),
        relocation_(io, pipeline, weights, counters_) {}

  // Returns the highest blocks in DRAM or on their way there that together have `bytes`, or as many as `swap` has slots for.
  // Allocates these slots. Changes nothing in this object.
  std::vector<Eviction> PlanEvictions(uint64_t bytes, nvme::SlotMap& swap) const;
  // Bytes of states that the job was granted in DRAM and that can be on swap.
  uint64_t movable_bytes() const;
  // Marks a planned block: its move makes room for others. A block whose promotion has not begun stays on swap.
  void Evict(const Eviction& eviction);
  bool makes_room() const { return !for_room_.empty(); }
  // Removes the marks of blocks whose room is not needed, lowest first: together they have at most `bytes`.
  void Keep(uint64_t bytes);
  // Marks a block for the other tier. Does nothing if the block is marked, if swap has no slots for it, or if it needs more
  // than `free_bytes` of DRAM. A block with weights on swap is never promoted.
  void Move(uint32_t block, uint64_t free_bytes);

  // Begins to return blocks of states alone to room in DRAM that has become free, the lowest first, one for each ReturnNext().
  void BeginReturns() { next_return_ = 0; }
  void EndReturns() { next_return_ = UINT32_MAX; }
  bool returns() const { return next_return_ < pipeline_.placement().blocks(); }
  bool is_promoting() const { return pipeline_.placement().has_promotions(); }
  // Marks the next block that has at most `free_bytes`. False: none is left, and the returns have ended.
  bool ReturnNext(uint64_t free_bytes);

  // Starts the next move, or continues the one in progress. Called between steps, while no states are read.
  void Pump();
  void OnRead(const StepPipeline::ReadOutcome& outcome) { relocation_.OnRead(outcome); }
  // Errors  as Relocation::OnWritten.
  absl::Status OnMoved(const TaskDone& done);
  void OnPublished() { relocation_.OnPublished(); }
  void PumpDoubted() { relocation_.PumpDoubted(); }
  bool in_progress() const { return pipeline_.is_moving(); }
  // True if a move is in progress, or an eviction is marked. Promotions do not count: nothing waits for them.
  bool has_urgent_moves() const {
    return in_progress() || (!abandoned_ && pipeline_.placement().has_evictions());
  }

  // Begins no more moves, because the job failed.
  void Abandon();

  // Error of the last eviction that was given up; OK: none was.
  const absl::Status& error() const { return error_; }
  const ResidencyCounters& counters() const { return counters_; }

 private:
  uint32_t SlotsToLeaveAgain(uint32_t block) const;
  void MarkWithSlots(const Eviction& eviction);
  void StartEviction(uint32_t block);
  bool MayPromote(uint32_t block);
  void StartPromotion(uint32_t block);
  void OnEvicted(uint32_t block, const TaskDone& done);
  void OnPromoted(uint32_t block, const TaskDone& done);

  JobTasks& io_;
  StepPipeline& pipeline_;
  nvme::SlotMap& swap_;
  uint64_t slot_bytes_;
  std::set<uint32_t> for_room_;  // blocks marked by Evict() whose moves have not begun
  bool abandoned_ = false;
  // Next block to look at. Lower blocks have returned, or cannot.
  uint32_t next_return_ = UINT32_MAX;
  absl::Status error_;
  ResidencyCounters counters_;
  Relocation relocation_;
};

}  // namespace forebay::daemon
