// SPDX-License-Identifier: Apache-2.0
// Runs parts of a test in a child process as user nobody instead of root.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

namespace forebay::testing {

inline constexpr unsigned kNobody = 65534;
inline constexpr unsigned kDeadlineSeconds = 20;  // SIGALRM ends a hanging child

// Becomes the user nobody if the process runs as root. Returns false on failure.
inline bool BecomeNobody() {
  if (geteuid() != 0) return true;
  return setresgid(kNobody, kNobody, kNobody) == 0 && setresuid(kNobody, kNobody, kNobody) == 0;
}

// Waits for a child. Returns its exit status, or -signal.
inline int WaitFor(pid_t child) {
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

// Runs `body` in a child process as user nobody. Returns what `body` returns, or -signal.
template <class Body>
int AsNobody(Body body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(kDeadlineSeconds);
    _exit(BecomeNobody() ? body() : 100);
  }
  return WaitFor(child);
}

}  // namespace forebay::testing
