// SPDX-License-Identifier: Apache-2.0
// Moves blocks off marked swap paths, and out of slots in doubt, one at a time, between steps.
#pragma once

#include <cstdint>
#include <optional>
#include <set>

#include "absl/status/status.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/job_tasks.h"
#include "daemon/core/base/views.h"
#include "daemon/core/update/step_pipeline.h"
#include "daemon/core/update/weights_cache.h"

namespace forebay::daemon {

// An update moves a block off a marked path, because it writes the block to another path. This class moves blocks that are not
// being updated: it reads a block, verifies it, writes it unchanged to a path that works, and publishes it. If the read fails,
// or no working path has room, the block stays until the next step has been published.
//
// A durable step may wait for a block in a slot in doubt (BlockLedger). Such a block moves to any other slot. If that move fails,
// the next ledger names the slot in doubt. That ledger is refused, and the block is in doubt again.
//
// The old slot is freed once no weights are being read from it (WeightsCache). Until then the block has a pending version and
// in_progress() is true, so that no step is decided and nothing is updated early.
//
// Ownership  The arguments of the constructor outlive this object.
class Relocation {
 public:
  Relocation(JobTasks& io, StepPipeline& pipeline, const WeightsCache& weights,
             ResidencyCounters& counters)
      : io_(io),
        pipeline_(pipeline),
        store_(pipeline.store()),
        weights_(weights),
        counters_(counters) {}

  // Continues the move in progress, or begins the next. Called under the conditions of Residency::Pump().
  void Pump();
  // Like Pump(), for slots in doubt only. May also be called while a durable step waits for the move and nothing else runs.
  void PumpDoubted();
  bool in_progress() const { return block_.has_value(); }
  void OnRead(const StepPipeline::ReadOutcome& outcome);
  // Errors  E_CORRUPT  a slot in doubt does not hold the block: the job cannot continue.
  absl::Status OnWritten(const TaskDone& done);
  // Allows blocks that could not move to be tried again, after the publication of a step.
  void OnPublished();
  // Stops beginning moves, because the job failed.
  void Abandon() { abandoned_ = true; }

 private:
  std::optional<uint32_t> FindMarked();
  void Start(uint32_t block, uint32_t staging_slot);
  void Fail();
  void TryEnd();
  void End();

  JobTasks& io_;
  StepPipeline& pipeline_;
  BlockStore& store_;
  const WeightsCache& weights_;
  ResidencyCounters& counters_;
  std::optional<uint32_t> block_;  // the block that moves; its phase is in Blocks
  uint32_t next_ = 0;  // blocks below it were checked when PathTable::marks() was `marks_`
  uint64_t marks_ = 0;
  std::set<uint32_t> staying_;
  bool abandoned_ = false;
};

}  // namespace forebay::daemon
