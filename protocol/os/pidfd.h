// SPDX-License-Identifier: Apache-2.0
// Descriptors that stand for processes: readable once the process has ended.
#pragma once

#include <sys/types.h>

#include <optional>

#include "protocol/os/unique_fd.h"

namespace forebay::protocol {

// Not valid, with errno, where there is no such process or no descriptor is left.
//
// Source  pidfd_open(2), Linux 5.3.
UniqueFd OpenPidfd(pid_t pid);

// Method by which PeerPidfd() finds the process.
enum class PeerPidfdSource { kKernel, kPidOnly };

// The process that connected a Unix socket. Not valid, with errno, where it has ended or belongs to
// another pid namespace. kKernel asks the socket itself and falls back to kPidOnly where the kernel is
// older than 6.5: that opens `pid` (of SO_PEERCRED) and then asks whether the peer still has its end
// open, because a process that has ended may have left its number to another.
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
