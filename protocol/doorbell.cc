#include "protocol/doorbell.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

#include "protocol/error.h"

namespace forebay::protocol {

absl::StatusOr<UniqueFd> MakeDoorbell() {
  UniqueFd fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd.valid()) {
    return MakeError(ErrorId::kLimit, ErrnoText("eventfd", errno),
                     "raise the limit of open files (ulimit -n, LimitNOFILE=)");
  }
  return fd;
}

void RingDoorbell(int fd) {
  const int saved_errno = errno;
  const uint64_t one = 1;
  while (::write(fd, &one, sizeof(one)) < 0 && errno == EINTR) {
  }
  errno = saved_errno;
}

void DrainDoorbell(int fd) {
  uint64_t rings = 0;
  while (::read(fd, &rings, sizeof(rings)) < 0 && errno == EINTR) {
  }
}

}  // namespace forebay::protocol
