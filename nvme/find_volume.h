// SPDX-License-Identifier: Apache-2.0
// Inspects swap paths before anything on them is locked, reserved or written.
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

// A volume that has a durable ledger, with the sizes that it was created with.
struct FoundVolume {
  uint64_t ledger_bytes_max = 0;  // VolumeOptions
  uint64_t slots = 0;             // slots that the newest intact record names
};

// Looks for a durable ledger, which OpenMode::kReclaim would lose and kRecover would read. Returns nothing if the file does not
// exist, if nothing was ever committed in it, or if the file is not Forebay's. Skips a path that cannot be opened for reading:
// Volume::Open reports the reason. Blocks; reads a few pages of each path.
//
// Errors  E_SWAP_PATH  these paths are not the whole volume that has the ledger, in its order and with its sizes:
//                      names the path and what differs; or a newer format.
//         E_CORRUPT    the volume is too damaged to tell whether it had a ledger.
//         E_SWAP_IO    a path cannot be read.
absl::StatusOr<std::optional<FoundVolume>> FindVolume(std::span<const PathOptions> paths);

// Opens the volume on these paths with OpenMode::kInspect. Returns null if FindVolume() finds no ledger. `engine` outlives the
// volume.
//
// Errors  of FindVolume and Volume::Open.
absl::StatusOr<std::unique_ptr<Volume>> InspectVolume(const std::vector<PathOptions>& paths,
                                                      IoEngine& engine);

// Returns the paths with the sizes with which their volume was created. Sizes come from a label of each path. A path without a
// label retains the given size. Blocks; changes nothing.
//
// Errors  E_SWAP_PATH  a path is missing or not readable, has neither an intact label nor a given size, or has a newer format.
//         E_SWAP_IO    a path cannot be read.
absl::StatusOr<std::vector<PathOptions>> WithSizes(std::span<const PathOptions> paths);

}  // namespace forebay::nvme
