// SPDX-License-Identifier: Apache-2.0
// Operators new and delete of a program, which count; for tests that a step takes no memory. Has its program's operators:
// it is a source of the test, not of a library.
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
  // Until Stop() calls of operator new are counted of which `is_counted` says so, on their thread.
  static void Start(bool (*is_counted)());
  static void Stop();
  static uint64_t allocations();
};

inline constexpr uint64_t kStepsAlike = 20;
inline constexpr uint64_t kStepsMax = 1000;

// A rank's training: `step(t)` with t from 1 on, until kStepsAlike steps in a row took no memory, or kStepsMax; returns how
// many in a row did. All ranks see the same count, because nobody begins a step before everybody has read it.
absl::StatusOr<uint64_t> TrainUntilSteady(std::barrier<>& ranks,
                                          const std::function<absl::Status(uint64_t t)>& step);

}  // namespace forebay::testing
