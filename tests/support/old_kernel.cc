// SPDX-License-Identifier: Apache-2.0
// Runs a command as on an old kernel. Usage: old_kernel COMMAND [ARGUMENT]...

#include "tests/support/old_kernel.h"

#include <unistd.h>

#include <cstdio>

int main(int argc, char** argv) {
  if (argc < 2 || !forebay::testing::ActAsOldKernel()) {
    std::fprintf(stderr, "usage: old_kernel COMMAND [ARGUMENT]..., on a kernel with seccomp(2)\n");
    return 2;
  }
  ::execvp(argv[1], argv + 1);
  std::perror(argv[1]);
  return 127;
}
