// SPDX-License-Identifier: Apache-2.0
// The measured rates of swap paths, kept beside their data.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "daemon/exec/swap_space.h"
#include "nvme/io/engine_factory.h"
#include "nvme/path_probe.h"

namespace forebay::daemon {

// What is kept of the path: a directory's in its forebay.rates.toml, a block device's in `state_folder`. Nothing where
// there is none, of another device, or unreadable (logged).
std::optional<nvme::PathRates> LoadRates(const std::string& path,
                                         const std::string& state_folder = {});

// Of each path: what it keeps; else what a probe of all paths finds now within `probe_limit` (0: no probe),
// which is kept. Without a state folder nothing is kept of a block device: it is measured at each start. A probe that
// fails is logged. Paths that may have durable jobs, which `options.mode` is to bring back, are not measured.
// Blocks.
std::vector<std::optional<nvme::PathRates>> RatesOf(const SwapSpaceOptions& options,
                                                    const nvme::EngineOptions& engine,
                                                    std::chrono::nanoseconds probe_limit);

}  // namespace forebay::daemon
