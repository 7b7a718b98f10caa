// SPDX-License-Identifier: Apache-2.0
// Events that are recorded again once they have no other owner.
#pragma once

#include <memory>
#include <utility>
#include <vector>

namespace forebay::gpu::internal {

// A set of events for reuse. An event may be recorded again while work waits for its earlier record: that work still waits for
// the earlier record.
//
// Threads  One at a time; owners of an event, any.
template <typename Event>
class FreeEvents {
 public:
  // Returns the oldest event without another owner, or null if every event has one.
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
