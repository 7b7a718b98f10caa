// SPDX-License-Identifier: Apache-2.0
// Implements the service manager's side of sd_notify(3) for one service.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "protocol/os/unique_fd.h"
#include "tools/forebay/process.h"

namespace forebay::tools {

// Receives the readiness message of a service, and retains descriptors that must outlive the service's process. The service
// blocks while its messages are unread: call Drain() whenever socket_fd() is readable.
//
// Differences from systemd: messages of each process that can reach the socket are accepted, not only those of the main
// process. One open file description may have two names. Descriptors are not polled.
//
// Ownership  The store owns the retained descriptors until the service removes them or the store is destroyed.
// Threads    One.
// Limits     Descriptors beyond `capacity` are closed. A message has at most 4096 bytes and 253 descriptors. Messages that
//            break a rule of the protocol are ignored.
// Source     sd_notify(3) READY=, FDSTORE=, FDSTOREREMOVE=, FDNAME=, BARRIER=; systemd.service(5)
//            FileDescriptorStoreMax=.
class DescriptorStore {
 public:
  // Creates the socket; no file of this path may exist. With a `capacity` of 0 no descriptor is retained.
  //
  // Errors  E_OPTION  the socket cannot be created, or its path is too long.
  static absl::StatusOr<DescriptorStore> Create(const std::string& socket_path, uint32_t capacity);

  // Variables that the service needs in its environment, "NAME=value".
  std::vector<std::string> environment() const;
  int socket_fd() const { return socket_.get(); }

  // Handles the messages that have arrived. Does not wait for more.
  void Drain();

  // True if READY=1 has arrived since the start or the last NextProcess().
  bool is_ready() const { return is_ready_; }
  // Prepares for the service's next process. Call this after the service's process has ended and before the next one starts.
  void NextProcess();

  // Retained descriptors to pass to the service's next process, newest first. Borrowed: valid until the next Drain().
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
