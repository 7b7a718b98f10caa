// SPDX-License-Identifier: Apache-2.0
// Settings of swap, and of jobs that outlive the daemon there.
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

// Returns the reason why no job can be durable, or OK.
//
// Errors  E_UNSUPPORTED  there is no swap, its files are unlinked, or a path is in memory.
absl::Status WhyNotDurable(const Config& config);

}  // namespace forebay::daemon
