// SPDX-License-Identifier: Apache-2.0
#include "nvme/io/internal/watch_table.h"

#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/strings/str_format.h"
#include "nvme/io/io_engine.h"

namespace forebay::nvme::internal {
namespace {

bool IsEventFd(int fd) {
  char target[64];
  const std::string link = absl::StrFormat("/proc/self/fd/%d", fd);
  const ssize_t size = readlink(link.c_str(), target, sizeof(target));
  return size > 0 && std::string_view(target, static_cast<size_t>(size)) == "anon_inode:[eventfd]";
}

}  // namespace

int64_t DrainEventFd(int fd) {
  uint64_t counter = 0;
  const iovec piece = {.iov_base = &counter, .iov_len = sizeof(counter)};
  const ssize_t size = preadv2(fd, &piece, 1, -1, RWF_NOWAIT);
  if (size < 0) return -errno;
  if (size != sizeof(counter)) return -EIO;
  return static_cast<int64_t>(counter);
}

absl::StatusOr<WatchKey> WatchTable::Add(int fd, uint64_t token) {
  uint32_t slot = static_cast<uint32_t>(watches_.size());
  for (uint32_t i = 0; i < watches_.size(); ++i) {
    if (watches_[i].fd == fd) {
      return absl::InvalidArgumentError(absl::StrFormat("descriptor %d is watched already", fd));
    }
    if (watches_[i].fd < 0 && slot == watches_.size()) slot = i;
  }
  if (!IsEventFd(fd)) {
    return absl::InvalidArgumentError(absl::StrFormat("descriptor %d is not an eventfd", fd));
  }
  if (slot == watches_.size()) {
    if (slot == IoEngine::kWatchesMax) {
      return absl::ResourceExhaustedError(
          absl::StrFormat("%d eventfds are watched: that is the maximum", slot));
    }
    watches_.emplace_back();
  }
  Watch& watch = watches_[slot];
  watch.fd = fd;
  watch.token = token;
  return WatchKey{.slot = slot, .generation = watch.generation};
}

bool WatchTable::Remove(int fd, WatchKey& key) {
  for (uint32_t i = 0; i < watches_.size(); ++i) {
    if (watches_[i].fd != fd || fd < 0) continue;
    key = {.slot = i, .generation = watches_[i].generation};
    watches_[i].fd = -1;
    ++watches_[i].generation;
    return true;
  }
  return false;
}

const Watch* WatchTable::Find(WatchKey key) const {
  if (key.slot >= watches_.size()) return nullptr;
  const Watch& watch = watches_[key.slot];
  return watch.fd >= 0 && watch.generation == key.generation ? &watch : nullptr;
}

}  // namespace forebay::nvme::internal
