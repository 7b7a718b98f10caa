// SPDX-License-Identifier: Apache-2.0
// Measures the duration of calls.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace forebay::client::internal {

// Adds the time from construction to destruction.
class Stopwatch {
 public:
  explicit Stopwatch(std::atomic<uint64_t>& total_ns) : total_ns_(total_ns) {}
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  ~Stopwatch() {
    const auto spent = std::chrono::steady_clock::now() - begin_;
    total_ns_ += static_cast<uint64_t>(std::chrono::nanoseconds(spent).count());
  }

 private:
  std::atomic<uint64_t>& total_ns_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace forebay::client::internal
