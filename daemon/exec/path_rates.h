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

// A directory keeps the rates of its path in this file. It holds for the device that it was measured on; to
// have it measured again, delete it.
inline constexpr const char* kRatesFile = "forebay.rates.toml";

// What is kept of the path, a block device's in `state_folder`; nothing where there is none, of another device, or
// unreadable (logged).
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
