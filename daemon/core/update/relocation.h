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

// Blocks that a step updates leave a marked path by that alone; this class moves the others: each is read,
// written to a path that works as it is, with its checksum, and published. Where its read fails, or no path
// that works has room, it stays until the next step has been published. One in a slot in doubt (BlockLedger), for which
// a durable step may wait, goes to any other slot; where that fails, the next ledger brings it back here. What is read
// is verified before it is written.
//
// The old slot is free when no weights are on their way from it (WeightsCache). Until then the block has a
// pending version, so that no step is decided and nothing is updated early: in_progress().
//
// Ownership  What the constructor gets outlives it.
class Relocation {
 public:
  Relocation(JobTasks& io, StepPipeline& pipeline, const WeightsCache& weights,
             ResidencyCounters& counters)
      : io_(io), pipeline_(pipeline), weights_(weights), counters_(counters) {}

  // Goes on with the one in progress, or begins the next. To be called as Residency::Pump.
  void Pump();
  // The same, of slots in doubt alone: also while a durable step waits for it, and nothing else runs.
  void PumpDoubted();
  bool in_progress() const { return block_.has_value(); }
  void OnRead(const StepPipeline::ReadOutcome& outcome);
  // Errors  E_CORRUPT  what a slot in doubt holds is not the block: the job cannot go on.
  absl::Status OnWritten(const TaskDone& done);
  // Blocks that stayed are tried again.
  void OnPublished();
  // The job failed: nothing begins any more.
  void Abandon() { abandoned_ = true; }

 private:
  enum class Phase : uint8_t { kReading, kWriting, kWritten };

  std::optional<uint32_t> FindMarked();
  void Start(uint32_t block, uint32_t staging_slot);
  void Fail();
  void End();

  JobTasks& io_;
  StepPipeline& pipeline_;
  const WeightsCache& weights_;
  ResidencyCounters& counters_;
  std::optional<uint32_t> block_;
  Phase phase_ = Phase::kReading;
  uint32_t next_ = 0;  // blocks before it were looked at, since `marks_`
  uint64_t marks_ = 0;
  std::set<uint32_t> staying_;
  bool abandoned_ = false;
};

}  // namespace forebay::daemon
