// SPDX-License-Identifier: Apache-2.0
// Descriptors that stand for processes: readable once the process has ended.
#pragma once

#include <sys/types.h>

#include <optional>

#include "protocol/os/unique_fd.h"

namespace forebay::protocol {

// Opens a pidfd. The result is invalid, with errno, if the process does not exist or no descriptor is left.
//
// Source  pidfd_open(2), Linux 5.3.
UniqueFd OpenPidfd(pid_t pid);

// Method by which PeerPidfd() finds the process.
enum class PeerPidfdSource { kKernel, kPidOnly };

// Opens a pidfd of the process that connected a Unix socket. The result is invalid, with errno, if the process has ended or
// belongs to another pid namespace. kKernel asks the socket, and falls back to kPidOnly on kernels older than 6.5. kPidOnly
// opens `pid` (of SO_PEERCRED), then asks whether the peer's end is still open, because the number of an ended process may have
// passed to another process.
//
// Source  unix(7), SO_PEERPIDFD.
UniqueFd PeerPidfd(int socket, pid_t pid, PeerPidfdSource source = PeerPidfdSource::kKernel);

// A process as /proc shows it.
struct ProcessInfo {
  pid_t pid = 0;
  pid_t parent = 0;
  pid_t group = 0;
  bool is_running = false;  // neither stopped (SIGSTOP, a debugger) nor about to end
};

// The process that `pidfd` stands for. Nothing if the process has ended, belongs to another pid namespace, or is not
// shown by /proc.
//
// Source  proc_pid_fdinfo(5), proc_pid_stat(5).
std::optional<ProcessInfo> ReadProcess(int pidfd);

}  // namespace forebay::protocol
