// SPDX-License-Identifier: Apache-2.0
// Operators new and delete that count allocations, for tests that a step allocates no memory. They replace the operators of the
// whole program: compile counted_heap.cc into the test, not into a library.
#pragma once

#include <barrier>
#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace forebay::testing {

// Threads  Any.
class CountedHeap {
 public:
  // Starts to count calls of operator new. A call counts if `is_counted`, called on the allocating thread, returns true.
  static void Start(bool (*is_counted)());
  static void Stop();
  static uint64_t allocations();
};

inline constexpr uint64_t kStepsAlike = 20;
inline constexpr uint64_t kStepsMax = 1000;

// Trains one rank: calls `step(t)` for t = 1, 2, ... until kStepsAlike consecutive steps allocated no memory, at most kStepsMax
// steps. Returns how many consecutive steps at the end allocated none. All ranks read the same count: a barrier holds the next
// step until every rank has read it.
absl::StatusOr<uint64_t> TrainUntilSteady(std::barrier<>& ranks,
                                          const std::function<absl::Status(uint64_t t)>& step);

}  // namespace forebay::testing
