// SPDX-License-Identifier: Apache-2.0
// Arenas of jobs: created with the job, freed once no process uses them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/job_name.h"
#include "daemon/exec/arena_policy.h"
#include "daemon/exec/arena_registry.h"
#include "daemon/exec/task_runner.h"
#include "daemon/exec/timeline.h"
#include "protocol/layout.h"

namespace forebay::daemon {

// Options with which a job's arenas are created, and with which arenas of an earlier daemon are taken over.
pinned_mem::ArenaOptions WeightsOptions(const ArenaPolicy& policy, const JobName& job,
                                        uint64_t bytes);
// `resident`: the parts that have memory.
pinned_mem::ArenaOptions StateOptions(const ArenaPolicy& policy, const JobName& job, uint64_t bytes,
                                      uint64_t block_bytes, const std::vector<StatePart>& resident);

// Options of the step arena. The first `bytes` bytes and the part `float_sums` have memory.
pinned_mem::ArenaOptions StepOptions(const ArenaPolicy& policy, const JobName& job, uint64_t bytes,
                                     const StatePart& float_sums, uint64_t capacity_bytes);

// Arenas, layout, timeline and counters of a job. `state` is null if the job has no state arena, `step` while it must be created.
struct JobMemory {
  JobName name;
  std::shared_ptr<const protocol::Layout> layout;
  ArenaRegistry::Arena weights;
  ArenaRegistry::Arena state;
  ArenaRegistry::Arena step;
  // Gradient arenas of an earlier daemon, by rank, retained for ranks that attach again. A session that is about to attach takes
  // the arena of its rank, and gives it back if the attach fails.
  std::map<uint32_t, ArenaRegistry::Arena> gradients;
  // extra_state by rank, saved from a step arena that was freed when its replacement could not be created.
  std::vector<std::vector<std::byte>> extra_state;
  // True while a worker populates the arenas: `made_bytes` so far of `making_bytes`.
  bool is_making = false;
  std::shared_ptr<std::atomic<uint64_t>> made_bytes = std::make_shared<std::atomic<uint64_t>>(0);
  uint64_t making_bytes = 0;
  uint64_t next_log_ns = 0;
  Timeline timeline;
  // Control-plane calls of its sessions, which the control thread counts.
  std::shared_ptr<std::atomic<uint64_t>> rpc_calls = std::make_shared<std::atomic<uint64_t>>(0);
};

// Threads  The loop thread. Arenas are created and freed on the pool that may block.
class JobMemoryTable {
 public:
  // Called with TaskDone and JobFreed.
  using Raise = absl::AnyInvocable<void(Event)>;

  // `registry` and `runner` outlive the table.
  JobMemoryTable(const ArenaPolicy& policy, ArenaRegistry& registry, TaskRunner& runner,
                 Raise raise);

  // Adds a job with arenas of an earlier daemon. Create() is called for the job later, and uses these arenas.
  void Add(JobId id, JobMemory memory);
  // Creates the arenas of a job; raises TaskDone at the end. Returns true if the job retains the step arena that it has.
  bool Create(const CreateJobMemory& action, JobName name,
              std::shared_ptr<const protocol::Layout> layout);
  // Replaces the step arena; raises TaskDone at the end. Call it while no task uses the step arena.
  void Replace(const ReplaceStepArena& action);
  // Ends with TaskDone.
  void Populate(const PopulateStepArena& action);
  // Frees the arenas of the job (with keeps_arenas the step arena alone). Weights are freed once no process has them open or
  // mapped any more; JobFreed says whether they are in use.
  void Free(const FreeJob& action);

  // Returns null if no job has this id.
  const JobMemory* Find(JobId id) const;
  JobMemory& at(JobId id);
  // Returns the job's id; nullopt: no job has this name.
  std::optional<JobId> FindNamed(const JobName& name) const;
  const std::map<JobId, JobMemory>& all() const { return jobs_; }

  // Frees the weights of deleted jobs that no process uses any more, and logs how far the memory of
  // new jobs is. Returns when to call it next.
  uint64_t RunTimers();

 private:
  // Weights of a deleted job.
  struct DeletedWeights {
    ArenaRegistry::Arena arena;
    uint64_t next_try_ns = 0;
    uint64_t wait_ns = 0;
    bool trying = false;
  };

  // Registers the arenas that are not null. Each replaces the job's arena of that kind.
  void SetArenas(JobMemory& job, ArenaRegistry::Arena weights, ArenaRegistry::Arena state,
                 ArenaRegistry::Arena step);
  // Frees the weights on a worker if no process uses them. The worker also destroys `rest`.
  void TryFreeWeights(JobId id, JobMemory rest);

  const ArenaPolicy policy_;
  ArenaRegistry& registry_;
  TaskRunner& runner_;
  Raise raise_;
  std::map<JobId, JobMemory> jobs_;
  std::map<JobId, DeletedWeights> deleted_weights_;
};

}  // namespace forebay::daemon
