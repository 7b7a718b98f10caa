// SPDX-License-Identifier: Apache-2.0
// What a NodeState is made of: shared by the files that implement it.
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
      options.swap.Free(job->AllSlots());  // the space in all; they are taken in `swap`
    }
    options.recovered = {};
  }

  // Slots that are allocated from now on follow the paths' shares and marks.
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
  // Of the limit: what the node, deleted jobs' weights and `of_job` of all jobs take.
  uint64_t Bytes(uint64_t (Job::*of_job)() const) const;
  // Neither taken nor granted.
  uint64_t FreeBytes() const;
  // Of all jobs but `returning`, which is parked and about to be made.
  NodeUse Use(const DurableJob* returning = nullptr) const;
  // The same, of the owner's jobs but `other_than`. Both may be null.
  OwnerUse UseOf(uint32_t uid, const Job* other_than, const DurableJob* returning = nullptr) const;
  // What the job may take beyond what it was granted; of this, what is free.
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
  // What comes and goes within a step, of all jobs. Holds as much as was ever in use at once.
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
  // Requests that wait for JobFreed.
  std::map<JobId, std::vector<uint64_t>> deletes;
  // Weights of jobs that are no more, until JobFreed says that nobody uses them.
  std::map<JobId, uint64_t> freed_weights_bytes;
  // Jobs that have not begun, in their order.
  std::vector<JobId> waiting;
  // An attach has ended returns of blocks, and they have not gone on since.
  bool has_cut_returns = false;
  uint64_t turn = 0;
  // Jobs that go on in this event, beside the one that it concerns: whose blocks were marked (their moves begin when
  // all slots that were planned are reserved: a move may exchange slots with the free ones), whose step is durable.
  std::vector<JobId> going_on;
  // Jobs come to rest; the last ledger is made; all is said.
  enum class HandOver : uint8_t { kNone, kWaiting, kCommitting, kDone };
  HandOver hand_over = HandOver::kNone;
  bool waits_for_jobs = true;  // that can come to rest
};

}  // namespace forebay::daemon
