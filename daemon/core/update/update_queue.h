// SPDX-License-Identifier: Apache-2.0
// The blocks that a decided step updates, and what is left of the update.
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

// A block of the step waits here until its update begins: in DRAM, or on swap. The update of a block on swap that was begun
// early may wait a second time, until its new weights are installed. A partition is done once all its blocks are updated, and
// those with weights are written.
//
// Ownership  The arguments of the constructor outlive this object.
class UpdateQueue {
 public:
  UpdateQueue(const protocol::Layout& layout, const UpdateOrder& order,
              std::pmr::memory_resource* memory);

  // Opens the queue for a step that updates these parameters, closes it when the step is published.
  void Open(const std::pmr::vector<bool>& params);
  void Close();
  bool is_open() const { return is_open_; }
  // Removes all blocks. The step's next pass begins.
  void Clear();

  // Adds a block of the step. AddInPlace() and AddStaged() let its update wait, in DRAM and on swap.
  void Add(uint32_t block);
  void AddInPlace(uint32_t block) { in_place_.push_back(block); }
  void AddStaged(uint32_t block) { staged_.insert(order_.position(block)); }
  // Lets the new weights of a block wait to be installed.
  void AddInstall(uint32_t block) { to_install_.insert(order_.position(block)); }
  // Blocks in DRAM, in order; positions of blocks on swap; positions of blocks with new weights.
  std::pmr::deque<uint32_t>& in_place() { return in_place_; }
  const std::pmr::set<uint32_t>& staged() const { return staged_; }
  const std::pmr::set<uint32_t>& to_install() const { return to_install_; }
  bool has_in_place() const { return !in_place_.empty(); }
  bool has_staged(uint32_t block) const { return staged_.contains(order_.position(block)); }
  void RemoveStaged(uint32_t block) { staged_.erase(order_.position(block)); }
  void RemoveInstall(uint32_t block) { to_install_.erase(order_.position(block)); }

  // Record that the partitions of a block need it no longer, and that the update of a block has ended.
  void EndPartitionsOf(uint32_t block);
  void EndBlock() { --blocks_left_; }
  bool is_empty() const { return blocks_left_ == 0; }

  // True if the running step updates the partition. HasUpdated(): or if the newest step has updated it.
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
  std::vector<bool> has_gradient_;  // in the running step, by partition
  std::pmr::deque<uint32_t> in_place_;
  std::pmr::set<uint32_t> staged_;
  std::pmr::set<uint32_t> to_install_;
  uint64_t blocks_left_ = 0;                     // blocks not updated and written yet
  std::vector<uint32_t> partition_blocks_left_;  // blocks not updated yet, by partition
};

}  // namespace forebay::daemon
