#include "protocol/os/pidfd.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77  // asm-generic/socket.h, Linux 6.5
#endif

namespace forebay::protocol {

UniqueFd OpenPidfd(pid_t pid) {
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));  // sets CLOEXEC
}

UniqueFd PeerPidfd(int socket, pid_t pid, PeerPidfdSource source) {
  if (source == PeerPidfdSource::kKernel) {
    int fd = -1;
    socklen_t length = sizeof(fd);
    if (::getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &fd, &length) == 0) return UniqueFd(fd);
    if (errno != ENOPROTOOPT) return UniqueFd();
  }
  UniqueFd pidfd = OpenPidfd(pid);
  pollfd peer{.fd = socket, .events = 0, .revents = 0};
  if (pidfd.valid() && ::poll(&peer, 1, 0) > 0 && (peer.revents & POLLHUP) != 0) {
    pidfd.Reset();
    errno = ESRCH;
  }
  return pidfd;
}

}  // namespace forebay::protocol
