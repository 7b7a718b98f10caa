// SPDX-License-Identifier: Apache-2.0
#include "protocol/doorbell.h"

#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>

#include "protocol/error.h"

namespace forebay::protocol {
namespace {

constexpr int kQueuedBytesMax = 4096;  // send buffer for unread rings, as the kernel counts it

absl::Status NoDoorbell(const char* call) {
  return MakeError(ErrorId::kLimit, ErrnoText(call, errno),
                   "raise the limit of open files (ulimit -n, LimitNOFILE=)");
}

}  // namespace

absl::StatusOr<UniqueFd> MakeDoorbell() {
  UniqueFd fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd.valid()) return NoDoorbell("eventfd");
  return fd;
}

void RingDoorbell(int fd) {
  const int saved_errno = errno;
  const uint64_t one = 1;
  while (::write(fd, &one, sizeof(one)) < 0 && errno == EINTR) {
  }
  errno = saved_errno;
}

void DrainDoorbell(int fd) {
  uint64_t rings = 0;
  while (::read(fd, &rings, sizeof(rings)) < 0 && errno == EINTR) {
  }
}

absl::StatusOr<SocketDoorbell> MakeSocketDoorbell() {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()) != 0) {
    return NoDoorbell("socketpair");
  }
  SocketDoorbell doorbell{.ringer = UniqueFd(ends[0]), .waiter = UniqueFd(ends[1])};
  // The other side can send nothing: a descriptor in the queue would be closed by the ringer.
  if (::shutdown(ends[0], SHUT_RD) != 0) return NoDoorbell("shutdown");
  // Best effort: the default is larger.
  (void)::setsockopt(ends[0], SOL_SOCKET, SO_SNDBUF, &kQueuedBytesMax, sizeof(kQueuedBytesMax));
  return doorbell;
}

void RingSocketDoorbell(int ringer) {
  const char ring = 0;
  // A full queue wakes the waiter too. A waiter that has closed its end needs no wake-up.
  while (::send(ringer, &ring, sizeof(ring), MSG_DONTWAIT | MSG_NOSIGNAL) < 0 && errno == EINTR) {
  }
}

void DrainSocketDoorbell(int waiter) {
  std::array<char, 64> rings;
  while (true) {
    const ssize_t got = ::recv(waiter, rings.data(), rings.size(), MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < static_cast<ssize_t>(rings.size())) return;
  }
}

}  // namespace forebay::protocol
