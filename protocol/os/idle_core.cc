// SPDX-License-Identifier: Apache-2.0
#include "protocol/os/idle_core.h"

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <array>
#include <cstdio>

namespace forebay::protocol {

IdleCore::IdleCore() : loadavg_(::open("/proc/loadavg", O_RDONLY | O_CLOEXEC)) {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof(set), &set) == 0) cpus_ = CPU_COUNT(&set);
}

bool IdleCore::Any() {
  const auto now = std::chrono::steady_clock::now();
  if (now < next_look_) return any_;
  next_look_ = now + std::chrono::milliseconds(10);
  std::array<char, 128> line{};
  const ssize_t got = ::pread(loadavg_.get(), line.data(), line.size() - 1, 0);
  const int runnable = got > 0 ? RunnableThreads(line.data()) : -1;
  any_ = runnable >= 0 && runnable < cpus_;
  return any_;
}

int RunnableThreads(const char* loadavg) {
  int runnable = -1;
  return std::sscanf(loadavg, "%*f %*f %*f %d/", &runnable) == 1 ? runnable : -1;
}

}  // namespace forebay::protocol
