// SPDX-License-Identifier: Apache-2.0
// What swap paths hold, before anything on them is locked, reserved or written.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "nvme/io/io_engine.h"
#include "nvme/swap_files.h"
#include "nvme/volume.h"

namespace forebay::nvme {

// A volume that has a durable ledger, as it was made.
struct FoundVolume {
  uint64_t ledger_bytes_max = 0;  // VolumeOptions
  uint64_t slots = 0;             // that its newest whole record names
};

// Looks for a durable ledger: OpenMode::kReclaim loses it, kRecover brings it back. Nothing: no file, or one in
// which nothing was ever committed, or that is not of ours. What cannot be opened for reading is not looked at:
// Volume::Open says why. Blocks; reads a few pages of each path.
//
// Errors  E_SWAP_PATH  these paths are not the whole volume that has the ledger, in its order and with its sizes:
//                      names the path and what differs; or a newer format.
//         E_CORRUPT    a volume of which it cannot be known any more whether it had one.
//         E_SWAP_IO    a path cannot be read.
absl::StatusOr<std::optional<FoundVolume>> FindVolume(std::span<const PathOptions> paths);

// Opens the volume on these paths with OpenMode::kInspect; null: FindVolume finds none. `engine` outlives it.
//
// Errors  of FindVolume and Volume::Open.
absl::StatusOr<std::unique_ptr<Volume>> InspectVolume(const std::vector<PathOptions>& paths,
                                                      IoEngine& engine);

// The paths with the sizes that the volume on them was made with, from a label of each; where there is none, with
// the size that is given. Blocks; changes nothing.
//
// Errors  E_SWAP_PATH  missing, or not readable; without a whole label, and no size is given; a newer format.
//         E_SWAP_IO    a path cannot be read.
absl::StatusOr<std::vector<PathOptions>> WithSizes(std::span<const PathOptions> paths);

}  // namespace forebay::nvme
