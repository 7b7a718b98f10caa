// Descriptors that stand for processes: readable once the process has ended.
#pragma once

#include <sys/types.h>

#include "protocol/os/unique_fd.h"

namespace forebay::protocol {

// Not valid, with errno, where there is no such process or no descriptor is left.
//
// Source  pidfd_open(2), Linux 5.3.
UniqueFd OpenPidfd(pid_t pid);

// How PeerPidfd() finds the process.
enum class PeerPidfdSource { kKernel, kPidOnly };

// The process that connected a Unix socket. Not valid, with errno, where it has ended or belongs to
// another pid namespace. kKernel asks the socket itself and falls back to kPidOnly where the kernel is
// older than 6.5: that opens `pid` (of SO_PEERCRED) and then asks whether the peer still has its end
// open, because a process that has ended may have left its number to another.
//
// Source  unix(7), SO_PEERPIDFD.
UniqueFd PeerPidfd(int socket, pid_t pid, PeerPidfdSource source = PeerPidfdSource::kKernel);

}  // namespace forebay::protocol
