// Which CPUs a pool of threads may use, and how many cores they are.
#pragma once

#include <vector>

#include "absl/status/statusor.h"

namespace forebay::cpu_adam::internal {

struct CpuSet {
  std::vector<int> cpus;  // operating-system indices, ascending; at least one
  int cores = 1;          // physical cores they belong to
};

// The CPUs of a NUMA node (-1: of the machine), or exactly `wanted` where it is not empty; in
// either case only those this process may run on.
//
// Errors  E_OPTION    no such node or processor, or none for this process; names what there is.
//         E_INTERNAL  hwloc cannot read the machine.
absl::StatusOr<CpuSet> FindCpus(int numa_node, const std::vector<int>& wanted);

}  // namespace forebay::cpu_adam::internal
