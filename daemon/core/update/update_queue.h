// SPDX-License-Identifier: Apache-2.0
// The blocks that a decided step updates, and the progress of the update.
#pragma once

#include <cstdint>
#include <deque>
#include <memory_resource>
#include <set>
#include <vector>

#include "daemon/core/base/events.h"
#include "daemon/core/update/update_order.h"
#include "protocol/layout.h"

namespace forebay::daemon {

// Each block of the step waits in the queue until its update begins. If a block on swap was updated early, its new weights may
// wait in the queue until they are installed. A partition is done once all its blocks are updated, and its blocks with weights
// are written.
//
// Ownership  The arguments of the constructor outlive this object.
class UpdateQueue {
 public:
  UpdateQueue(const protocol::Layout& layout, const UpdateOrder& order,
              std::pmr::memory_resource* memory);

  // Open() opens the queue for a step that updates these parameters. Close() closes the queue when the step is published.
  void Open(const std::pmr::vector<bool>& params);
  void Close();
  bool is_open() const { return is_open_; }
  // Removes all blocks. The step's next pass begins.
  void Clear();

  // Add() counts a block of the step. AddInPlace() lets the update of a block in DRAM wait, AddStaged() of a block on swap.
  void Add(uint32_t block);
  void AddInPlace(uint32_t block) { in_place_.push_back(block); }
  void AddStaged(uint32_t block) { staged_.insert(order_.position(block)); }
  // Lets the new weights of a block wait to be installed.
  void AddInstall(uint32_t block) { to_install_.insert(order_.position(block)); }
  // in_place() has the blocks in DRAM, in order. staged() has the positions of blocks on swap, to_install() those of blocks with
  // new weights to install.
  std::pmr::deque<uint32_t>& in_place() { return in_place_; }
  const std::pmr::set<uint32_t>& staged() const { return staged_; }
  const std::pmr::set<uint32_t>& to_install() const { return to_install_; }
  bool has_in_place() const { return !in_place_.empty(); }
  bool has_staged(uint32_t block) const { return staged_.contains(order_.position(block)); }
  void RemoveStaged(uint32_t block) { staged_.erase(order_.position(block)); }
  void RemoveInstall(uint32_t block) { to_install_.erase(order_.position(block)); }

  // EndPartitionsOf() records that no partition waits for the block any more. EndBlock() records that the update of a block has
  // ended.
  void EndPartitionsOf(uint32_t block);
  void EndBlock() { --blocks_left_; }
  bool is_empty() const { return blocks_left_ == 0; }

  // Updates() is true if the running step updates the partition. HasUpdated() is also true if no step runs, and the newest step
  // has updated the partition.
  bool Updates(uint32_t partition) const { return is_open_ && has_gradient_[partition]; }
  bool HasUpdated(uint32_t partition) const { return has_gradient_[partition]; }
  // True if the partition is done, or if no step runs.
  bool IsPartitionDone(uint32_t partition) const {
    return !is_open_ || partition_blocks_left_[partition] == 0;
  }

 private:
  const protocol::Layout& layout_;
  const UpdateOrder& order_;
  bool is_open_ = false;
  std::vector<bool> has_gradient_;  // by partition, in the newest step
  std::pmr::deque<uint32_t> in_place_;
  std::pmr::set<uint32_t> staged_;
  std::pmr::set<uint32_t> to_install_;
  uint64_t blocks_left_ = 0;                     // blocks that are not updated and written yet
  std::vector<uint32_t> partition_blocks_left_;  // blocks that each partition still waits for
};

}  // namespace forebay::daemon
