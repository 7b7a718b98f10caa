// SPDX-License-Identifier: Apache-2.0
// Loaded into a daemon before its own libraries (LD_PRELOAD). Its writes to swap files fail or hang as the file that
// FOREBAY_TEST_DISK names says. "fail TEXT": writes to paths that contain TEXT fail with EIO. "hang TEXT": such writes block
// until the file says something else. Any other contents, or no file: writes work. Makes system calls only. Only for the
// thread engine, which calls libc to write; io_uring does not.

#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace {

std::string Contents(const char* path) {
  char text[512];
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return {};
  const ssize_t size = read(fd, text, sizeof(text));
  close(fd);
  return size > 0 ? std::string(text, static_cast<size_t>(size)) : std::string();
}

// Returns "fail" or "hang" if the order concerns the descriptor, else an empty text.
std::string Order(int fd) {
  const char* const file = std::getenv("FOREBAY_TEST_DISK");
  if (file == nullptr || (fcntl(fd, F_GETFL) & O_DIRECT) == 0) return {};
  const std::string order = Contents(file);
  const size_t space = order.find(' ');
  if (space == std::string::npos) return {};
  char target[512];
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  const ssize_t size = readlink(link.c_str(), target, sizeof(target));
  if (size < 0) return {};
  const std::string name(target, static_cast<size_t>(size));
  return name.find(order.substr(space + 1)) == std::string::npos ? std::string()
                                                                 : order.substr(0, space);
}

ssize_t Write(int fd, const void* data, size_t size, off_t offset) {
  std::string order = Order(fd);
  while (order == "hang") {
    poll(nullptr, 0, 10);
    order = Order(fd);
  }
  if (order == "fail") {
    errno = EIO;
    return -1;
  }
  return syscall(SYS_pwrite64, fd, data, size, offset);
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) ssize_t pwrite(int fd, const void* data, size_t size,
                                                      off_t offset) {
  return Write(fd, data, size, offset);
}

__attribute__((visibility("default"))) ssize_t pwrite64(int fd, const void* data, size_t size,
                                                        off64_t offset) {
  return Write(fd, data, size, offset);
}
}
