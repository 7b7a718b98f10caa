// How much memory this process could still touch.
#pragma once

#include <cstdint>

namespace forebay::pinned_mem::internal {

// MemAvailable of the machine, or what the process's control group leaves where that is less (v2;
// page cache of the group counts as free). The kernel may still find less: it is an estimate.
uint64_t AvailableBytes();

}  // namespace forebay::pinned_mem::internal
