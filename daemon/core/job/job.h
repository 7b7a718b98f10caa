// SPDX-License-Identifier: Apache-2.0
// One training job: connects its life, its world, its sessions, its step and its blocks.
#pragma once

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "daemon/core/base/views.h"
#include "daemon/core/job/job_commands.h"
#include "daemon/core/job/job_life.h"
#include "daemon/core/job/job_parts.h"
#include "daemon/core/job/job_sessions.h"
#include "daemon/core/job/job_stop.h"
#include "daemon/core/job/job_world.h"

namespace forebay::daemon {

// Events change the parts of the job, and Advance() then starts all tasks that have become possible. Advance() is called after
// every event of the job, and after every other event while the job waits for a staging slot.
//
// States      JobLife has the state of the job, and Step the phase of its step. JobWorld has the states of the step arena and of
//             the float32 sums, JobStop the state of the planned stop. A job that fails in JobLife::kActive remains in this
//             state, and its step is in Step::Phase::kFailed.
// Invariants  1. Two activities that exclude each other (activity.h) are never both under way.
//             2. JobLife::has_begun() is false in kQueued, and true in kCreating, kRestoring and kActive.
//             3. DRAM is granted for a next plan only if a next plan exists. Float32 sums are in use only if the plan has them.
//             4. Each lease belongs to a session that has not ended, or to no session. A session has at most
//                kLeasesPerSessionMax leases.
//             5. Each unanswered command of a session waits in exactly one part.
//             6. The invariants of Step, Membership and WeightsCache hold.
class Job {
 public:
  // `actions`, `pool`, `swap` and `path_table` outlive the job.
  Job(JobSpec spec, ActionSink& actions, StagingPool& pool, nvme::SlotMap& swap,
      PathTable& path_table)
      : parts_(std::move(spec), actions, pool, swap, path_table) {}

  const JobParts& parts() const { return parts_; }
  JobLife& life() { return life_; }
  const JobLife& life() const { return life_; }
  JobWorld& world() { return world_; }
  const JobWorld& world() const { return world_; }
  JobStop& stop() { return stop_; }
  JobSessions& sessions() { return sessions_; }
  JobCommands& commands() { return commands_; }
  Residency& residency() { return parts_.residency; }
  const Placement& placement() const { return parts_.pipeline.store().placement(); }

  void OnTaskDone(const TaskDone& done);
  // Handles the end of the commit of a ledger that names the job's step.
  void OnLedger(const absl::Status& status);
  void OnDoubted(const std::vector<nvme::Slot>& slots, std::set<uint32_t>& paths) {
    parts_.durable.OnDoubted(slots, paths);
  }
  // Refuses the next sessions, whose plan waits for DRAM, with `reason`.
  void RefuseWorld(const absl::Status& reason);

  void Advance();
  void Prefetch();  // reads ahead into free staging slots, after Advance() of all jobs

  // Called between steps; see Residency.
  void Move(uint32_t block, uint64_t free_bytes) {
    if (MayMove()) parts_.residency.Move(block, free_bytes);
  }
  bool ReturnNext(uint64_t free_bytes) {
    return MayMove() && parts_.residency.ReturnNext(free_bytes);
  }
  uint64_t movable_bytes() const { return MayMove() ? parts_.residency.movable_bytes() : 0; }
  std::vector<Eviction> PlanEvictions(uint64_t bytes, nvme::SlotMap& swap) const {
    return MayMove() ? parts_.residency.PlanEvictions(bytes, swap) : std::vector<Eviction>();
  }
  void CheckInvariants() const;

  JobId id() const { return parts_.spec.id; }
  const std::string& name() const { return parts_.spec.name; }
  uint32_t uid() const { return parts_.spec.uid; }
  const MemoryPlan& plan() const { return parts_.spec.plan; }

 private:
  absl::Status OnBlockTask(TaskKind kind, const TaskDone& done);
  bool MayMove() const {
    return parts_.is_ready() && !parts_.failed() && life_.state() == JobLife::kActive;
  }
  bool MayUpdateEarly() const;
  void UseTimeBetweenSteps(bool is_due);
  void MoveDoubted();

  JobParts parts_;
  JobLife life_{parts_};
  JobWorld world_{parts_, life_};
  JobStop stop_{parts_, life_, world_};
  JobSessions sessions_{parts_, life_, world_, stop_};
  JobCommands commands_{parts_, life_, stop_, sessions_};
  bool reads_first_ = false;  // a block has moved since states were read
  uint32_t turns_left_ = 0;   // remaining reads and moves before the next decision
};

JobView ViewOf(const Job& job);
// Returns the view of a job that the ledger names and to which no client has attached.
JobView ViewOf(const DurableJob& job);

}  // namespace forebay::daemon
