// SPDX-License-Identifier: Apache-2.0
// The bytes that were written to swap paths, over all starts of the daemon.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace forebay::daemon {

struct PathWear {
  std::string path;
  uint64_t written_bytes = 0;
};

// Returns the recorded number of bytes that were written to the path. The record of a directory is its file forebay.wear.toml.
// The record of a block device is in `state_folder`. Returns 0 if no record exists, or if the record is of another device.
// Blocks.
uint64_t LoadWrittenBytes(const std::string& path, const std::string& state_folder);

// Records the written bytes of all paths. Blocks, but does not wait for the disk. Failures are logged.
void SaveWear(const std::vector<PathWear>& paths, const std::string& state_folder);

}  // namespace forebay::daemon
