// SPDX-License-Identifier: Apache-2.0
// Whether a core is idle, so that spinning slows no other thread down.
#pragma once

#include <chrono>

#include "protocol/os/unique_fd.h"

namespace forebay::protocol {

// Compares the kernel's count of runnable threads with the CPUs this process may use.
//
// Limits   Reads /proc/loadavg at most every 10 ms; false where it cannot be read.
// Threads  One at a time.
class IdleCore {
 public:
  IdleCore();

  bool Any();

 private:
  UniqueFd loadavg_;
  int cpus_ = 1;
  bool any_ = false;
  std::chrono::steady_clock::time_point next_look_{};
};

// Runnable threads in a line of /proc/loadavg ("0.20 0.18 0.12 1/80 11206"), or -1.
int RunnableThreads(const char* loadavg);

}  // namespace forebay::protocol
