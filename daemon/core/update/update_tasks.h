// SPDX-License-Identifier: Apache-2.0
// Starts and ends the tasks that read, update and write blocks.
#pragma once

#include <cstdint>
#include <map>
#include <memory_resource>
#include <vector>

#include "daemon/core/base/events.h"
#include "daemon/core/base/job_tasks.h"
#include "daemon/core/blocks/block.h"
#include "daemon/core/plan/memory_plan.h"
#include "daemon/core/update/block_store.h"
#include "daemon/core/update/step_terms.h"
#include "daemon/core/update/sum_pages.h"

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

// A block has at most one of these tasks. Its phase says which. The caller makes the transition of the block that ends a task.
//
// Ownership  The arguments of the constructor outlive this object.
class UpdateTasks {
 public:
  UpdateTasks(JobTasks& io, const protocol::Layout& layout, const MemoryPlan& plan,
              BlockStore& store, StepTerms& terms, SumPages& sums);

  // Begins to read a block into a staging slot, by the transition `why`.
  void StartRead(uint32_t block, uint32_t staging_slot, Transition why);
  // Counts the read of a staged block that is about to be updated.
  void CountUpdate(uint32_t block);
  // StartUpdate() starts the update of a block in kUpdating, StartWrite() the write of a block in kWriting or kRewriting.
  // Recorded::kYes: the next daemon can continue the update.
  enum class Recorded : uint8_t { kNo, kYes };
  void StartUpdate(uint32_t block, Recorded recorded);
  void StartWrite(uint32_t block, uint64_t checksum, WeightsDigests weights_digests);
  // Starts the copy of the new weights of a block in kInstalling.
  void StartInstall(uint32_t block);

  // End a task. Return the block of the task, and the values of a write.
  uint32_t EndRead(const TaskDone& done);
  uint32_t EndUpdate(const TaskDone& done);
  uint32_t EndInstall(const TaskDone& done);
  struct Written {
    uint32_t block = 0;
    uint64_t checksum = 0;
    WeightsDigests weights_digests = {};
  };
  Written EndWrite(const TaskDone& done);

  // Number of updates and copies of weights that run or wait for a worker.
  uint32_t updating() const { return updating_; }
  // True if updates read gradient sums.
  bool reads_sums() const { return !terms_.sets_masters(); }
  // True if enough reads of the path from which the block is read, or of all paths, run to keep them busy.
  bool IsPathBusy(uint32_t block) const { return IsBusy(PathOf(block)); }
  bool AreAllPathsBusy() const;
  // Adds a read that has ended to the path table.
  void CountRead(uint32_t path, uint64_t bytes, const TaskDone& done);
  PipelineCounters& counters() { return counters_; }
  const PipelineCounters& counters() const { return counters_; }

 private:
  struct Running {
    uint32_t block = 0;
    uint32_t path = 0;        // swap path of a read or a write
    bool from_disk = false;   // false if a read block was never written, and has zeros
    bool reads_sums = false;  // an update reads gradient sums
    uint64_t checksum = 0;    // checksum of a written block
    WeightsDigests weights_digests = {};
  };

  Running End(TaskId task);
  uint32_t PathOf(uint32_t block) const;
  bool IsBusy(uint32_t path) const;

  JobTasks& io_;
  const protocol::Layout& layout_;
  const MemoryPlan& plan_;
  BlockStore& store_;
  StepTerms& terms_;
  SumPages& sums_;
  std::pmr::map<TaskId, Running> tasks_;
  std::vector<uint32_t> reads_;  // running reads, by path
  uint32_t updating_ = 0;
  PipelineCounters counters_;
};

}  // namespace forebay::daemon
