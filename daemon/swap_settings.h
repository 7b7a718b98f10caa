// SPDX-License-Identifier: Apache-2.0
// What the configuration says of swap, and of jobs that outlive the daemon there.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/config.h"
#include "daemon/exec/arena_policy.h"
#include "daemon/exec/swap_space.h"
#include "nvme/swap_files.h"

namespace forebay::daemon {

std::vector<nvme::PathOptions> SwapPathsOf(const Config& config);

// Of a configuration that CheckConfig() accepts and that has swap paths; without rates.
//
// Errors  E_CONFIG  swap.staging holds fewer blocks than a step needs.
absl::StatusOr<SwapSpaceOptions> SwapOptions(const Config& config, const ArenaPolicy& arenas,
                                             uint32_t workers);

// Why no job can be durable.
//
// Errors  E_UNSUPPORTED  there is no swap, its files are unlinked, or a path is in memory.
absl::Status WhyNotDurable(const Config& config);

}  // namespace forebay::daemon
