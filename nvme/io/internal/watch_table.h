// SPDX-License-Identifier: Apache-2.0
// The table of eventfds that an engine watches. All engines use it.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace forebay::nvme::internal {

// Reads and clears the counter of an eventfd, without blocking even if the eventfd is in blocking mode. Returns the counter, or
// -errno (-EAGAIN if the counter was zero).
int64_t DrainEventFd(int fd);

// Key of a watch: a slot of the table, and a generation that distinguishes the watch from earlier watches in the slot.
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

  // Removes the watch of `fd`. Returns false if `fd` has no watch. The key never becomes valid again.
  bool Remove(int fd, WatchKey& key);

  // Returns null if the watch was removed.
  const Watch* Find(WatchKey key) const;

 private:
  std::vector<Watch> watches_;
};

}  // namespace forebay::nvme::internal
