// Placement of memory on one NUMA node.
#pragma once

#include <cstddef>
#include <span>

#include "absl/status/status.h"

namespace forebay::pinned_mem::internal {

// Makes the pages of `span`, not yet touched, come from node `numa_node` (hwloc logical index).
// With one node there is nothing to choose and no system call.
//
// Errors  E_RANGE     no such node; names how many there are.
//         E_INTERNAL  hwloc or mbind(2) failed.
absl::Status BindToNode(std::span<std::byte> span, int numa_node);

}  // namespace forebay::pinned_mem::internal
