// How much a counter has grown within a day.
#pragma once

#include <cstdint>
#include <deque>

namespace forebay::daemon {

// Keeps the counter's value of each hour of the last 24. Times are MonotonicNs.
class DayCounter {
 public:
  static constexpr uint64_t kHourNs = 3'600'000'000'000;
  static constexpr uint32_t kHours = 24;

  explicit DayCounter(uint64_t start_ns) : next_ns_(start_ns + kHourNs) {}

  // When Advance has something to do.
  uint64_t next_ns() const { return next_ns_; }
  void Advance(uint64_t now_ns, uint64_t value) {
    for (; next_ns_ <= now_ns; next_ns_ += kHourNs) {
      hours_.push_back(value);
      if (hours_.size() > kHours) hours_.pop_front();
    }
  }

  // From 23 to 24 hours ago until now; since the start while that is shorter.
  uint64_t InLastDay(uint64_t value) const {
    return hours_.size() < kHours ? value : value - hours_.front();
  }

 private:
  uint64_t next_ns_;
  std::deque<uint64_t> hours_;
};

}  // namespace forebay::daemon
