// SPDX-License-Identifier: Apache-2.0
// The service manager's side of sd_notify(3), for one service.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "protocol/os/unique_fd.h"
#include "tools/forebay/process.h"

namespace forebay::tools {

// Hears when the service is ready, and keeps descriptors that are to outlive its process. The service waits where
// its messages are not read: Drain() whenever socket_fd() is readable.
//
// Not as systemd: whoever may reach the socket is heard, not the main process alone; one open file
// description may have two names; descriptors are not polled.
//
// Ownership  Of the kept descriptors, until the service removes them or the store ends.
// Threads    One.
// Limits     What is beyond `capacity` descriptors is closed. A message has at most 4096 bytes and 253 descriptors;
//            what breaks a rule of the protocol is ignored.
// Source     sd_notify(3) READY=, FDSTORE=, FDSTOREREMOVE=, FDNAME=, BARRIER=; systemd.service(5)
//            FileDescriptorStoreMax=.
class DescriptorStore {
 public:
  // Makes the socket, which must not be there. A `capacity` of 0: nothing is kept.
  //
  // Errors  E_OPTION  it cannot be made, or its path is too long.
  static absl::StatusOr<DescriptorStore> Create(const std::string& socket_path, uint32_t capacity);

  // For the service.
  std::vector<std::string> environment() const;
  int socket_fd() const { return socket_.get(); }

  // Does what the messages that have come ask for; waits for none.
  void Drain();

  // Whether READY=1 has come since the start or the last NextProcess().
  bool is_ready() const { return is_ready_; }
  // The service's process has ended and the next one is not started yet.
  void NextProcess();

  // For the next process, newest first. Borrowed: until the next Drain().
  std::vector<PassedDescriptor> kept() const;

 private:
  struct Kept {
    std::string name;
    protocol::UniqueFd fd;
  };

  DescriptorStore(std::string socket_path, uint32_t capacity, protocol::UniqueFd socket);
  void Handle(const std::string& text, std::vector<protocol::UniqueFd> fds);

  std::string socket_path_;
  uint32_t capacity_;
  protocol::UniqueFd socket_;
  bool is_ready_ = false;
  std::vector<Kept> kept_;  // oldest first
};

}  // namespace forebay::tools
