// SPDX-License-Identifier: Apache-2.0
// A message of a Unix socket that may carry a file descriptor.
#pragma once

#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>

namespace forebay::protocol {

// Calls sendmsg(2), again if a signal interrupts it. Sends descriptor `fd` with the data of `message`; no descriptor if `fd` is
// -1.
inline ssize_t SendWithDescriptor(int socket, msghdr message, int fd, int flags) {
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(fd))> control{};
  if (fd >= 0) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* const rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(fd));
    std::memcpy(CMSG_DATA(rights), &fd, sizeof(fd));
  }
  ssize_t sent = 0;
  do {
    sent = ::sendmsg(socket, &message, flags);
  } while (sent < 0 && errno == EINTR);
  return sent;
}

}  // namespace forebay::protocol
