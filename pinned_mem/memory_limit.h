// SPDX-License-Identifier: Apache-2.0
// The memory that this process may use: limits of the machine and of its control group.
#pragma once

#include <cstdint>
#include <string>

namespace forebay::pinned_mem {

// Files in which the kernel names the control groups of this process. Tests pass their own files.
struct CgroupFiles {
  std::string membership = "/proc/self/cgroup";
  std::string mounts = "/proc/self/mountinfo";
};

struct CgroupMemory {
  // Lowest limit of the group and of all groups above it; kNoLimit if no group has a limit.
  uint64_t limit_bytes = 0;
  // File that sets the limit; empty if no file does.
  std::string limit_file;
  // Smallest difference of limit and usage among these groups. Page cache that the kernel would drop (inactive_file) counts as
  // free.
  uint64_t available_bytes = 0;
};

inline constexpr uint64_t kNoLimit = ~uint64_t{0};

// Reads limit and usage from the memory controller of version 1 or 2, whichever is mounted. A file that cannot be read sets no
// limit.
//
// Source  Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst, Linux; proc(5),
//         /proc/PID/mountinfo.
CgroupMemory ReadCgroupMemory(const CgroupFiles& files = {});

// Returns MemTotal of the machine.
uint64_t MachineBytes();

// Returns an estimate of the bytes that can still be allocated: the machine's MemAvailable, or the control group's available
// bytes if these are fewer. The kernel may find fewer.
uint64_t AvailableBytes();

// Returns true if RLIMIT_MEMLOCK and the capabilities of this process allow it to lock `bytes` bytes at once. Allocates no
// memory.
//
// Source  mlock2(2), MLOCK_ONFAULT.
bool MayLock(uint64_t bytes);

}  // namespace forebay::pinned_mem
