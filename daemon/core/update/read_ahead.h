// SPDX-License-Identifier: Apache-2.0
// Reads blocks into free staging slots before an update waits for them.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <set>

#include "absl/status/status.h"
#include "daemon/core/plan/memory_plan.h"
#include "daemon/core/update/block_store.h"
#include "daemon/core/update/update_order.h"
#include "daemon/core/update/update_tasks.h"

namespace forebay::daemon {

// Blocks are read in the order of update. While blocks may be updated early, they are read from the last to the first, because
// backward delivers the gradients of the last block first.
//
// Ownership  The arguments of the constructor outlive this object.
class ReadAhead {
 public:
  ReadAhead(const MemoryPlan& plan, const UpdateOrder& order, BlockStore& store, UpdateTasks& tasks)
      : plan_(plan), order_(order), store_(store), tasks_(tasks) {}

  void Pump();
  // BeginBackward() lets PumpBackward() read from the last block on. PumpBackward() reads blocks for which `may_read` is true.
  void BeginBackward() { backward_left_ = store_.map().blocks(); }
  void PumpBackward(const std::function<bool(uint32_t block)>& may_read);
  // True if the block may be read ahead as soon as a staging slot is free.
  bool MayRead(uint32_t block) const;
  // Allocates a free slot for a read ahead.
  std::optional<uint32_t> AllocateSlot();

  // Allows a block that is on swap now, or that stays on swap, to be read ahead.
  void OnSwapped(uint32_t block);
  // Begins with the first block again, because the order has changed.
  void Restart() { next_ = 0; }
  // Records that the read of a block, or its early update, has failed. The block is not read ahead again before ForgetErrors().
  void Fail(uint32_t block, const absl::Status& status);
  void ForgetErrors();
  // OK, or the error of a failed read ahead for the step that is about to be decided.
  const absl::Status& error() const { return error_; }

 private:
  bool Read(uint32_t block);

  const MemoryPlan& plan_;
  const UpdateOrder& order_;
  BlockStore& store_;
  UpdateTasks& tasks_;
  uint32_t next_ = 0;           // position: blocks on swap before it are staged or have failed
  uint32_t backward_left_ = 0;  // blocks from this position on are read ahead or need no read
  std::set<uint32_t> failed_;
  absl::Status error_;
};

}  // namespace forebay::daemon
