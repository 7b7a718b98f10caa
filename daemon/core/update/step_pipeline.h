// SPDX-License-Identifier: Apache-2.0
// Applies a step, or sets masters before the first one: every block that is concerned is updated once. Blocks on swap stream
// through staging slots.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <memory_resource>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "cpu_adam/update_kernel.h"
#include "daemon/core/base/durable_job.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/job_tasks.h"
#include "daemon/core/base/limits.h"
#include "daemon/core/blocks/block.h"
#include "daemon/core/blocks/block_ledger.h"
#include "daemon/core/blocks/block_map.h"
#include "daemon/core/blocks/path_table.h"
#include "daemon/core/blocks/placement.h"
#include "daemon/core/blocks/staging.h"
#include "daemon/core/plan/memory_plan.h"
#include "daemon/core/sessions/lease_table.h"
#include "daemon/core/update/gathered_blocks.h"
#include "daemon/core/update/sum_pages.h"
#include "protocol/layout.h"
#include "protocol/wire.h"

namespace forebay::daemon {

// Counts the work of steps. Zeros that the first step begins with count as read. Setting masters before the first step does not
// count.
struct PipelineCounters {
  uint64_t update_reads = 0;             // swapped blocks that were updated
  uint64_t update_reads_prefetched = 0;  // updated blocks read before an update waited for them
  uint64_t read_bytes = 0;               // bytes read for updates
  uint64_t written_bytes = 0;
  uint64_t early_updates = 0;    // blocks updated before the decision, and accepted
  uint64_t dropped_updates = 0;  // blocks whose early update was dropped

  uint64_t bytes() const { return read_bytes + written_bytes; }
};

// Blocks are updated in the order in which the step before fetched their partitions. The next forward may begin before the
// update ends, and waits least in this order. Before the decision, blocks are read ahead in that order, into free staging slots
// only. After the decision, a worker updates the first ready block on swap, or the next resident block if none is ready. A
// staged block is read, updated and written; then its slot is free again. The job never updates blocks while it reads states
// (StateAccess) or moves a block (Residency).
//
// One event publishes a step when all its blocks are written (BlockLedger). A write that fails is repeated in another slot.
// While every such write fails, the step waits and its blocks stay in their staging slots. A step is never undone, because
// weights and blocks in DRAM are updated in place.
//
// After the decision, a block whose weights are leased waits until the lease ends, and other blocks are updated first. The
// block is not read before the lease ends. If the block has been read already, another block, of any job, may take its staging
// slot. Then the block is read again.
//
// Between BeginEarly() and the decision, blocks on swap that have all their gradients are updated early with the
// announced scalars. Among these blocks, the block that the next forward needs first is updated first. Begin() accepts the
// early updates that were computed with the scalars of the decision. The other blocks are updated from scratch.
//
// LAMB makes two passes over all blocks. The first pass computes the norms of parameters, and changes nothing. The norms are
// summed in the order of blocks. The second pass updates with the trust ratios from these sums.
class StepPipeline {
 public:
  StepPipeline(JobTasks& io, std::shared_ptr<const protocol::Layout> layout, const MemoryPlan& plan,
               const std::vector<nvme::Slot>& swap_slots, const std::vector<nvme::Slot>& sum_slots,
               nvme::SlotMap& swap, PathTable& path_table, StagingPool& pool,
               const LeaseTable& leases, uint32_t workers, bool keeps_jobs);

  // Reads blocks ahead while no step is applied.
  void Prefetch();

  // Orders the blocks for the update by the earliest position in `trace` of any partition of the block. Blocks without a
  // partition in `trace` come last. Not called while a step is applied.
  void FollowTrace(const std::vector<uint32_t>& trace);
  // Begins to apply a step. `is_as_announced`: the scalars equal those of BeginEarly(). Tasks start with the next Pump().
  void Begin(StepOrder order, bool is_as_announced);
  // Reserves the staging slots in which the previous daemon had blocks. Called on a new pipeline.
  void KeepStaged(const KeptUpdate& update);
  // Continues the update of a daemon that was killed, once the pipeline has recovered.
  void Resume(const KeptUpdate& update);

  // Allows early updates with the scalars that were announced for the step that is being gathered. `order.params` is ignored.
  // Does nothing if the optimizer needs norms first. Not called while a step is applied.
  void BeginEarly(StepOrder order);
  bool is_early() const { return is_early_; }
  // Starts the early reads and early updates that can start.
  void PumpEarly();
  // Drops the early updates of this step for `reason`, and stops beginning them.
  void DropEarly(Transition reason);
  // Drops the early update of one block, which is going to move. No task of that update runs.
  void DropEarlyUpdateOf(uint32_t block);
  // True while a task of an early update runs, even if that update was dropped.
  bool has_early_tasks() const;
  bool ReadsSums(uint32_t partition, uint64_t begin, uint64_t end) const {
    return gathered_.ReadsSums(partition, begin, end);
  }
  // Records that the gradient sum of a range is final for the step that is being gathered (`is_last`), or that it no longer is.
  void CountSums(uint32_t partition, uint64_t begin, uint64_t end, bool is_last);
  // Forgets the gathered gradients, and drops the early updates unless a step is applied.
  void ForgetSums();
  SumPages& sums() { return sums_; }
  const SumPages& sums() const { return sums_; }
  // Moves pages of sums to and from swap. If `norm_waits`, a norm waits for sums, and gradients do not wait for early updates
  // to free frames.
  void PumpSums(bool norm_waits);
  // Begins to set masters from the weights, as step 0. False if blocks have no plane of masters.
  bool BeginMasters();
  void Pump();  // starts the tasks that can start
  bool running() const { return running_; }
  bool done() const {
    return running_ && blocks_left_ == 0 && !has_early_tasks() && pass_ != UpdatePass::kNorms;
  }
  bool sets_masters() const { return running_ && pass_ == UpdatePass::kMasters; }
  // Ends a step that is done(). Returns the number of masters that overflowed.
  uint64_t Finish();
  // Call the function of the same name in BlockLedger, and emit a RecordBlock.
  void PublishBlock(uint32_t block);
  void SetResident(uint32_t block);
  // True if the running step updates the partition.
  bool Updates(uint32_t partition) const { return running_ && partition_has_gradient_[partition]; }
  // True if the newest step updates the partition or has updated it.
  bool HasUpdated(uint32_t partition) const { return partition_has_gradient_[partition]; }
  // True if the running step has updated all blocks of the partition, and has written those with weights. True if no step runs.
  bool IsPartitionDone(uint32_t partition) const {
    return !running_ || partition_blocks_left_[partition] == 0;
  }

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

  // Used by reads of states and by moves of blocks, while no step runs.
  const BlockMap& map() const { return map_; }
  Blocks& blocks() { return blocks_; }
  const Blocks& blocks() const { return blocks_; }
  BlockLedger& ledger() { return ledger_; }
  const BlockLedger& ledger() const { return ledger_; }
  Placement& placement() { return placement_; }
  const Placement& placement() const { return placement_; }
  // Allows a block that is on swap now, or that stays on swap, to be read ahead.
  void OnSwapped(uint32_t block) { prefetch_next_ = std::min(prefetch_next_, position_[block]); }
  // Takes one slot from the node, on a path that works, if no free slot of the job is on such a path.
  void AddSpareSlot();
  // Provides a swap slot for a new version of the block between steps, in addition to slots that durable steps name. Takes one
  // slot from the node if the job has too few slots for that version and the next step. False if the node has no free slot.
  enum class NodeSlot : uint8_t { kAny, kOnWorkingPath };
  bool AddSlotForVersion(uint32_t block, NodeSlot which = NodeSlot::kAny);
  // Like AddSlotForVersion(), for a slot on a path that works.
  bool AddSlotForMove(uint32_t block);
  bool AddNodeSlot(NodeSlot which = NodeSlot::kAny);
  // Allocates the slot for the block's next version.
  BlockLedger::Target AllocateTarget(uint32_t block);
  // Allocates the slot for a copy of an entry of the ledger that is in DRAM.
  BlockLedger::Target AllocateSave(uint32_t entry);
  PathTable& path_table() { return path_table_; }
  const PathTable& path_table() const { return path_table_; }
  // Records that a state of these elements was set, so that their bytes in DRAM differ from the saved copy.
  enum class StateSet : uint8_t { kMasters, kMoment };
  void OnStateSet(const ElementRun& elems, StateSet state);
  // Sets a new pipeline to the job's durable step, and then to the state of retained memory. Without retained memory, blocks in
  // DRAM are read from swap later.
  void Recover(const DurableJob& job);
  const std::vector<uint64_t>& updates() const { return param_updates_; }  // by parameter
  // True while a block changes its place between steps (Residency or Relocation).
  bool is_moving() const { return blocks_.count(Purpose::kMove) > 0; }
  // Adds a read that has ended to the path table.
  void CountRead(uint32_t path, uint64_t bytes, const TaskDone& done);
  // Returns slots that the placement does not need to the node, while no step runs. Does nothing with durable steps, for which
  // FinishDurable() returns slots.
  void ReturnSurplusSlots();
  // Records that the ledger with the step of BlockLedger::BeginDurable() is durable.
  void FinishDurable(BlockLedger::Last last);
  // Returns the action that writes a staged block to a free slot.
  WriteBlock BeginWrite(uint32_t block, const BlockIdentity& identity, uint64_t checksum);
  // Returns the error with the block, and the first parameter that has elements in the block, added to its text.
  absl::Status DescribeBlock(const absl::Status& status, uint32_t block) const;
  // True if the job can continue as soon as a staging slot is free.
  bool waits_for_slot() const { return blocks_.waits_for_slot(); }
  void clear_waits_for_slot() { blocks_.SetWaits(Blocks::Waits::kNo); }
  uint32_t staged_count() const { return static_cast<uint32_t>(blocks_.staged().size()); }
  bool is_resident(uint32_t block) const {
    return placement_.WhereBlock(block).tier == Tier::kDram;
  }
  BlockPlace PlaceOf(uint32_t block) const;
  // Returns the place of a partition's weights from `partition_elem` on: in the weights arena, or in the partition's blocks.
  WeightsPlace PlaceOfWeights(uint32_t partition, uint64_t partition_elem) const;
  BlockIdentity IdentityOf(uint32_t block) const;
  uint64_t checksum(uint32_t block) const { return ledger_.newest(block).checksum; }
  // Returns the number of updates that a parameter has had. SetUpdates() sets this number, between steps.
  uint64_t updates_of(uint32_t param) const { return param_updates_[param]; }
  void SetUpdates(uint32_t param, uint64_t updates);
  // Begins to read a block into a staging slot, by the transition `why`.
  void StartRead(uint32_t block, uint32_t slot, Transition why);

  const PipelineCounters& counters() const { return counters_; }
  const PipelineCounters& last_step() const { return last_step_; }
  // Returns the bytes that the newest step read and wrote between its decision and its publication.
  uint64_t last_update_bytes() const { return last_update_bytes_; }
  // OK, or the error of a write that is being repeated and that the running step or the next step's gradients wait for.
  const absl::Status& swap_wait() const {
    return swap_wait_.ok() ? sums_.swap().write_error() : swap_wait_;
  }
  // OK, or the error of a failed read ahead for the step that is about to be decided.
  const absl::Status& prefetch_error() const { return prefetch_error_; }
  // Clears failed reads ahead, so that their blocks may be read ahead again.
  void ForgetPrefetchErrors();
  void CheckInvariants(uint64_t committed_step) const;

 private:
  // A task of a block. The block's phase says which task.
  struct Running {
    uint32_t block = 0;
    uint32_t path = 0;        // reads and writes: swap path
    bool from_disk = false;   // reads: false for zeros that were never written
    bool reads_sums = false;  // updates
    uint64_t checksum = 0;    // writes
    WeightsDigests weights_digests = {};
  };

  Running FinishTask(TaskId task);
  void Prepare(StepOrder order, UpdatePass pass);
  void Start();
  BlockLedger::Target AllocateSlot(
      std::optional<BlockLedger::Target> (BlockLedger::*begin)(uint32_t), uint32_t entry);
  void ExchangeSlots();
  void ExchangeSlot(uint32_t path);
  void BeginPass(UpdatePass pass);
  void EndNormsPass();
  void BeginUpdate(uint32_t block);
  void CountUpdate(uint32_t block);
  void StartUpdate(uint32_t block);
  void StartWrite(uint32_t block, uint64_t checksum, WeightsDigests weights_digests);
  absl::Status OnUpdateFailed(uint32_t block, const absl::Status& status);
  absl::Status OnWriteFailed(const Running& write, const absl::Status& status);
  void EndDroppedWrite(uint32_t block, const absl::Status& status);
  void FinishPartitionsOf(uint32_t block);
  void FollowDecision(uint32_t block, bool is_updated);
  void AdoptEarly(bool is_as_announced);
  void AdoptKept(const KeptUpdate& update);
  void AcceptEarly(uint32_t block);
  void EndAccepted(uint32_t block);
  void EndAcceptedUpdate(uint32_t block);
  void Drop(uint32_t block, Transition reason, EarlyUpdatesDropped& dropped);
  void DropEarly(std::span<const uint32_t> blocks, Transition reason);
  void StartInstall(uint32_t block);
  uint64_t NewWeightsOffset(uint32_t slot, uint64_t block_elem) const;
  void StartEarlyUpdates();
  void StartEarlyReads();
  void PrefetchEarly();
  bool HasEarlyWork() const;
  bool MayReadAhead(uint32_t block) const;
  bool MayReadEarly(uint32_t block) const;
  std::optional<uint32_t> AllocateForReadAhead();
  bool ReadAhead(uint32_t block);
  bool is_rewriting() const;
  void FailPrefetch(uint32_t block, const absl::Status& status);
  // True if enough reads of the path are running to keep the path busy.
  bool IsPathBusy(uint32_t path) const {
    return reads_[path] >= path_table_.reads_at_once(path, map_.full_block_bytes());
  }
  bool AreAllPathsBusy() const;
  void Sort();
  void SetWeightsChanged();
  RecordBlock RecordOf(uint32_t block, const BlockLedger::Version& version) const;
  void RecordWritten(uint32_t block);
  void SetWeightsChanged(uint32_t partition, uint64_t partition_elem, uint64_t elems);
  void ReturnFreeSlots();
  uint32_t slots_wanted(uint32_t block) const;
  uint64_t slots_wanted() const;
  uint32_t PathOf(uint32_t block) const;  // swap path from which the block is read
  void PrepareStaged();
  void StartReads();
  std::optional<uint32_t> FirstReady() const;  // first ready swapped block to update
  bool UpdatesHaveOtherWork() const;
  bool ReadsSums() const { return pass_ != UpdatePass::kMasters; }
  bool MayUpdateInPlace(uint32_t block);
  // True if the update of the block waits for a lease on its weights. No new lease on these weights is granted before the
  // update.
  bool IsLeased(uint32_t block) const;
  uint32_t UpdatesMax() const;
  bool IsNeeded(uint32_t block) const;  // true if a parameter in the block has a gradient
  std::pmr::vector<UpdateSegment> Segments(uint32_t block);
  const cpu_adam::StepScalars& ScalarsOf(uint32_t param_group, uint64_t t);
  bool needs_norms() const { return protocol::Info(layout_->spec().optimizer).passes == 2; }

  JobTasks& io_;
  std::shared_ptr<const protocol::Layout> layout_;
  BlockMap map_;
  const MemoryPlan& plan_;
  const LeaseTable& leases_;
  uint32_t workers_;
  bool keeps_jobs_;
  Blocks blocks_;
  BlockLedger ledger_;
  Placement placement_;
  // Free slots of the node. A write takes one if the job has no free slot on the write's path.
  nvme::SlotMap& swap_;
  PathTable& path_table_;
  std::vector<std::vector<uint32_t>> block_partitions_;  // partitions, by block
  std::vector<uint32_t> trace_;                          // fetches that in_order_ follows
  std::vector<uint32_t> in_order_;                       // blocks in the order of their updates
  std::vector<uint32_t> position_;                       // index into in_order_, by block
  std::vector<bool> partition_has_gradient_;             // for the running step, by partition
  std::vector<uint64_t> param_updates_;                  // number of updates, by parameter
  std::pmr::map<TaskId, Running> tasks_;
  std::vector<uint32_t> reads_;  // running reads, by path
  // Positions of blocks whose early updates are part of the step, and whose new weights in the step arena wait for a worker.
  std::pmr::set<uint32_t> to_install_;
  GatheredBlocks gathered_;
  SumPages sums_;
  bool is_early_ = false;
  bool early_failed_ = false;     // an early write failed: stop early work until the decision
  uint32_t early_prefetch_left_;  // positions from it on are read ahead or need no read
  uint32_t prefetch_next_;        // position: earlier swapped blocks are staged or have failed
  // Blocks whose read ahead failed. They are not read ahead again before the decision.
  std::set<uint32_t> prefetch_failed_;
  absl::Status prefetch_error_;
  absl::Status swap_wait_;  // newest error of a write that is being repeated

  bool running_ = false;
  bool abandoned_ = false;
  bool is_recorded_ = false;  // another daemon can continue the running update
  StepOrder order_;
  // Scalars of the running step, by parameter group and t.
  std::pmr::map<std::pair<uint32_t, uint64_t>, cpu_adam::StepScalars> scalars_;
  UpdatePass pass_ = UpdatePass::kWhole;
  // Norms from UpdatePass::kNorms, by block.
  std::pmr::map<uint32_t, std::pmr::vector<SegmentNorms>> norms_;
  std::vector<float> trust_;            // trust ratios by parameter, once the norms are known
  std::pmr::deque<uint32_t> resident_;  // resident blocks whose update has not begun, in order
  std::pmr::set<uint32_t> swapped_;     // positions of swapped blocks whose update has not begun
  uint32_t updating_ = 0;
  uint64_t blocks_left_ = 0;                     // blocks not updated and written yet
  std::vector<uint32_t> partition_blocks_left_;  // blocks not updated yet, by partition
  uint64_t overflowed_masters_ = 0;
  PipelineCounters counters_;
  PipelineCounters at_begin_;  // value at the publication of the step before
  PipelineCounters last_step_;
  uint64_t bytes_at_decision_ = 0;
  uint64_t last_update_bytes_ = 0;
};

}  // namespace forebay::daemon
