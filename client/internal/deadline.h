// When a call gives up, on the monotonic clock.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>

namespace forebay::client::internal {

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

// How long a call waits, and who may stop it.
struct WaitLimits {
  Deadline deadline;
  const std::function<bool()>* interrupt_check = nullptr;  // may be null or empty

  bool Interrupted() const {
    return interrupt_check != nullptr && *interrupt_check && (*interrupt_check)();
  }
};

// Between two looks at the interrupt check.
inline constexpr std::chrono::milliseconds kInterruptPeriod{100};

}  // namespace forebay::client::internal
