// SPDX-License-Identifier: Apache-2.0
// Makes the node's durable ledgers, and holds the jobs of the last ledger to which no client has attached since the daemon was
// started.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/base/durable_job.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/job_name.h"
#include "daemon/core/base/job_tasks.h"
#include "daemon/core/plan/memory_plan.h"
#include "nvme/slot_map.h"

namespace forebay::daemon {

class Job;

// One ledger is written at a time, for all jobs. A step that is gathered during the write is part of the next ledger. A ledger
// that could not be made durable is written again.
class NodeLedger {
 public:
  NodeLedger(ActionSink& actions, const DurableNode& recovered);

  // Jobs of the recovered ledger to which no client has attached, and jobs for which Park() was called.
  using Parked = std::map<JobName, std::shared_ptr<const DurableJob>>;
  const Parked& parked() const { return parked_; }
  std::shared_ptr<const DurableJob> FindParked(const JobName& name) const;
  void Unpark(const JobName& name) { parked_.erase(name); }
  // Parks a job that could not be restored, or that returns to a durable step. The ledger continues to name the job.
  void Park(std::shared_ptr<const DurableJob> job);

  // Retires slots of a freed job. The last two ledgers name some of these slots, so the slots are freed when two ledgers
  // without the job are durable. `owner`: the job, if it returns to a durable step. Attaches to the job are refused until the
  // slots are free (IsRetiring).
  void Retire(std::vector<nvme::Slot> slots, JobId owner = 0);
  bool IsRetiring(JobId owner) const;
  uint64_t retired_bytes() const;
  // Returns the bytes of DRAM that are retained for jobs to which no client has attached, except `other_than`.
  uint64_t kept_bytes(const DurableJob* other_than = nullptr) const;

  // True if a record names slots of the volume, and this daemon has committed no ledger by which the next daemon finds the volume.
  bool WantsFirst(const std::map<JobId, std::unique_ptr<Job>>& jobs) const;
  // Emits CommitLedger if a step or retired slots wait for a ledger, or if the first ledger is wanted.
  void Make(const std::map<JobId, std::unique_ptr<Job>>& jobs, JobId last_job);
  bool Owns(TaskId task) const { return task_ != 0 && task == task_; }
  // Handles the end of CommitLedger. Returns the jobs whose steps are in the ledger, so that the caller can report this to the
  // jobs. Frees retired slots in `swap`.
  std::vector<JobId> Finish(const absl::Status& status, nvme::SlotMap& swap);

 private:
  struct Retired {
    std::vector<nvme::Slot> slots;
    JobId owner = 0;
    uint32_t ledgers_left = 2;
    bool is_counted = false;  // the ledger in progress counts in ledgers_left
  };

  ActionSink& actions_;
  Parked parked_;
  std::vector<Retired> retired_;
  TaskId task_ = 0;               // running CommitLedger; 0: none runs
  std::vector<JobId> in_ledger_;  // jobs whose steps are in the ledger in progress
  bool has_failed_ = false;       // the newest ledger has failed
  bool has_made_ = false;         // a ledger was committed, so the next daemon finds the volume
};

// Returns the default bytes of a volume's ledger. `slot_bytes` is 0 if it is not known. `keeps_files`: jobs can be durable on
// the volume.
uint64_t UsualLedgerBytes(uint64_t capacity_bytes, uint64_t slot_bytes, bool keeps_files);

// Errors  E_LIMIT  the job does not fit in a ledger of `max_bytes`, of which `taken_bytes` are taken. `max_bytes` 0: no ledger.
absl::Status CheckLedgerRoom(const MemoryPlan& plan, uint64_t taken_bytes, uint64_t max_bytes);

}  // namespace forebay::daemon
