// SPDX-License-Identifier: Apache-2.0
// First process of the emulated machine: runs the tests, reports their exit status, switches the machine off.

#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

int main() {
  (void)mount("proc", "/proc", "proc", 0, nullptr);
  (void)mount("sysfs", "/sys", "sysfs", 0, nullptr);
  (void)mount("tmpfs", "/tmp", "tmpfs", 0, nullptr);
  const char* const request = getenv("FILTER");  // variable from the kernel's command line
  const std::string filter = std::string("--gtest_filter=") + (request != nullptr ? request : "*");
  int status = -1;
  if (const pid_t child = fork(); child == 0) {
    execl("/cpu_adam_test", "cpu_adam_test", "--gtest_color=no", filter.c_str(), nullptr);
    std::perror("cpu_adam_test");
    _exit(127);
  } else if (child > 0) {
    (void)waitpid(child, &status, 0);
  }
  std::printf("\nend of tests: %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : status);
  (void)std::fflush(stdout);
  (void)tcdrain(STDOUT_FILENO);
  (void)reboot(RB_POWER_OFF);
  return 1;
}
