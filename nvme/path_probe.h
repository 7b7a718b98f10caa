// SPDX-License-Identifier: Apache-2.0
// Measures the rates of swap paths, through a volume as the daemon uses it.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nvme/io/engine_factory.h"
#include "nvme/io/io_engine.h"
#include "nvme/path_rates.h"
#include "nvme/volume.h"

namespace forebay::nvme {

using ProbeClock = std::function<std::chrono::steady_clock::time_point()>;

// Reads and writes free space of each path, up to 512 MiB, one path after the other. The time to open the volume counts too.
// Ends within `limit`: on a slow path it writes less and tries smaller requests. One request can take longer: the first of a
// path, of 256 KiB, or one that takes much longer than those before it. The paths' contents are lost (OpenMode::kReclaim).
// Blocks.
//
// Returns  nothing for a path with less than 256 MiB, or too slow for the smallest requests.
// Errors   of CreateIoEngine and Volume::Open; E_SWAP_IO.
absl::StatusOr<std::vector<std::optional<PathRates>>> ProbePaths(const VolumeOptions& options,
                                                                 const EngineOptions& engine,
                                                                 std::chrono::nanoseconds limit);

// Measures the paths of a volume that holds nothing, on its engine, until `end` by the clock `now`.
absl::StatusOr<std::vector<std::optional<PathRates>>> ProbeVolume(
    Volume& volume, IoEngine& engine, std::chrono::steady_clock::time_point end,
    const ProbeClock& now);

}  // namespace forebay::nvme
