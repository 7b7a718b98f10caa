// SPDX-License-Identifier: Apache-2.0
// Continues the jobs of the previous daemon, and leaves the jobs of this daemon to the next one.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/base/record_actions.h"
#include "daemon/exec/arena_registry.h"
#include "daemon/exec/job_memory.h"
#include "daemon/exec/recovery/absent_ranks.h"
#include "daemon/exec/recovery/job_records.h"
#include "daemon/exec/recovery/left_jobs.h"
#include "daemon/exec/recovery/stored_descriptors.h"
#include "daemon/exec/session_table.h"
#include "daemon/exec/swap_space.h"
#include "daemon/exec/task_runner.h"

namespace forebay::daemon {

// Jobs that the previous daemon has left, and the store for the next daemon. `staging`: name of the staging arena that was left;
// empty: none.
struct LeftBefore {
  DescriptorStore store = {};
  std::vector<AdoptedJob> jobs = {};
  std::string staging = {};
};

// States:
//
//   adopting  from the constructor to Own(): the arenas retain their bytes for another daemon if this process ends
//   owning    the arenas of a process that ends by itself lose their bytes. Those of a process that is killed do not.
//   leaving   for a job after Leave(): the next daemon gets its arenas and its record
//
// Invariants  1. The store has the arenas of each job with a stored record, and the staging arena.
//             2. A record ends before an arena that it describes is replaced or freed.
class Recovery {
 public:
  struct Parts {
    ArenaRegistry& registry;
    TaskRunner& runner;
    SwapSpace* swap;  // may be null
    JobMemoryTable& jobs;
    const SessionTable& sessions;
  };
  // Adds the jobs that were left to `parts.jobs`. `parts` outlive this object.
  Recovery(LeftBefore left, const Parts& parts);

  StoredDescriptors& store() { return store_; }
  JobRecords& records() { return records_; }
  AbsentRanks& ranks() { return ranks_; }

  // Names of the descriptors that the store must retain: arenas and processes of ranks that this daemon continues, its records,
  // and the staging arena of the earlier daemon.
  std::set<std::string> StoredNames() const { return store_.names(); }
  // Owns the arenas. Call it once no other daemon can continue the jobs.
  void Own();
  // True if a job continues before its ranks attach (UpdatesResumed).
  bool HasUnfinished() const;

  // Stores the arenas of the job and makes its record. Logs an error.
  void Record(const RecordJob& action, uint64_t workers);
  // Leaves the memory and the record of a job that has stopped to the next daemon.
  void Leave(JobId job);
  // Drops the descriptors of a job that is freed, and its retained gradients.
  void Drop(JobId job);
  // Returns the retained gradient arena of the rank if the session continues to use it, and destroys the arena otherwise. Returns
  // null if the session needs another arena.
  ArenaRegistry::Arena GradientsFor(JobId job, const AttachRequested& request, uint64_t bytes);
  void DropGradients(JobId job);
  // True if the process that attaches again was replaced: another process has attached as the same rank.
  bool IsLeftBehind(const AttachRequested& request, const JobName& job) const;

 private:
  void SetAtEnd(JobId job, pinned_mem::AtEnd at_end);

  Parts parts_;
  StoredDescriptors store_;
  JobRecords records_;
  AbsentRanks ranks_;
  std::string left_staging_;  // until Own()
};

}  // namespace forebay::daemon
