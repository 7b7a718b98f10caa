// SPDX-License-Identifier: Apache-2.0
// The node's durable ledgers: the contents of the next ledger, and the jobs of the last ledger that nobody has attached to
// since the daemon was started.
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

// One ledger is made at a time, for all jobs. A step that is gathered meanwhile is part of the next ledger. A ledger that does
// not become durable is made again.
class NodeLedger {
 public:
  NodeLedger(ActionSink& actions, const DurableNode& recovered);

  // Jobs of the recovered ledger that nobody has attached to, and jobs that were parked again.
  using Parked = std::map<JobName, std::shared_ptr<const DurableJob>>;
  const Parked& parked() const { return parked_; }
  std::shared_ptr<const DurableJob> FindParked(const JobName& name) const;
  void Unpark(const JobName& name) { parked_.erase(name); }
  // Parks a job that could not be restored, or goes back to a durable step: the ledger continues to name it.
  void Park(std::shared_ptr<const DurableJob> job);

  // Retires slots of a freed job. The last two ledgers name some of these slots, so they are freed when two ledgers without the
  // job are durable. `owner`: the job, if it goes back to a durable step; attaches to it are refused until the slots are free
  // (IsRetiring).
  void Retire(std::vector<nvme::Slot> slots, JobId owner = 0);
  bool IsRetiring(JobId owner) const;
  uint64_t retired_bytes() const;
  // Bytes of DRAM that are retained for jobs that nobody has attached to, except `other_than`.
  uint64_t kept_bytes(const DurableJob* other_than = nullptr) const;

  // One more ledger that is made before the daemon ends, even if nothing waits for it.
  enum class Last : uint8_t { kNone, kWanted, kMaking, kMade };
  void WantLast() { last_ = Last::kWanted; }
  bool is_last_awaited() const { return last_ == Last::kWanted || last_ == Last::kMaking; }

  // Emits CommitLedger if a step, retired slots or the last ledger wait for it, or if a record names slots of a volume that has
  // no ledger yet.
  void Make(const std::map<JobId, std::unique_ptr<Job>>& jobs, JobId last_job);
  bool Owns(TaskId task) const { return task_ != 0 && task == task_; }
  // Handles the end of CommitLedger. Returns the jobs whose steps the ledger has, for the caller to report. Frees retired slots
  // in `swap`.
  std::vector<JobId> Finish(const absl::Status& status, nvme::SlotMap& swap);

 private:
  struct Retired {
    std::vector<nvme::Slot> slots;
    JobId owner = 0;
    uint32_t ledgers_left = 2;
    bool is_counted = false;  // the ledger being made counts
  };

  ActionSink& actions_;
  Parked parked_;
  std::vector<Retired> retired_;
  TaskId task_ = 0;               // 0: none is being made
  std::vector<JobId> in_ledger_;  // jobs whose steps it makes durable
  bool has_failed_ = false;       // the newest ledger
  bool has_made_ = false;         // any ledger: the volume is found again
  Last last_ = Last::kNone;
};

// Default bytes of a volume's ledger. `slot_bytes`: 0: not known. `keeps_files`: jobs can be durable on the volume.
uint64_t UsualLedgerBytes(uint64_t capacity_bytes, uint64_t slot_bytes, bool keeps_files);

// Errors  E_LIMIT  a ledger of `max_bytes` (0: there is none) has no room for the job beside `taken_bytes`.
absl::Status CheckLedgerRoom(const MemoryPlan& plan, uint64_t taken_bytes, uint64_t max_bytes);

}  // namespace forebay::daemon
