// SPDX-License-Identifier: Apache-2.0
// Applying a step, or setting masters before the first one: every block that is concerned is updated
// once; swapped ones stream through staging slots.
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
#include "daemon/core/blocks/block_ledger.h"
#include "daemon/core/blocks/block_map.h"
#include "daemon/core/blocks/path_table.h"
#include "daemon/core/blocks/placement.h"
#include "daemon/core/blocks/staging.h"
#include "daemon/core/plan/memory_plan.h"
#include "daemon/core/sessions/lease_table.h"
#include "daemon/core/update/early_updates.h"
#include "daemon/core/update/sum_pages.h"
#include "protocol/layout.h"
#include "protocol/wire.h"

namespace forebay::daemon {

// Of steps: zeros that the first one begins with count as read, the masters before it do not.
struct PipelineCounters {
  uint64_t update_reads = 0;             // swapped blocks updated
  uint64_t update_reads_prefetched = 0;  // of these, read before an update waited for them
  uint64_t read_bytes = 0;               // for updates
  uint64_t written_bytes = 0;
  uint64_t early_updates = 0;    // blocks that were updated before the decision, and taken by it
  uint64_t dropped_updates = 0;  // and not taken

  uint64_t bytes() const { return read_bytes + written_bytes; }
};

// Blocks are updated in the order in which the step before fetched their partitions, so that the next
// forward, which may begin before the end, waits least. Before the decision, they are read ahead in that
// order, into free staging slots only. After it, a worker updates the first swapped block that is ready,
// else the next resident one. A staged block is read, updated and written, then its slot is free again. The
// job never updates blocks while it reads states (StateAccess) or moves a block (Residency).
//
// One event publishes a step when all its blocks are written (BlockLedger). A write that fails is
// repeated in another slot; while no slot takes it, the step waits and its blocks keep their staging
// slots. A step is never undone, because weights and blocks in DRAM are updated in place.
//
// From the decision on a block whose weights are leased waits for the release; other blocks go before
// it. It is not read before that, and where it has been read already, another block, of any job, may
// take its slot: then it is read again.
//
// Between BeginEarly() and the decision, swapped blocks that have all their gradients are updated early
// (EarlyUpdates), with the scalars that were announced; of those that have them, the last in the order of
// arrival first. Begin() takes what was made with the scalars of the decision; the rest is updated anew.
//
// LAMB goes over all blocks twice: first for the norms of parameters, which changes nothing; their sums, added in the
// order of blocks, are the ratios with which the second pass updates.
class StepPipeline {
 public:
  StepPipeline(JobTasks& io, std::shared_ptr<const protocol::Layout> layout, const MemoryPlan& plan,
               const std::vector<nvme::Slot>& swap_slots, const std::vector<nvme::Slot>& sum_slots,
               nvme::SlotMap& swap, PathTable& path_table, StagingPool& pool,
               const LeaseTable& leases, uint32_t workers, bool keeps_jobs);

  // Reads ahead while no step is applied.
  void Prefetch();

  // The order of update from now on: by the first of a block's partitions in `trace`; those that are not
  // in it come last. Not while a step is applied.
  void FollowTrace(const std::vector<uint32_t>& trace);
  // `is_as_announced`: the scalars are those that BeginEarly() was called with.
  // Nothing is started before Pump().
  void Begin(StepOrder order, bool is_as_announced);
  // Of a new pipeline: what the daemon before has left in staging slots is not given to others.
  void KeepStaged(const KeptUpdate& update);
  // And when it has recovered: goes on with the update of a daemon that was killed.
  void Resume(const KeptUpdate& update);

  // The step that is being gathered will have these scalars, so it is said: `order.params` counts for nothing.
  // Nothing happens where the optimizer needs norms first. Not while a step is applied.
  void BeginEarly(StepOrder order);
  bool is_early() const { return is_early_; }
  // Updates what can be.
  void PumpEarly();
  // Early updates of this step are of no use, and no more begin.
  void DropEarly();
  // The same of one block, which is going to be written or moved: no task of it runs.
  void DropEarlyUpdateOf(uint32_t block);
  // A worker or the disk has a block of an early update, one that was dropped maybe.
  bool has_early_tasks() const { return early_tasks_ > 0; }
  bool ReadsSums(uint32_t partition, uint64_t begin, uint64_t end) const {
    return early_.ReadsSums(partition, begin, end);
  }
  // The sum of a range is the last one of the step that is being gathered, or is not after all.
  void CountSums(uint32_t partition, uint64_t begin, uint64_t end, bool is_last);
  // The gradients that were gathered are dropped.
  void ForgetSums();
  SumPages& sums() { return sums_; }
  const SumPages& sums() const { return sums_; }
  // Brings and takes away pages of sums. `norm_waits`, for sums: no gradient waits for early updates then.
  void PumpSums(bool norm_waits);
  // Sets the masters that are a plane of their own from the weights, as step 0; false where there
  // are none.
  bool BeginMasters();
  void Pump();  // starts what can be started
  bool running() const { return running_; }
  bool done() const {
    return running_ && blocks_left_ == 0 && early_tasks_ == 0 && pass_ != UpdatePass::kNorms;
  }
  bool sets_masters() const { return running_ && pass_ == UpdatePass::kMasters; }
  // Ends a step that is done(); returns how many masters overflowed.
  uint64_t Finish();
  // BlockLedger::PublishBlock and SetResident, with its RecordBlock.
  void PublishBlock(uint32_t block);
  void SetResident(uint32_t block);
  // Whether the running step updates the partition.
  bool Updates(uint32_t partition) const { return running_ && partition_has_gradient_[partition]; }
  // The newest step.
  bool HasUpdated(uint32_t partition) const { return partition_has_gradient_[partition]; }
  // No update of the running step touches the partition any more; of one on swap, it is written.
  bool IsPartitionDone(uint32_t partition) const {
    return !running_ || partition_blocks_left_[partition] == 0;
  }

  // The job failed: nothing is started any more, slots come back as their tasks end.
  void Abandon();

  // Outcomes. An error leaves the job's state unusable, and is what the job failed of.
  struct ReadOutcome {
    uint32_t block = 0;
    absl::Status status;  // of the read
    bool fatal = false;   // a step needs the block
  };
  ReadOutcome OnRead(const TaskDone& done);
  absl::Status OnUpdated(const TaskDone& done);
  void OnInstalled(const TaskDone& done);
  absl::Status OnWritten(const TaskDone& done);

  // For reads of states and for moves of blocks, while no step runs.
  const BlockMap& map() const { return map_; }
  StagedBlocks& staged() { return staged_; }
  const StagedBlocks& staged() const { return staged_; }
  BlockLedger& ledger() { return ledger_; }
  const BlockLedger& ledger() const { return ledger_; }
  Placement& placement() { return placement_; }
  const Placement& placement() const { return placement_; }
  // The block is on swap now, or is to stay there: it may be read ahead.
  void OnSwapped(uint32_t block) { prefetch_next_ = std::min(prefetch_next_, position_[block]); }
  // Where no path of the job's free slots works: one slot more, on another path.
  void AddSpareSlot();
  // Between steps the block is going to have another version, beside those that durable steps name: one slot more of the
  // node, where its own are not enough for that and the next step. False: there is none.
  enum class NodeSlot : uint8_t { kAny, kOnWorkingPath };
  bool AddSlotForVersion(uint32_t block, NodeSlot which = NodeSlot::kAny);
  // The same, on a path that works.
  bool AddSlotForMove(uint32_t block);
  bool AddNodeSlot(NodeSlot which = NodeSlot::kAny);
  // Where the block's next version is written.
  BlockLedger::Target AllocateTarget(uint32_t block);
  // The same of a copy of what is in DRAM of an entry of the ledger.
  BlockLedger::Target AllocateSave(uint32_t entry);
  PathTable& path_table() { return path_table_; }
  const PathTable& path_table() const { return path_table_; }
  // A state of these elements was set: what is in DRAM of them is not what was saved.
  enum class StateSet : uint8_t { kMasters, kMoment };
  void OnStateSet(const ElementRun& elems, StateSet state);
  // Of a new pipeline: all is as in the job's durable step. Blocks in DRAM are going to be read back.
  void Recover(const DurableJob& job);
  const std::vector<uint64_t>& updates() const { return param_updates_; }  // by parameter
  // Between steps, a block changes its place: Residency, or Relocation.
  bool is_moving() const { return placement_.moving().has_value() || is_relocating_; }
  void set_relocating(bool is_relocating) { is_relocating_ = is_relocating; }
  // A read has ended.
  void CountRead(uint32_t path, uint64_t bytes, const TaskDone& done);
  // Back to the node, while no step runs: slots beyond those of the placement. With durable steps FinishDurable() does it.
  void ReturnSurplusSlots();
  // The ledger with the step of BlockLedger::BeginDurable() is durable.
  void FinishDurable(BlockLedger::Last last);
  // The write of a staged block's next bytes to a free slot.
  WriteBlock BeginWrite(uint32_t block, const BlockIdentity& identity, uint64_t checksum);
  // An error with the block and the first parameter that has elements in it.
  absl::Status DescribeBlock(const absl::Status& status, uint32_t block) const;
  // Whether the job can go on as soon as a staging slot is free.
  bool waits_for_slot() const { return staged_.waits_for_slot(); }
  void clear_waits_for_slot() { staged_.clear_waits_for_slot(); }
  uint32_t staged_count() const { return static_cast<uint32_t>(staged_.all().size()); }
  bool is_resident(uint32_t block) const {
    return placement_.WhereBlock(block).tier == Tier::kDram;
  }
  BlockPlace PlaceOf(uint32_t block) const;
  // Of an element of a partition, where states are updated or read.
  WeightsPlace PlaceOfWeights(uint32_t partition, uint64_t partition_elem) const;
  BlockIdentity IdentityOf(uint32_t block) const;
  uint64_t checksum(uint32_t block) const { return ledger_.newest(block).checksum; }
  // Updates that a parameter has had.
  uint64_t updates_of(uint32_t param) const { return param_updates_[param]; }
  // Between steps.
  void SetUpdates(uint32_t param, uint64_t updates);
  void StartRead(uint32_t block, uint32_t slot, bool for_update);

  const PipelineCounters& counters() const { return counters_; }
  const PipelineCounters& last_step() const { return last_step_; }
  // Of the newest step: read and written from its decision to its publication.
  uint64_t last_update_bytes() const { return last_update_bytes_; }
  // OK, or the error of a write that the running step, or the gradients of the next one, wait for.
  const absl::Status& swap_wait() const {
    return swap_wait_.ok() ? sums_.write_error() : swap_wait_;
  }
  // OK, or the error of a read ahead for the step that is about to be decided.
  const absl::Status& prefetch_error() const { return prefetch_error_; }
  // They are tried again.
  void ForgetPrefetchErrors();
  void CheckInvariants(uint64_t committed_step) const;

 private:
  struct Running {
    uint32_t block = 0;
    bool for_update = false;  // of reads
    uint32_t path = 0;        // of reads and writes
    bool from_disk = false;   // of reads, else zeros that were never written
    // Of writes.
    uint64_t checksum = 0;
    WeightsDigests weights_digests = {};
    uint64_t overflows = 0;
    bool early = false;  // begun before the decision
    bool reads_sums = false;
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
  void StartUpdate(uint32_t block);
  void StartWrite(uint32_t block, uint64_t checksum, uint64_t overflows,
                  WeightsDigests weights_digests);
  void FinishPartitionsOf(uint32_t block);
  void AdoptEarly(bool is_as_announced);
  void AdoptKept(const KeptUpdate& update);
  void AcceptEarly(uint32_t block);
  void DropEarly(std::span<const uint32_t> blocks);
  void EndDropped(uint32_t block);
  void StartInstall(uint32_t block);
  void AddInstall(uint32_t block);
  void StartEarlyUpdates();
  void StartEarlyReads();
  void PrefetchEarly();
  bool HasEarlyWork() const;
  bool MayReadAhead(uint32_t block) const;
  bool MayReadEarly(uint32_t block) const;
  std::optional<uint32_t> AllocateForReadAhead();
  bool ReadAhead(uint32_t block);
  void FailPrefetch(uint32_t block, const absl::Status& status);
  // As many are read from it as keep it busy.
  bool IsPathBusy(uint32_t path) const {
    return reads_[path] >= path_table_.reads_at_once(path, map_.full_block_bytes());
  }
  bool AreAllPathsBusy() const;
  void Sort();
  void SetWeightsChanged();
  RecordBlock RecordOf(uint32_t block, const BlockLedger::Version& version) const;
  void RecordWritten(uint32_t block, uint64_t overflows, std::optional<uint32_t> weights_slot);
  void SetWeightsChanged(uint32_t partition, uint64_t partition_elem, uint64_t elems);
  void ReturnFreeSlots();
  uint32_t slots_wanted(uint32_t block) const;
  uint64_t slots_wanted() const;
  uint32_t PathOf(uint32_t block) const;  // that it is read from
  void PrepareStaged();
  void StartReads();
  std::optional<uint32_t> FirstReady() const;  // swapped block, in the order of update
  bool UpdatesHaveOtherWork() const;
  bool ReadsSums() const { return pass_ != UpdatePass::kMasters; }
  bool MayUpdateInPlace(uint32_t block);
  // The update of the block waits for a lease, and no lease is given on its weights before the update.
  bool IsLeased(uint32_t block) const;
  uint32_t UpdatesMax() const;
  bool IsNeeded(uint32_t block) const;  // a parameter in it has a gradient
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
  StagedBlocks staged_;
  BlockLedger ledger_;
  Placement placement_;
  // Of the node: where a write goes whose path has no free slot of the job.
  nvme::SlotMap& swap_;
  PathTable& path_table_;
  std::vector<std::vector<uint32_t>> block_partitions_;  // by block
  std::vector<uint32_t> trace_;                          // that the order follows
  std::vector<uint32_t> in_order_;                       // blocks, as they are updated
  std::vector<uint32_t> position_;                       // in that order, by block
  std::vector<bool> partition_has_gradient_;             // of the running step
  std::vector<uint64_t> param_updates_;                  // by parameter: optimizer steps it has had
  std::pmr::map<TaskId, Running> tasks_;
  std::vector<uint32_t> reads_;  // by path, those that run
  // Whose updates are part of the step: new weights in the step arena, that wait for a worker. Positions.
  std::pmr::set<uint32_t> to_install_;
  EarlyUpdates early_;
  SumPages sums_;
  bool is_early_ = false;
  bool early_failed_ = false;  // a write of this step's: the disk is left alone until the decision
  uint32_t early_tasks_ = 0;   // updates and writes
  uint32_t early_prefetch_left_;  // positions from it on were read ahead, or need not be
  uint32_t prefetch_next_;        // a position: swapped blocks before it are staged, or have failed
  // Not tried again before the decision.
  std::set<uint32_t> prefetch_failed_;
  absl::Status prefetch_error_;
  // Blocks whose last write failed, and the newest error.
  std::set<uint32_t> unwritten_;
  absl::Status swap_wait_;

  bool running_ = false;
  bool is_relocating_ = false;
  bool abandoned_ = false;
  bool is_recorded_ = false;  // another daemon can go on with the running update
  StepOrder order_;
  // Of the running step: by parameter group and t.
  std::pmr::map<std::pair<uint32_t, uint64_t>, cpu_adam::StepScalars> scalars_;
  UpdatePass pass_ = UpdatePass::kWhole;
  // By block, of UpdatePass::kNorms.
  std::pmr::map<uint32_t, std::pmr::vector<SegmentNorms>> norms_;
  std::vector<float> trust_;            // by parameter, once the norms are known
  std::pmr::deque<uint32_t> resident_;  // whose update has not begun, in order
  std::pmr::set<uint32_t> swapped_;     // the same, positions; some are staged
  uint32_t updating_ = 0;
  uint64_t blocks_left_ = 0;                     // not updated and written yet
  std::vector<uint32_t> partition_blocks_left_;  // not updated yet
  uint64_t overflowed_masters_ = 0;
  PipelineCounters counters_;
  PipelineCounters at_begin_;  // of the step that is gathered: the publication of the one before
  PipelineCounters last_step_;
  uint64_t bytes_at_decision_ = 0;
  uint64_t last_update_bytes_ = 0;
};

}  // namespace forebay::daemon
