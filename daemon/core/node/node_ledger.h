// SPDX-License-Identifier: Apache-2.0
// The node's durable ledgers: what the next one says of all jobs, and what the last one said of jobs that nobody has
// attached to since the daemon was started.
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

// One ledger is made at a time, for all jobs: a step that is gathered meanwhile is in the next one. One that is not
// made durable is made again.
class NodeLedger {
 public:
  NodeLedger(ActionSink& actions, const DurableNode& recovered);

  // Those of the ledger that was found, that nobody has attached to.
  using Parked = std::map<JobName, std::shared_ptr<const DurableJob>>;
  const Parked& parked() const { return parked_; }
  std::shared_ptr<const DurableJob> FindParked(const JobName& name) const;
  void Unpark(const JobName& name) { parked_.erase(name); }
  // It could not come back: the ledger keeps it.
  void Park(std::shared_ptr<const DurableJob> job);

  // Slots of a job that is no more. The last two ledgers name some of them: they are given out when as many
  // without the job are durable.
  // `owner`: a job that is to have them again, with what it goes back to.
  void Retire(std::vector<nvme::Slot> slots, JobId owner = 0);
  bool IsRetiring(JobId owner) const;
  uint64_t retired_bytes() const;
  // DRAM that jobs which nobody has attached to hold: of those that were handed over, but `other_than`.
  uint64_t kept_bytes(const DurableJob* other_than = nullptr) const;

  // Before the daemon ends, one more ledger is made, whatever waits for it.
  enum class Last : uint8_t { kNone, kWanted, kMaking, kMade };
  void WantLast() { last_ = Last::kWanted; }
  bool is_last_awaited() const { return last_ == Last::kWanted || last_ == Last::kMaking; }

  // Emits CommitLedger where a step or retired slots wait for it, or a record names slots of a volume that has none.
  void Make(const std::map<JobId, std::unique_ptr<Job>>& jobs, JobId last_job);
  bool Owns(TaskId task) const { return task_ != 0 && task == task_; }
  // Its outcome. Returns the jobs whose steps it has, for the caller to report. Slots that are free now go to
  // `swap`.
  std::vector<JobId> Finish(const absl::Status& status, nvme::SlotMap& swap);

 private:
  struct Retired {
    std::vector<nvme::Slot> slots;
    JobId owner = 0;
    uint32_t ledgers_left = 2;
    bool is_counted = false;  // by the ledger that is being made
  };

  ActionSink& actions_;
  Parked parked_;
  std::vector<Retired> retired_;
  TaskId task_ = 0;               // 0: none is being made
  std::vector<JobId> in_ledger_;  // whose steps it makes durable
  bool has_failed_ = false;       // the newest one
  bool has_made_ = false;         // any: the volume is found again
  Last last_ = Last::kNone;
};

// The ledger of a volume where nothing is said of its size. `slot_bytes`: 0: not known. `keeps_files`: jobs can be
// durable there.
uint64_t UsualLedgerBytes(uint64_t capacity_bytes, uint64_t slot_bytes, bool keeps_files);

// Errors  E_LIMIT  a ledger of `max_bytes` (0: there is none) has no room for the job beside `taken_bytes`.
absl::Status CheckLedgerRoom(const MemoryPlan& plan, uint64_t taken_bytes, uint64_t max_bytes);

}  // namespace forebay::daemon
