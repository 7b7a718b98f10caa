// SPDX-License-Identifier: Apache-2.0
// Clocks for timelines, uptime and statistics alone: the state machine knows no time.
#pragma once

#include <cstdint>
#include <ctime>

namespace forebay::daemon {

inline uint64_t MonotonicNs() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000U + static_cast<uint64_t>(now.tv_nsec);
}

// Returns the CPU time that the calling thread has used since it began, including time in the kernel.
inline double OwnCpuSeconds() {
  timespec used{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
  return static_cast<double>(used.tv_sec) + static_cast<double>(used.tv_nsec) * 1e-9;
}

}  // namespace forebay::daemon
