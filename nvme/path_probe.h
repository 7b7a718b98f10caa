// What a swap path gives, measured through a volume as the daemon uses it.
#pragma once

#include <chrono>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nvme/io/engine_factory.h"
#include "nvme/path_rates.h"
#include "nvme/volume.h"

namespace forebay::nvme {

// Reads and writes free space of each path, 256 to 512 MiB, one path after the other; `limit` is for all of
// them together. Nothing that was on them is kept (OpenMode::kReclaim). Blocks.
//
// Returns  nothing for a path with less space.
// Errors   of CreateIoEngine and Volume::Open; E_SWAP_IO.
absl::StatusOr<std::vector<std::optional<PathRates>>> ProbePaths(const VolumeOptions& options,
                                                                 const EngineOptions& engine,
                                                                 std::chrono::nanoseconds limit);

}  // namespace forebay::nvme
