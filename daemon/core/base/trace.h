// SPDX-License-Identifier: Apache-2.0
// The order in which a step fetches partitions, recorded while the job runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace forebay::daemon {

class Trace {
 public:
  // `committed`: the order of the committed step, for a job that a daemon has recovered.
  explicit Trace(size_t partitions, std::vector<uint32_t> committed = {})
      : committed_(std::move(committed)) {
    current_.seen.assign(partitions, false);
    next_ = current_;
  }

  // Records a fetch of a partition. Later fetches of the partition in the same step are ignored. True `deciding` means that all
  // ranks have called the step: the fetch then counts for the next step.
  void Record(uint32_t partition, bool deciding) {
    Order& order = deciding ? next_ : current_;
    if (order.seen[partition]) return;
    order.seen[partition] = true;
    order.partitions.push_back(partition);
  }

  void OnCommitted() {
    if (!current_.partitions.empty()) committed_ = current_.partitions;
    current_ = next_;
    Clear(next_);
  }
  void OnDropped() { Clear(current_); }  // deletes the order of the step that is being gathered
  void OnRefused() { Clear(next_); }     // deletes fetches recorded with `deciding`

  const std::vector<uint32_t>& committed() const { return committed_; }

 private:
  struct Order {
    std::vector<uint32_t> partitions;
    std::vector<bool> seen;  // by partition
  };

  static void Clear(Order& order) {
    for (const uint32_t partition : order.partitions) order.seen[partition] = false;
    order.partitions.clear();
  }

  std::vector<uint32_t> committed_;
  Order current_;
  Order next_;
};

}  // namespace forebay::daemon
