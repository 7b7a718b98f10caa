// What was written to the drives of swap paths, over all starts of the daemon.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace forebay::daemon {

struct PathWear {
  std::string path;
  // As configured; 0: not known. Where it is another one, the count begins anew.
  uint64_t endurance_bytes = 0;
  uint64_t written_bytes = 0;
};

// What is kept of the path: a directory's in its forebay.wear.toml, a block device's in `state_folder`. 0 where there is
// nothing, or it is of another device or endurance. Blocks.
uint64_t LoadWrittenBytes(const std::string& path, const std::string& state_folder,
                          uint64_t endurance_bytes);

// Blocks, but does not wait for the disk. What fails is logged.
void SaveWear(const std::vector<PathWear>& paths, const std::string& state_folder);

}  // namespace forebay::daemon
