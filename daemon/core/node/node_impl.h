// SPDX-License-Identifier: Apache-2.0
// Implementation of NodeState, shared by several files.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <memory_resource>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/job_name.h"
#include "daemon/core/base/job_tasks.h"
#include "daemon/core/base/limits.h"
#include "daemon/core/blocks/path_table.h"
#include "daemon/core/blocks/staging.h"
#include "daemon/core/job/job.h"
#include "daemon/core/node/node_ledger.h"
#include "daemon/core/node/node_state.h"
#include "daemon/core/plan/grant_policy.h"
#include "daemon/core/plan/memory_plan.h"
#include "nvme/slot_map.h"

namespace forebay::daemon {

struct NodeState::Impl {
  explicit Impl(const Options& node_options)
      : options(node_options),
        actions(&memory),
        pool(node_options.staging_slots, &memory),
        swap(node_options.swap),
        path_table(swap.paths(), node_options.swap_rates),
        last_job(node_options.recovered.last_job),
        ledger(actions, node_options.recovered) {
    actions.set_last_lease(node_options.recovered.last_lease);
    for (const auto& [name, job] : ledger.parked()) {
      options.swap.Free(job->AllSlots());  // options.swap has all space as free; `swap` does not
    }
    options.recovered = {};
  }

  // Sets the weights by which later slots are allocated, from the shares and marks of the paths.
  void WeighPaths() { swap.SetWeights(path_table.Weights()); }
  void ReportMarks() {
    if (std::exchange(reported_marks, path_table.mark_changes()) == path_table.mark_changes()) {
      return;
    }
    for (uint32_t path = 0; path < path_table.paths(); ++path) {
      const bool is_marked = path_table.is_marked(path);
      if (marked_paths.contains(path) == is_marked) continue;
      actions.Emit(SwapPathMarked{.path = path, .marked = is_marked});
      if (is_marked) marked_paths.insert(path);
      if (!is_marked) marked_paths.erase(path);
    }
  }

  // Handle one event. Return the job that the event concerns, or nullptr if it concerns no job.
  Job* On(const AttachRequested& request);
  Job* On(const SessionMapped& event);
  Job* On(const SessionEnded& event);
  Job* On(const SessionReconnected& event);
  Job* On(const RankEnded& event);
  Job* On(const CommandArrived& event);
  Job* On(const StepRequestCopied& event);
  Job* On(const SummaryCopied& event);
  Job* On(const StagingSlotKept& event);
  Job* On(const StagingSlotReturned& event);
  Job* On(const LeaseTimeExpired& event);
  Job* On(const BlockMoveRequested& request);
  Job* On(const TaskDone& event);
  Job* On(const StopRequested& event);
  Job* On(const StopDue& event);
  Job* On(const UpdatesResumed& event);
  Job* On(const DeleteJobRequested& request);
  Job* On(const JobFreed& event);

  absl::StatusOr<Job*> JobFor(const AttachRequested& request);
  Job* JobOf(SessionId session);
  Job* JobNamed(const JobName& name) const;
  absl::StatusOr<Job*> MakeJob(const AttachRequested& request, JobName name);
  bool MayAttach(const AttachRequested& request) const;
  uint64_t LedgerTaken(const DurableJob* recovered) const;
  absl::Status CheckParked(const AttachRequested& request, const DurableJob& job) const;
  absl::Status ChangeWorld(const AttachRequested& request, Job& job);
  absl::Status MakeRoom(const MemoryPlan& plan, nvme::SlotMap left, NodeUse use);
  void GiveFloatSums(Job& job);
  void ReportWait(const Job& job, uint64_t awaited_bytes);
  void AdmitWaiting();
  void KeepBlocks();
  void ReturnBlocks();
  void ResumeReturns();
  absl::Status NoRoomError(const Job& waiting_job) const;
  // Returns the bytes of the DRAM limit that are taken by the node, by jobs to which no client has attached, by weights of
  // deleted jobs, and by all other jobs. The last is the sum of `of_job` over these jobs.
  uint64_t Bytes(uint64_t (JobWorld::*of_job)() const) const;
  // Returns the bytes of the DRAM limit that are neither taken nor granted.
  uint64_t FreeBytes() const;
  // Returns the use of DRAM and swap by all jobs except `returning`, a parked job that is about to be created.
  NodeUse Use(const DurableJob* returning = nullptr) const;
  // Returns the use of DRAM and swap by the owner's jobs except `other_than` and `returning`. Both may be null.
  OwnerUse UseOf(uint32_t uid, const Job* other_than, const DurableJob* returning = nullptr) const;
  // LeftFor() returns the bytes that the job may take in addition to its granted bytes. FreeBytesFor() returns how many of
  // these are free.
  uint64_t LeftFor(const Job& job) const;
  uint64_t FreeBytesFor(const Job& job) const { return std::min(FreeBytes(), LeftFor(job)); }
  void Evict(const std::vector<Eviction>& evictions, Job& job);
  absl::Status MoveOwnBlocks(const MemoryPlan& plan, const GrantPolicy& policy, Job& job);
  absl::Status CheckReaderFits(const AttachRequested& request, const Job& job) const;
  std::pmr::vector<Job*> Runnable(Job* concerned);
  void Advance(Job* concerned, const std::vector<Action>& emitted);
  void Sweep(Job& job);
  void TryStop();
  void DeleteParked(const JobName& name, const DurableJob& job);
  void GiveUpUpdate(const DurableJob& job, std::vector<nvme::Slot> slots,
                    const absl::Status& reason);

  Options options;
  // Memory that all jobs allocate and free within a step. The pool never shrinks: it retains the maximum that was in use at
  // once.
  std::pmr::unsynchronized_pool_resource memory{kStepMemoryOptions};
  ActionSink actions;
  StagingPool pool;
  nvme::SlotMap swap;
  PathTable path_table;
  std::set<uint32_t> marked_paths;  // paths last reported as marked
  uint64_t reported_marks = 0;
  JobId last_job;
  NodeLedger ledger;
  std::map<JobId, std::unique_ptr<Job>> jobs;  // destroyed before `pool` and `actions`
  std::map<JobName, JobId> names;
  std::map<SessionId, JobId> session_jobs;
  // Requests for deletion that wait for JobFreed.
  std::map<JobId, std::vector<uint64_t>> deletes;
  // Bytes of the weights of freed jobs, until JobFreed reports that no process uses these weights.
  std::map<JobId, uint64_t> freed_weights_bytes;
  // Jobs that have not begun, in the order of their creation.
  std::vector<JobId> waiting;
  // True if an attach has stopped the return of blocks to DRAM, and the return has not resumed since.
  bool has_cut_returns = false;
  uint64_t turn = 0;
  // Jobs that Advance() is called for after this event, in addition to the job that the event concerns: jobs whose blocks were
  // marked, and jobs whose step is durable. Moves begin only when all planned slots are reserved, because a move may exchange
  // its slots for free slots.
  std::vector<JobId> going_on;
  // kWaiting: waits until jobs have stopped. kDone: JobsStopped was emitted.
  enum class Stop : uint8_t { kNone, kWaiting, kDone };
  Stop stop = Stop::kNone;
  bool waits_for_jobs = true;  // cleared by StopDue
};

}  // namespace forebay::daemon
