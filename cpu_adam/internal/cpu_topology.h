// SPDX-License-Identifier: Apache-2.0
// Finds the CPUs that the threads of a pool may use, by NUMA node, and counts their cores.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace forebay::cpu_adam::internal {

struct CpuSet {
  // The operating system's indices, ascending; at least one.
  std::vector<int> cpus;
  // Physical cores they belong to.
  int cores = 1;
};

// Returns the CPUs of a NUMA node (-1: of the machine), or exactly `wanted` if not empty, reduced to the CPUs on which this
// process may run. One set for each NUMA node with such CPUs, in the order of nodes.
// `synthetic` is for tests: a machine that hwloc makes from a text.
//
// Errors  E_OPTION    no such node or CPU, or none for this process; names what there is.
//         E_INTERNAL  hwloc cannot read the machine.
absl::StatusOr<std::vector<CpuSet>> FindCpus(int numa_node, const std::vector<int>& wanted,
                                             const std::string& synthetic = {});

// Threads of each set: `threads` in all (0: one per core; never more than cores), in proportion to
// the cores, at least one each. Empty: fewer threads than sets.
std::vector<int> ShareThreads(int threads, const std::vector<CpuSet>& sets);

}  // namespace forebay::cpu_adam::internal
