// SPDX-License-Identifier: Apache-2.0
// Updates blocks between the announcement of a step and its decision, and drops what the decision cannot accept.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>

#include "absl/status/status.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/job_tasks.h"
#include "daemon/core/update/block_store.h"
#include "daemon/core/update/gathered_blocks.h"
#include "daemon/core/update/read_ahead.h"
#include "daemon/core/update/step_terms.h"
#include "daemon/core/update/sum_pages.h"
#include "daemon/core/update/update_order.h"
#include "daemon/core/update/update_tasks.h"
#include "protocol/layout.h"

namespace forebay::daemon {

// Between Begin() and the decision, blocks on swap that have all their gradients are updated with the announced scalars. Among
// these blocks, the block that the next forward needs first is updated first.
//
// An early update retains the old states of its block in their slot, and the old weights in the arena. It writes the new states
// to another slot, and the new weights behind these states or to a slot of the step arena. So the decision can accept or drop
// the update, with the same bits either way. The reason for which an update is dropped is a Transition.
//
// Ownership  The arguments of the constructor outlive this object.
class EarlyUpdater {
 public:
  struct Parts {
    const UpdateOrder& order;
    BlockStore& store;
    StepTerms& terms;
    UpdateTasks& tasks;
    ReadAhead& read_ahead;
    SumPages& sums;
  };
  EarlyUpdater(JobTasks& io, const protocol::Layout& layout, Parts parts, uint32_t workers);

  // Allows early updates with the scalars that were announced for the step that is being gathered. `order.params` is ignored.
  // Does nothing if the optimizer needs norms first. Not called while a step is applied.
  void Begin(StepOrder order);
  bool is_on() const { return is_on_; }
  // Starts the early reads and early updates that can start.
  void Pump();
  // Reads blocks ahead whose gradients backward is going to deliver.
  void Prefetch();
  // True while early updates are allowed and the job has tasks. Gradients may wait for early updates then.
  bool has_work() const { return is_on_ && !has_failed_ && !io_.idle(); }
  // True while a task of an early update runs, even if that update was dropped.
  bool has_tasks() const;
  // True if a worker reads gradient sums of the range for an early update.
  bool ReadsSums(uint32_t partition, uint64_t begin, uint64_t end) const {
    return gathered_.ReadsSums(partition, begin, end);
  }

  // Records that the gradient sum of a range is final for the step that is being gathered (`is_last`), or that it no longer is.
  void CountSums(uint32_t partition, uint64_t begin, uint64_t end, bool is_last);
  // Forgets the gathered gradients, and drops the early updates of a step that is not decided.
  void ForgetSums();
  // Follows a new order of update.
  void Sort() { gathered_.Sort(); }

  // Drops the early updates of this step for `reason`, and stops beginning them.
  void Drop(Transition reason);
  // Drops the early update of one block, which is going to move. No task of that update runs.
  void DropFor(uint32_t block);
  // Ends the early updates of a step that is decided. Drops the updates that the step cannot accept:
  // - all updates, if the decision has other scalars (`is_as_announced` is false);
  // - updates of blocks with a parameter that has no gradient in the step;
  // - updates of blocks whose weights a reader has leased.
  void End(bool is_as_announced, const std::function<bool(uint32_t block)>& is_leased);
  // Reports that the worker of an update no longer reads gradient sums, and that an accepted update has ended.
  void OnUpdated(uint32_t block) { gathered_.OnUpdated(block); }
  void OnEnded(uint32_t block) { gathered_.OnEnded(block); }
  // Handle an update, or a write, that has failed before the decision, or that has ended after the job failed.
  void OnUpdateFailed(uint32_t block, const absl::Status& status);
  void DropFailed(uint32_t block, const absl::Status& status);
  // Handles the end of a write of a dropped update.
  void EndDroppedWrite(uint32_t block, const absl::Status& status);
  // Stops starting tasks, because the job failed.
  void Abandon() { is_abandoned_ = true; }

 private:
  void Drop(std::span<const uint32_t> blocks, Transition reason);
  void Drop(uint32_t block, Transition reason, EarlyUpdatesDropped& dropped);
  bool MayRead(uint32_t block) const;
  bool Waits(uint32_t block) const;
  void StartReads();
  void StartUpdates();

  JobTasks& io_;
  const protocol::Layout& layout_;
  Parts parts_;
  uint32_t workers_;
  GatheredBlocks gathered_;
  bool is_on_ = false;
  bool has_failed_ = false;  // an early write failed: stop early work until the decision
  bool is_abandoned_ = false;
};

}  // namespace forebay::daemon
