// SPDX-License-Identifier: Apache-2.0
// A first-in first-out queue of fixed capacity; its memory is taken once.
#pragma once

#include <cstddef>
#include <vector>

namespace forebay::nvme::internal {

// Limits  Push() on a full queue and Pop() on an empty one are bugs of the caller.
template <typename T>
class BoundedQueue {
 public:
  explicit BoundedQueue(size_t capacity) : items_(capacity) {}

  bool empty() const { return size_ == 0; }
  size_t size() const { return size_; }

  void Push(const T& item) {
    items_[(first_ + size_) % items_.size()] = item;
    ++size_;
  }

  T Pop() {
    const T item = items_[first_];
    first_ = (first_ + 1) % items_.size();
    --size_;
    return item;
  }

 private:
  std::vector<T> items_;
  size_t first_ = 0;
  size_t size_ = 0;
};

}  // namespace forebay::nvme::internal
