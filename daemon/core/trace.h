// The order in which a step fetches groups, recorded while the job runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace forebay::daemon {

class Trace {
 public:
  explicit Trace(size_t groups) {
    current_.seen.assign(groups, false);
    next_ = current_;
  }

  // The first fetch of a group counts. `applying`: the running step is decided, so that the fetch
  // belongs to the next one.
  void Record(uint32_t group, bool applying) {
    Order& order = applying ? next_ : current_;
    if (order.seen[group]) return;
    order.seen[group] = true;
    order.groups.push_back(group);
  }

  void OnCommitted() {
    if (!current_.groups.empty()) committed_ = current_.groups;
    current_ = next_;
    Clear(next_);
  }
  void OnDropped() { Clear(current_); }  // the step that was being gathered
  void OnRefused() { Clear(next_); }     // the step that was being decided

  const std::vector<uint32_t>& committed() const { return committed_; }

 private:
  struct Order {
    std::vector<uint32_t> groups;
    std::vector<bool> seen;  // by group
  };

  static void Clear(Order& order) {
    for (const uint32_t group : order.groups) order.seen[group] = false;
    order.groups.clear();
  }

  std::vector<uint32_t> committed_;
  Order current_;
  Order next_;
};

}  // namespace forebay::daemon
