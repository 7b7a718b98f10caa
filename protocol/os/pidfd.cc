// SPDX-License-Identifier: Apache-2.0
#include "protocol/os/pidfd.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77  // asm-generic/socket.h, Linux 6.5
#endif

namespace forebay::protocol {
namespace {

// PF_EXITING, PF_DUMPCORE and PF_SIGNALED of linux/sched.h.
constexpr uint64_t kEndingFlags = 0x4 | 0x200 | 0x400;
constexpr uint64_t kKillPending = uint64_t{1} << (SIGKILL - 1);

// -1: none.
pid_t PidOf(int pidfd) {
  std::ifstream file("/proc/self/fdinfo/" + std::to_string(pidfd));
  for (std::string word; file >> word;) {
    pid_t pid = -1;
    if (word == "Pid:" && file >> pid) return pid;
  }
  return -1;
}

bool HasEnded(int pidfd) {
  pollfd process{.fd = pidfd, .events = POLLIN, .revents = 0};
  return ::poll(&process, 1, 0) != 0;
}

}  // namespace

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

std::optional<ProcessInfo> ReadProcess(int pidfd) {
  constexpr int kFieldsBeforeFlags = 3;     // session, tty_nr, tpgid
  constexpr int kFieldsBeforeSignals = 21;  // minflt to kstkeip
  ProcessInfo info{.pid = PidOf(pidfd)};
  if (info.pid <= 0) return std::nullopt;
  std::ifstream file("/proc/" + std::to_string(info.pid) + "/stat");
  std::string line;
  std::getline(file, line, '\0');
  // The name of the program stands in parentheses and may hold anything.
  const size_t name_end = line.rfind(')');
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream fields(line.substr(name_end + 1));
  char state = 0;
  uint64_t flags = 0;
  uint64_t signals = 0;
  std::string skipped;
  fields >> state >> info.parent >> info.group;
  for (int i = 0; i < kFieldsBeforeFlags; ++i) fields >> skipped;
  fields >> flags;
  for (int i = 0; i < kFieldsBeforeSignals; ++i) fields >> skipped;
  fields >> signals;
  // A process that has not ended by now has had its number all the time.
  if (!fields || HasEnded(pidfd)) return std::nullopt;
  const bool is_stopped = state == 'T' || state == 't';
  info.is_running = !is_stopped && (flags & kEndingFlags) == 0 && (signals & kKillPending) == 0;
  return info;
}

}  // namespace forebay::protocol
