// SPDX-License-Identifier: Apache-2.0
// Settings of swap, and of durable jobs, which outlive the daemon on swap.
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

// Returns the options of the swap space without rates. `config` must pass CheckConfig() and have swap paths.
//
// Errors  E_CONFIG  swap.staging holds fewer blocks than a step needs.
absl::StatusOr<SwapSpaceOptions> SwapOptions(const Config& config, const ArenaPolicy& arenas,
                                             uint32_t workers);

// Returns OK if jobs can be durable, otherwise the reason why none can be.
//
// Errors  E_UNSUPPORTED  the daemon has no swap, its files are unlinked, or a path is in memory.
absl::Status WhyNotDurable(const Config& config);

}  // namespace forebay::daemon
