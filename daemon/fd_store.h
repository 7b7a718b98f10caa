// SPDX-License-Identifier: Apache-2.0
// Store of descriptors that outlive this process: the service manager holds them for the next process.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "daemon/control/control_plane.h"
#include "daemon/core/base/limits.h"
#include "daemon/notify.h"
#include "protocol/os/unique_fd.h"

namespace forebay::daemon {

// Numbers of stored descriptors. For each job: weights, states and step arena, its record, and the next record. For each
// session: its gradient arena and its process, and those of a session of the earlier daemon that was not continued. For the
// node: the staging slots, and reserve. FileDescriptorStoreMax= of the unit is the sum.
inline constexpr uint32_t kStoredFdsPerJob = 5;
inline constexpr uint32_t kStoredFdsPerSession = 4;
inline constexpr uint32_t kStoredFdsOfNode = 16;
inline constexpr uint32_t kStoredFdsMax =
    kStoredFdsPerJob * kJobsMax + kStoredFdsPerSession * kSessionsMax + kStoredFdsOfNode;

// Environment variables that main() reads; null if a variable is not set.
struct FdStoreEnvironment {
  const char* notify_socket = nullptr;   // NOTIFY_SOCKET
  const char* fdstore = nullptr;         // FDSTORE
  const char* listen_pid = nullptr;      // LISTEN_PID
  const char* listen_fds = nullptr;      // LISTEN_FDS
  const char* listen_fdnames = nullptr;  // LISTEN_FDNAMES
};

// The descriptors of this service in the service manager's store. They have names with kPrefix, which callers omit. Descriptors
// with other names (sockets that the service manager listens on for us) are not touched.
//
//   start  Take(); the caller decodes; Forget(), before it changes a byte; Release() each.
//   then   Keep() and Drop(), as memory is allocated and freed.
//   end    Keep() each; Flush().
//
// Ownership  Of descriptors that were taken and not released: the destructor closes them.
// Threads    One. Take() changes the environment: before the first thread is started.
// Limits     A message waits while the service manager's socket is full.
// Source     sd_listen_fds(3), sd_notify(3) FDSTORE= and BARRIER=, systemd.service(5).
class FdStore {
 public:
  static constexpr std::string_view kPrefix = "forebay.";
  // Most bytes of a name without the prefix. systemd accepts 255 bytes with the prefix.
  static constexpr size_t kNameBytesMax = 200;

  // Takes the descriptors that were handed over at start. Sets close-on-exec on each, and unsets the variables LISTEN_*, so
  // that no child uses them.
  static FdStore Take(const FdStoreEnvironment& environment);

  // True if the service manager stores descriptors of this service.
  bool is_available() const { return fds_max_ > 0; }
  // Returns the number of descriptors that the service manager stores at most.
  uint64_t fds_max() const { return fds_max_; }

  // Returns the names of the descriptors that were taken at start and not released, in ascending order.
  std::vector<std::string> names() const;
  // Passes the descriptor with this name to the caller. Returns an invalid descriptor if no descriptor has the name.
  protocol::UniqueFd Release(std::string_view name);

  // Removes the descriptors that were taken from the service manager's store, except the names in `kept`, and waits until they
  // are removed. A process that starts after a crash of this process does not get them. Does nothing if no descriptors were
  // taken.
  //
  // Errors  those of Flush; the store may still have some of the descriptors.
  absl::Status Forget(std::chrono::microseconds timeout, const std::set<std::string>& kept = {});

  // Puts a descriptor into the store, and replaces a stored descriptor of the same name. The caller may close its descriptor
  // afterwards. A name is 1 to kNameBytesMax letters, digits, '.' and '-'. An open file description can have only one name: the
  // service manager ignores a second name.
  //
  // Errors  E_UNSUPPORTED  not is_available().
  //         E_LIMIT        the store has fds_max() descriptors.
  //         E_INTERNAL     the name breaks its rule, or the message was not sent.
  absl::Status Keep(std::string_view name, int fd);

  // Removes a descriptor that Keep() has added, or that Forget() has retained. Ignores other names.
  //
  // Errors  E_INTERNAL  the message was not sent.
  absl::Status Drop(std::string_view name);

  // Waits until the service manager has handled all messages of Keep(), Drop() and Forget().
  //
  // Errors  E_UNSUPPORTED  no service manager listens.
  //         E_TIMEOUT      the service manager has not answered in time; it may still answer.
  //         E_INTERNAL     the message was not sent.
  absl::Status Flush(std::chrono::microseconds timeout);

 private:
  absl::Status Send(const std::string& what, const std::string& message, int fd = -1) const;
  absl::Status Remove(const std::string& name) const;

  Notifier notifier_;
  uint64_t fds_max_ = 0;
  std::map<std::string, protocol::UniqueFd, std::less<>> taken_;
  // Names without prefix: descriptors that Forget() removes, and descriptors that Keep() has added.
  std::vector<std::string> to_forget_;
  std::set<std::string, std::less<>> kept_;
};

}  // namespace forebay::daemon
