// SPDX-License-Identifier: Apache-2.0
// The clock of every time that two processes compare, and when a wait gives up.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace forebay::protocol {

inline uint64_t Nanoseconds(std::chrono::steady_clock::time_point time) {  // CLOCK_MONOTONIC
  return static_cast<uint64_t>(std::chrono::nanoseconds(time.time_since_epoch()).count());
}
inline uint64_t MonotonicNs() { return Nanoseconds(std::chrono::steady_clock::now()); }

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  // A timeout below zero is zero; one beyond a year counts as a year.
  static Deadline After(std::chrono::milliseconds timeout) {
    constexpr std::chrono::milliseconds kLongest = std::chrono::hours(24 * 365);
    const auto bounded = std::clamp(timeout, std::chrono::milliseconds(0), kLongest);
    return Deadline(Clock::now() + bounded);
  }

  bool Expired() const { return Clock::now() >= at_; }

  // Rounded up, so that who sleeps this long finds the deadline expired.
  std::chrono::milliseconds Remaining() const {
    const auto left = at_ - Clock::now();
    return std::max(std::chrono::milliseconds(0),
                    std::chrono::ceil<std::chrono::milliseconds>(left));
  }

 private:
  explicit Deadline(Clock::time_point at) : at_(at) {}

  Clock::time_point at_;
};

}  // namespace forebay::protocol
