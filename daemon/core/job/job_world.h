// SPDX-License-Identifier: Apache-2.0
// The world of a job: the plan of its sessions, and the memory and swap that the plan takes.
#pragma once

#include <memory_resource>
#include <optional>
#include <set>

#include "daemon/core/job/job_life.h"
#include "daemon/core/job/job_parts.h"

namespace forebay::daemon {

// Ownership  The arguments of the constructor outlive this object.
class JobWorld {
 public:
  JobWorld(JobParts& job, const JobLife& life)
      : job_(job),
        life_(life),
        float_sums_(job.spec.plan.uses_float_sums ? FloatSums::kInUse : FloatSums::kNone) {}

  // True if a checked rank needs another plan (PlanWorld) before it attaches. Its world size then differs from room(), its sums
  // are to be float32 from the start, or the job's step arena could not be created.
  bool NeedsChange(const AttachRequested& request) const;
  // Returns the session request of the next plan. If no next plan exists, that of the current plan.
  const SessionRequest& room() const { return (next_plan_ ? *next_plan_ : job_.spec.plan).session; }
  // Sets the plan of the next sessions. The plan takes effect when all sessions and tasks of the old world have ended and
  // enough DRAM is free for the plan (GiveRoom). Until then the next sessions wait.
  void Change(MemoryPlan plan);
  bool has_next_plan() const { return next_plan_.has_value(); }
  // Returns the bytes that the next sessions' plan takes in addition to the current plan. nullopt if no plan waits for DRAM.
  std::optional<uint64_t> awaited_bytes() const;
  void GiveRoom() { has_room_ = true; }
  void DropNextPlan() { next_plan_.reset(); }
  // Replaces the plan once the last step of the old world is published and the sessions of that world are closed. True if the
  // plan was replaced.
  bool TryChange();
  void OnStepArenaMade(const TaskDone& done);
  bool is_making_arena() const { return arena_ == StepArena::kMaking; }
  // False if the step arena of the plan could not be created.
  bool has_step_arena() const { return arena_ != StepArena::kMissing; }

  // True if a further backward pass waits for float32 sums, whose plan().float_sums_bytes are not granted yet.
  bool WantsFloatSums() const;
  void MakeFloatSums();
  void OnFloatSumsMade(const TaskDone& done);
  // Ends the attempt that waits for float32 sums with `reason`.
  void RefuseFloatSums(const absl::Status& reason) {
    job_.step.parts().gradients.RefuseFloatSums(reason);
  }
  void TryUseFloatSums();
  // Returns the bytes of float32 sums that are created and not used yet.
  uint64_t unused_sums_bytes() const {
    return float_sums_ == FloatSums::kMade ? job_.spec.plan.float_sums_bytes : 0;
  }

  // Returns the activities that are under way in the job.
  Activities UnderWay() const;

  const std::pmr::set<nvme::Slot>& swap_slots() const {
    return job_.pipeline.store().ledger().slots();
  }
  const std::set<nvme::Slot>& sum_slots() const { return job_.pipeline.sums().swap().slots(); }
  // Returns the bytes of arenas and tables, without states and readers.
  uint64_t fixed_bytes() const;
  // Return the bytes of the DRAM limit that the job takes now, and after all its marked blocks have moved.
  uint64_t dram_bytes() const;
  uint64_t granted_bytes() const;
  // Returns the bytes of the swap slots that the job has now.
  uint64_t swap_bytes() const;
  void CheckInvariants() const;

 private:
  enum class StepArena : uint8_t {
    kReady,    // the step arena has the size of the plan
    kMaking,   // the step arena is being replaced, and no attach is answered
    kMissing,  // the step arena could not be created, and the next attach changes the plan again
  };
  enum class FloatSums : uint8_t {
    kNone,    // float32 sums take no memory, and gradients are added to the plan's accumulators
    kMaking,  // the memory of the float32 sums is being created
    kMade,  // the memory of the float32 sums is created, and the step still adds to sums of 16 bits
    kInUse,  // gradients are added to float32 sums
  };

  JobParts& job_;
  const JobLife& life_;
  std::optional<MemoryPlan> next_plan_;  // plan for the sessions that wait for their attach
  bool has_room_ = false;                // DRAM for next_plan_ is granted
  StepArena arena_ = StepArena::kReady;
  FloatSums float_sums_;
};

}  // namespace forebay::daemon
