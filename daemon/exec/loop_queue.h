// SPDX-License-Identifier: Apache-2.0
// A bounded queue into the loop thread, with the eventfd that wakes it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "protocol/doorbell.h"
#include "protocol/os/mutex.h"
#include "protocol/os/status_macros.h"
#include "protocol/os/unique_fd.h"

namespace forebay::daemon {

// Threads  Push() from any thread, DrainAll() on the loop thread, not from within itself.
// Limits   Nothing blocks. The queue holds `capacity` items. A refused item still belongs to the caller.
template <typename Item>
class LoopQueue {
 public:
  static absl::StatusOr<std::unique_ptr<LoopQueue>> Create(size_t capacity) {
    ASSIGN_OR_RETURN(protocol::UniqueFd fd, protocol::MakeDoorbell());
    return std::unique_ptr<LoopQueue>(new LoopQueue(capacity, std::move(fd)));
  }

  [[nodiscard]] bool Push(Item&& item) { return PushBelow(capacity_, std::move(item)); }

  // Pushes the item. Returns false if `limit` or more items wait. The rest of the capacity is for items that must not be
  // refused.
  [[nodiscard]] bool PushBelow(size_t limit, Item&& item) {
    {
      protocol::MutexLock lock(mutex_);
      if (items_.size() >= std::min(limit, capacity_)) return false;
      items_.push_back(std::move(item));
    }
    protocol::RingDoorbell(fd_.get());
    return true;
  }

  // Calls take(item) for each item that waits, in the order of arrival. Items that are pushed meanwhile wait for the next call.
  template <typename Take>
  void DrainAll(Take take) {
    {
      protocol::MutexLock lock(mutex_);
      drained_.swap(items_);
    }
    for (Item& item : drained_) take(item);
    drained_.clear();
  }

  // Eventfd, readable after a Push(); its reader must drain it.
  int fd() const { return fd_.get(); }

 private:
  LoopQueue(size_t capacity, protocol::UniqueFd fd) : capacity_(capacity), fd_(std::move(fd)) {}

  const size_t capacity_;
  const protocol::UniqueFd fd_;
  protocol::Mutex mutex_;
  std::vector<Item> items_ ABSL_GUARDED_BY(mutex_);
  std::vector<Item> drained_;  // used by the loop thread; retains its capacity
};

}  // namespace forebay::daemon
