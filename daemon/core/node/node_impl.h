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
      options.swap.Free(job->AllSlots());  // the whole space; they are taken in `swap`
    }
    options.recovered = {};
  }

  // Lets slots that are allocated from now on follow the paths' shares and marks.
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

  // Each returns the job that the event concerns; nullptr: none.
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
  Job* On(const HandOverRequested& event);
  Job* On(const HandOverDue& event);
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
  // Bytes of the DRAM limit that are taken: by the node, by jobs that nobody has attached to, by weights of deleted jobs, and
  // `of_job` of all jobs.
  uint64_t Bytes(uint64_t (Job::*of_job)() const) const;
  // Bytes of the DRAM limit that are neither taken nor granted.
  uint64_t FreeBytes() const;
  // Use of DRAM and swap by all jobs except `returning`, which is parked and about to be created.
  NodeUse Use(const DurableJob* returning = nullptr) const;
  // Use by the owner's jobs except `other_than` and `returning`. Both may be null.
  OwnerUse UseOf(uint32_t uid, const Job* other_than, const DurableJob* returning = nullptr) const;
  // Bytes that the job may take beyond those that it was granted. FreeBytesFor(): those of them that are free.
  uint64_t LeftFor(const Job& job) const;
  uint64_t FreeBytesFor(const Job& job) const { return std::min(FreeBytes(), LeftFor(job)); }
  void Evict(const std::vector<Eviction>& evictions, Job& job);
  absl::Status MoveOwnBlocks(const MemoryPlan& plan, const GrantPolicy& policy, Job& job);
  absl::Status CheckReaderFits(const AttachRequested& request, const Job& job) const;
  std::pmr::vector<Job*> Runnable(Job* concerned);
  void Advance(Job* concerned, const std::vector<Action>& emitted);
  void Sweep(Job& job);
  void TryHandOver();
  std::shared_ptr<const DurableNode> NodeHandedOver() const;
  void DeleteParked(const JobName& name, const DurableJob& job);
  void GiveUpUpdate(const DurableJob& job, std::vector<nvme::Slot> slots,
                    const absl::Status& reason);

  Options options;
  // Memory that is allocated and freed within a step, by all jobs. The pool retains as much as was ever in use at once.
  std::pmr::unsynchronized_pool_resource memory{kStepMemoryOptions};
  ActionSink actions;
  StagingPool pool;
  nvme::SlotMap swap;
  PathTable path_table;
  std::set<uint32_t> marked_paths;  // as was reported
  uint64_t reported_marks = 0;
  JobId last_job;
  NodeLedger ledger;
  std::map<JobId, std::unique_ptr<Job>> jobs;  // dies before the pool and the actions
  std::map<JobName, JobId> names;
  std::map<SessionId, JobId> session_jobs;
  // Requests for deletion that wait for JobFreed.
  std::map<JobId, std::vector<uint64_t>> deletes;
  // Bytes of the weights of freed jobs, until JobFreed says that nobody uses them.
  std::map<JobId, uint64_t> freed_weights_bytes;
  // Jobs that have not begun, in the order of their creation.
  std::vector<JobId> waiting;
  // True if an attach has ended returns of blocks, and these have not resumed since.
  bool has_cut_returns = false;
  uint64_t turn = 0;
  // Jobs that continue in this event, besides the job that it concerns. These are jobs whose blocks were marked, and jobs whose
  // step is durable. Moves begin when all planned slots are reserved, because a move may exchange slots with the free ones.
  std::vector<JobId> going_on;
  // kWaiting: jobs become quiescent. kCommitting: the last ledger is made. kDone: HandedOver was emitted.
  enum class HandOver : uint8_t { kNone, kWaiting, kCommitting, kDone };
  HandOver hand_over = HandOver::kNone;
  bool waits_for_jobs = true;  // that can become quiescent
};

}  // namespace forebay::daemon
