// SPDX-License-Identifier: Apache-2.0
// Live heap of a process that has loaded live_heap (LD_PRELOAD). The counters are in the file that FOREBAY_TEST_HEAP
// names.
#pragma once

#include <atomic>
#include <cstdint>

namespace forebay::testing {

// Shared memory: the file is as long as this, and zero at first.
struct LiveHeap {
  std::atomic<int64_t> pieces;
  std::atomic<int64_t> bytes;
};
static_assert(std::atomic<int64_t>::is_always_lock_free);

}  // namespace forebay::testing
