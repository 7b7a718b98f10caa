// SPDX-License-Identifier: Apache-2.0
// Events that are recorded again once nobody holds them.
#pragma once

#include <memory>
#include <utility>
#include <vector>

namespace forebay::gpu::internal {

// An event may be recorded again while work waits for its earlier record: that work still waits for the earlier record.
//
// Threads  One at a time; whoever holds an event, any.
template <typename Event>
class FreeEvents {
 public:
  // The oldest that nobody holds; null: there is none.
  std::shared_ptr<Event> Find() {
    for (size_t looked = 0; looked < events_.size(); ++looked) {
      next_ = (next_ + 1) % events_.size();
      if (events_[next_].use_count() == 1) return events_[next_];
    }
    return nullptr;
  }
  void Add(std::shared_ptr<Event> event) { events_.push_back(std::move(event)); }

 private:
  std::vector<std::shared_ptr<Event>> events_;
  size_t next_ = 0;
};

}  // namespace forebay::gpu::internal
