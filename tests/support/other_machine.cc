// SPDX-License-Identifier: Apache-2.0
// Loaded into a program before its own libraries (LD_PRELOAD): the program sees the machine-id of the machine that
// FOREBAY_TEST_MACHINE names. An empty name means a machine without a machine-id.

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdarg>
#include <cstdlib>
#include <cstring>

namespace {

// Opens a machine-id of 32 digits, derived from the name's bytes.
int OpenMachineId() {
  const char* const name = std::getenv("FOREBAY_TEST_MACHINE");
  if (name == nullptr || *name == '\0') {
    errno = ENOENT;
    return -1;
  }
  constexpr char kDigits[] = "0123456789abcdef";
  std::array<unsigned char, 16> id{0x6f};
  for (size_t i = 0; i < std::strlen(name); ++i)
    id[i % id.size()] ^= static_cast<unsigned char>(name[i]);
  const int fd = ::memfd_create("machine-id", MFD_CLOEXEC);
  for (const unsigned char byte : id) {
    const char digits[] = {kDigits[byte / 16], kDigits[byte % 16]};
    (void)!::write(fd, digits, sizeof(digits));
  }
  return fd;
}

}  // namespace

// Intercepts openat(), which no sanitizer run time defines in the program itself, unlike open().
extern "C" __attribute__((visibility("default"))) int openat(int folder, const char* path,
                                                             int flags, ...) {
  if (std::strcmp(path, "/etc/machine-id") == 0) return OpenMachineId();
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  using OpenAt = int (*)(int, const char*, int, ...);
  static const auto next = reinterpret_cast<OpenAt>(::dlsym(RTLD_NEXT, "openat"));
  return next(folder, path, flags, mode);
}
