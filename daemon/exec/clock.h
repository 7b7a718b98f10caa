// CLOCK_MONOTONIC, for timelines and uptime alone: the state machine knows no time.
#pragma once

#include <cstdint>
#include <ctime>

namespace forebay::daemon {

inline uint64_t MonotonicNs() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000U + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace forebay::daemon
