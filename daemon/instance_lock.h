// SPDX-License-Identifier: Apache-2.0
// Lock and socket file of the daemon. The lock allows one daemon for each socket path.
#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "protocol/os/unique_fd.h"

namespace forebay::daemon {

// Holds `PATH.lock`, which names the daemon's process id, until it is destroyed. The kernel releases the lock however the
// process ends.
class InstanceLock {
 public:
  // Errors  E_BUSY    another daemon holds the lock; its process id.
  //         E_CONFIG  the file cannot be created; errno.
  static absl::StatusOr<std::unique_ptr<InstanceLock>> Acquire(const std::string& socket_path);

  InstanceLock(const InstanceLock&) = delete;
  InstanceLock& operator=(const InstanceLock&) = delete;
  ~InstanceLock();  // removes the file, as ListeningSocket does

 private:
  InstanceLock(std::string path, protocol::UniqueFd fd);

  std::string path_;
  protocol::UniqueFd fd_;
};

// A listening Unix socket with a path in the file system.
class ListeningSocket {
 public:
  // Listens at `path` with these permission bits from the first moment. Replaces a file at `path`.
  //
  // Errors  E_CONFIG  the path is too long, or a call fails; errno.
  static absl::StatusOr<std::unique_ptr<ListeningSocket>> Create(const std::string& path,
                                                                 unsigned mode);

  ListeningSocket(const ListeningSocket&) = delete;
  ListeningSocket& operator=(const ListeningSocket&) = delete;
  ~ListeningSocket();  // removes the file, unless another file has replaced it

  protocol::UniqueFd& fd() { return fd_; }

 private:
  ListeningSocket(std::string path, protocol::UniqueFd fd, const struct stat& bound);

  std::string path_;
  protocol::UniqueFd fd_;
  dev_t device_;
  ino_t inode_;
};

}  // namespace forebay::daemon
