// SPDX-License-Identifier: Apache-2.0
// Makes a process act as on an old kernel, or in a sandbox, that lacks the optional calls of Forebay.
#pragma once

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>

namespace forebay::testing {

// Makes this process and its children act as on an old kernel: without io_uring, pidfd_open(2), SO_PEERPIDFD, MADV_COLLAPSE,
// MADV_POPULATE_WRITE and mlock(2). Async-signal-safe. Returns false if the kernel has no seccomp(2).
//
// Source  seccomp(2); each error is that of a kernel which does not know the call or the option.
inline bool ActAsOldKernel() {
  constexpr uint32_t kPeerPidfd = 77;      // SO_PEERPIDFD, Linux 6.5
  constexpr uint32_t kPopulateWrite = 23;  // MADV_POPULATE_WRITE, 5.14
  constexpr uint32_t kCollapse = 25;       // MADV_COLLAPSE, 6.1
  constexpr uint32_t kThirdArgument = offsetof(seccomp_data, args[2]);
  const auto load = [](uint32_t offset) -> sock_filter {
    return BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offset);
  };
  // Skips `skipped` statements if the value is another.
  const auto unless = [](uint32_t value, uint8_t skipped) -> sock_filter {
    return BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, 0, skipped);
  };
  const auto fail = [](int error_number) -> sock_filter {
    return BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<uint32_t>(error_number));
  };
  const sock_filter allow = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
  std::array filter{load(offsetof(seccomp_data, nr)),
                    unless(SYS_io_uring_setup, 1),
                    fail(ENOSYS),
                    unless(SYS_pidfd_open, 1),
                    fail(ENOSYS),
                    unless(SYS_mlock, 1),
                    fail(EPERM),
                    unless(SYS_getsockopt, 4),
                    load(kThirdArgument),
                    unless(kPeerPidfd, 1),
                    fail(ENOPROTOOPT),
                    allow,
                    unless(SYS_madvise, 5),
                    load(kThirdArgument),
                    unless(kCollapse, 1),
                    fail(EINVAL),
                    unless(kPopulateWrite, 1),
                    fail(EINVAL),
                    allow};
  const sock_fprog program = {.len = filter.size(), .filter = filter.data()};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

}  // namespace forebay::testing
