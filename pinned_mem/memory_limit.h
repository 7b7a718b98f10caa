// SPDX-License-Identifier: Apache-2.0
// How much memory this process may use: of the machine, and of its control group.
#pragma once

#include <cstdint>
#include <string>

namespace forebay::pinned_mem {

// Where the kernel says which control groups this process is in; a test names files of its own.
struct CgroupFiles {
  std::string membership = "/proc/self/cgroup";
  std::string mounts = "/proc/self/mountinfo";
};

struct CgroupMemory {
  // The lowest limit of the group and of all groups above it; kNoLimit: there is none.
  uint64_t limit_bytes = 0;
  // The file that sets it; empty: none does.
  std::string limit_file;
  // What these groups leave: limit less usage, at the group where that is least. Page cache that the
  // kernel would drop (inactive_file) counts as free.
  uint64_t available_bytes = 0;
};

inline constexpr uint64_t kNoLimit = ~uint64_t{0};

// Of the memory controller of version 1 or 2, whichever is mounted. What cannot be read sets no
// limit.
//
// Source  Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst, Linux; proc(5),
//         /proc/PID/mountinfo.
CgroupMemory ReadCgroupMemory(const CgroupFiles& files = {});

// MemTotal of the machine.
uint64_t MachineBytes();

// What can still be allocated: MemAvailable of the machine, or what the control group leaves if that
// is less. An estimate: the kernel may find less.
uint64_t AvailableBytes();

// Whether RLIMIT_MEMLOCK and the capabilities of this process let it lock so much at once. Takes no memory.
//
// Source  mlock2(2), MLOCK_ONFAULT.
bool MayLock(uint64_t bytes);

}  // namespace forebay::pinned_mem
