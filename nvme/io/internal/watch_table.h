// SPDX-License-Identifier: Apache-2.0
// The table of eventfds that an engine watches. All engines use it.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace forebay::nvme::internal {

// Reads and clears an eventfd's counter without ever blocking, whatever its flags: the counter, or
// -errno (-EAGAIN: it was zero).
int64_t DrainEventFd(int fd);

// A slot and the generation that tells its present watch from those before it.
struct WatchKey {
  uint32_t slot = 0;
  uint32_t generation = 0;
};

struct Watch {
  int fd = -1;  // -1: the slot is free
  uint32_t generation = 0;
  uint64_t token = 0;
};

// Limits  At most IoEngine::kWatchesMax watches; linear search, for setup alone. Find() is O(1).
class WatchTable {
 public:
  // Errors  those of IoEngine::WatchEventFd.
  absl::StatusOr<WatchKey> Add(int fd, uint64_t token);

  // Forgets the watch of `fd`; false where there is none. Its key is never valid again.
  bool Remove(int fd, WatchKey& key);

  // Null where the watch has been removed.
  const Watch* Find(WatchKey key) const;

 private:
  std::vector<Watch> watches_;
};

}  // namespace forebay::nvme::internal
