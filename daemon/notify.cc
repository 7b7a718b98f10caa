// SPDX-License-Identifier: Apache-2.0
#include "daemon/notify.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <cstddef>
#include <cstdint>

#include "absl/strings/numbers.h"
#include "protocol/os/send_descriptor.h"
#include "protocol/os/unique_fd.h"

namespace forebay::daemon {

using protocol::UniqueFd;

int Notifier::Send(std::string_view message, int fd) const {
  if (!HasListener()) return 0;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (socket_.size() >= sizeof(address.sun_path)) return ENAMETOOLONG;
  socket_.copy(address.sun_path, socket_.size());
  size_t address_bytes = offsetof(sockaddr_un, sun_path) + socket_.size();
  if (address.sun_path[0] == '@') {
    address.sun_path[0] = '\0';
  } else {
    ++address_bytes;
  }

  iovec text{.iov_base = const_cast<char*>(message.data()), .iov_len = message.size()};
  msghdr header{};
  header.msg_name = &address;
  header.msg_namelen = static_cast<socklen_t>(address_bytes);
  header.msg_iov = &text;
  header.msg_iovlen = 1;
  const UniqueFd socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return errno;
  return protocol::SendWithDescriptor(socket.get(), header, fd, MSG_NOSIGNAL) < 0 ? errno : 0;
}

int Notifier::Barrier(std::chrono::microseconds timeout) const {
  if (!HasListener()) return 0;
  std::array<int, 2> ends = {-1, -1};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return errno;
  const UniqueFd read_end(ends[0]);
  UniqueFd write_end(ends[1]);
  if (const int error = Send("BARRIER=1", write_end.get()); error != 0) return error;
  // The service manager has the last write end: when it closes that one, it has handled all messages before.
  write_end.Reset();
  pollfd watched{.fd = read_end.get(), .events = 0, .revents = 0};
  using Clock = std::chrono::steady_clock;
  const Clock::time_point deadline = Clock::now() + timeout;
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    const int ended = ::poll(&watched, 1,
                             static_cast<int>(left < 0         ? 0
                                              : left < INT_MAX ? left
                                                               : INT_MAX));
    if (ended > 0) return 0;
    if (ended == 0) return ETIMEDOUT;
    if (errno != EINTR) return errno;
  }
}

std::chrono::microseconds WatchdogLimit(const char* usec, const char* pid) {
  int64_t limit_us = 0;
  int32_t watched = 0;
  if (usec == nullptr || !absl::SimpleAtoi(usec, &limit_us) || limit_us <= 0) return {};
  if (pid != nullptr && (!absl::SimpleAtoi(pid, &watched) || watched != ::getpid())) return {};
  return std::chrono::microseconds(limit_us);
}

}  // namespace forebay::daemon
