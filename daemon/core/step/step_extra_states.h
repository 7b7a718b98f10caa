// SPDX-License-Identifier: Apache-2.0
// The extra_state of a job's ranks in the step arena.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory_resource>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/base/durable_job.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/job_tasks.h"
#include "daemon/core/plan/job_spec.h"
#include "daemon/core/sessions/step_barrier.h"

namespace forebay::daemon {

// The step arena has two slots for the extra_state of each rank: one holds the committed step's, and the called step's is copied
// to the other. The commit exchanges the slots.
//
// Ownership  The arguments of the constructor outlive this object.
class StepExtraStates {
 public:
  // Sets the sizes of the recovered job's extra_state.
  StepExtraStates(const JobSpec& spec, JobTasks& io);

  // Retains the extra_state of ranks that are in both worlds.
  void OnWorldChanged() { bytes_.resize(spec_.world_size(), 0); }

  // Starts the tasks that copy the extra_state of a called step.
  void Copy(const StepBarrier::Calls& calls);
  void OnCopied() { --copies_; }
  bool is_copying() const { return copies_ > 0; }
  void Commit(const StepBarrier::Calls& calls);

  uint32_t slot() const { return slot_; }  // slot with the committed step's extra_state
  // Returns the committed extra_state of a rank, as a range of the step arena.
  StatePart Part(uint32_t rank) const {
    return {.offset_bytes = spec_.plan.extra_state_slot(rank, slot_), .bytes = bytes_[rank]};
  }
  std::vector<StatePart> Parts() const;
  // Returns the ranges of the called step, by rank.
  std::pmr::vector<StatePart> NextParts(const StepBarrier::Calls& calls) const;

 private:
  const JobSpec& spec_;
  JobTasks& io_;
  uint32_t slot_ = 0;
  std::vector<uint64_t> bytes_;  // sizes of the committed step's extra_state, by rank
  uint32_t copies_ = 0;          // running tasks
};

}  // namespace forebay::daemon
