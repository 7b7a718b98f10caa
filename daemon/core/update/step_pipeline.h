// SPDX-License-Identifier: Apache-2.0
// Applies a step, or sets masters before the first one: every block that is concerned is updated once. Blocks on swap stream
// through staging slots.
//
// Invariants (CheckInvariants):
//
//   - At most kUpdatesPerWorker updates for each worker run or wait for a worker.
//   - No block moves while an update runs.
//   - Early updates are begun only while no update runs.
//   - The invariants of BlockStore and SumPages.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/base/durable_job.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/job_tasks.h"
#include "daemon/core/blocks/block.h"
#include "daemon/core/blocks/block_map.h"
#include "daemon/core/blocks/path_table.h"
#include "daemon/core/plan/memory_plan.h"
#include "daemon/core/sessions/lease_table.h"
#include "daemon/core/update/block_store.h"
#include "daemon/core/update/early_updater.h"
#include "daemon/core/update/read_ahead.h"
#include "daemon/core/update/step_terms.h"
#include "daemon/core/update/sum_pages.h"
#include "daemon/core/update/update_order.h"
#include "daemon/core/update/update_queue.h"
#include "daemon/core/update/update_tasks.h"
#include "protocol/layout.h"

namespace forebay::daemon {

// Blocks are updated in the order in which the step before fetched their partitions (UpdateOrder). The next forward may begin
// before the update ends, and waits least in this order. Before the decision, blocks are read ahead into free staging slots
// (ReadAhead), and may be updated early (EarlyUpdater).
//
// After the decision, a worker updates the first ready block on swap, or the next block in DRAM if none is ready. A block on swap
// is read, updated and written. Then its staging slot is free again. The job never updates blocks while it reads states
// (StateAccess) or moves a block (Residency).
//
// One event publishes a step when all its blocks are written (BlockLedger). A write that fails is repeated in another slot.
// While every such write fails, the step waits and its blocks stay in their staging slots. A step is never undone, because
// weights and blocks in DRAM are updated in place.
//
// After the decision, a block whose weights are leased waits until the lease ends, and other blocks are updated first. The
// block is not read before the lease ends. If the block has been read already, another block, of any job, may take its staging
// slot. Then the block is read again.
class StepPipeline {
 public:
  struct Options {
    // Only the constructor reads the slots and the recorded sums.
    const std::vector<nvme::Slot>& swap_slots;
    const std::vector<nvme::Slot>& sum_slots;
    std::span<const KeptUpdate::Sums> recorded_sums;  // sums of an update of the previous daemon
    nvme::SlotMap& swap;
    PathTable& path_table;
    StagingPool& pool;
    uint32_t workers = 0;
    bool keeps_jobs = false;
  };
  StepPipeline(JobTasks& io, std::shared_ptr<const protocol::Layout> layout, const MemoryPlan& plan,
               const LeaseTable& leases, Options options);

  BlockStore& store() { return store_; }
  const BlockStore& store() const { return store_; }
  SumPages& sums() { return sums_; }
  const SumPages& sums() const { return sums_; }
  EarlyUpdater& early() { return early_; }
  const EarlyUpdater& early() const { return early_; }
  StepTerms& terms() { return terms_; }
  const StepTerms& terms() const { return terms_; }
  ReadAhead& read_ahead() { return read_ahead_; }
  UpdateTasks& tasks() { return tasks_; }
  const UpdateQueue& queue() const { return queue_; }

  // Reads blocks ahead while no step is applied.
  void Prefetch();
  // Orders the blocks for the update by `trace` (UpdateOrder). Not called while a step is applied.
  void FollowTrace(const std::vector<uint32_t>& trace);

  // Begins to apply a step. `is_as_announced`: the scalars equal those of the early updates. Tasks start with the next Pump().
  void Begin(StepOrder order, bool is_as_announced);
  // Begins to set masters from the weights, as step 0. False if blocks have no plane of masters.
  bool BeginMasters();
  // Continues the update of a daemon that was killed, once the store has adopted the job.
  void Resume(const KeptUpdate& update);
  void Pump();  // starts the tasks that can start
  bool running() const { return queue_.is_open(); }
  bool done() const {
    return running() && queue_.is_empty() && !early_.has_tasks() &&
           terms_.pass() != UpdatePass::kNorms;
  }
  // Ends a step that is done(). Returns the number of masters that overflowed.
  uint64_t Finish();
  // Stops starting tasks, because the job failed. Staging slots become free as their tasks end.
  void Abandon();

  // Handle tasks that have ended. After an error the job's state is unusable, and the job fails.
  struct ReadOutcome {
    uint32_t block = 0;
    absl::Status status;  // result of the read
    bool fatal = false;   // true if a step needs the block
  };
  ReadOutcome OnRead(const TaskDone& done);
  absl::Status OnUpdated(const TaskDone& done);
  void OnInstalled(const TaskDone& done);
  absl::Status OnWritten(const TaskDone& done);

  struct Statistics {
    PipelineCounters all;
    // Work between the publication of the newest step and the publication before.
    PipelineCounters last_step;
    // Bytes that the newest step read and wrote between its decision and its publication.
    uint64_t last_update_bytes = 0;
  };
  Statistics statistics() const;
  // OK, or the error of a write that is being repeated and that the running step or the next step's gradients wait for.
  const absl::Status& swap_wait() const {
    return swap_wait_.ok() ? sums_.swap().write_error() : swap_wait_;
  }
  void CheckInvariants(uint64_t committed_step) const;

 private:
  void Open(StepOrder order, UpdatePass pass);
  void BeginPass();
  void EndNormsPass();
  void FollowDecision(uint32_t block, bool is_updated);
  void AcceptEarly(uint32_t block);
  void EndAccepted(uint32_t block);
  void EndAcceptedUpdate(uint32_t block);

  void PrepareStaged();
  void StartReads();
  void StartUpdate(uint32_t block);
  void StartInstall(uint32_t block);
  bool UpdatesHaveOtherWork() const;
  std::optional<uint32_t> FirstReady() const;
  bool MayUpdateInPlace(uint32_t block);
  bool IsLeased(uint32_t block) const;
  uint32_t UpdatesMax() const;
  bool is_rewriting() const;

  void RecordWritten(uint32_t block);
  absl::Status OnUpdateFailed(uint32_t block, const absl::Status& status);
  absl::Status OnWriteFailed(const UpdateTasks::Written& write, const absl::Status& status);
  void SetWeightsChanged();

  JobTasks& io_;
  std::shared_ptr<const protocol::Layout> layout_;
  const LeaseTable& leases_;
  uint32_t workers_;
  bool keeps_jobs_;
  BlockMap map_;
  UpdateOrder order_;
  BlockStore store_;
  SumPages sums_;
  StepTerms terms_;
  UpdateTasks tasks_;
  ReadAhead read_ahead_;
  EarlyUpdater early_;
  UpdateQueue queue_;
  bool abandoned_ = false;
  bool is_recorded_ = false;  // another daemon can continue the running update
  uint64_t overflowed_masters_ = 0;
  absl::Status swap_wait_;  // newest error of a write that is being repeated
  struct {
    PipelineCounters at_publication;  // counters at the newest publication
    uint64_t bytes_at_decision = 0;   // bytes at the decision of the running step
  } before_;
  Statistics statistics_;  // without Statistics::all
};

}  // namespace forebay::daemon
