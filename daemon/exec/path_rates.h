// SPDX-License-Identifier: Apache-2.0
// Measured rates of swap paths, recorded next to the paths' data.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "daemon/exec/swap_space.h"
#include "nvme/io/engine_factory.h"
#include "nvme/path_probe.h"

namespace forebay::daemon {

// Returns the recorded rates of the path. The record of a directory is its file forebay.rates.toml. The record of a block
// device is in `state_folder`. Returns nothing if no record exists, if the record is of another version or device, or if it is
// unreadable (logged).
std::optional<nvme::PathRates> LoadRates(const std::string& path,
                                         const std::string& state_folder = {});

// Returns the rates of each path. If every path has a record, these are the recorded rates. Otherwise a probe measures all
// paths within `probe_limit` (0: no probe), and its rates are recorded. The rates of a block device cannot be recorded without
// a state folder: the device is measured at each start. A probe that fails is logged. Paths that may have durable jobs, which
// `options.mode` would recover, are not measured. Blocks.
std::vector<std::optional<nvme::PathRates>> RatesOf(const SwapSpaceOptions& options,
                                                    const nvme::EngineOptions& engine,
                                                    std::chrono::nanoseconds probe_limit);

}  // namespace forebay::daemon
