#include "pinned_mem/internal/memfd.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U  // linux/memfd.h, 6.3
#endif

namespace forebay::pinned_mem::internal {
namespace {

using protocol::ErrnoText;
using protocol::ErrorId;
using protocol::MakeError;

// E_LIMIT if this process or the system has no descriptor left, else E_INTERNAL.
absl::Status NoDescriptor(const std::string& what, int error_number) {
  const std::string text = ErrnoText(what, error_number);
  if (error_number != EMFILE && error_number != ENFILE) {
    return MakeError(ErrorId::kInternal, text);
  }
  return MakeError(ErrorId::kLimit, text,
                   "raise the limit of open files (ulimit -n, LimitNOFILE=)");
}

}  // namespace

absl::StatusOr<protocol::UniqueFd> MakeMemfd(const std::string& name, uint64_t size_bytes,
                                             Access access) {
  const unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  protocol::UniqueFd fd(memfd_create(name.c_str(), flags | MFD_NOEXEC_SEAL));
  if (!fd.valid() && errno == EINVAL) fd.Reset(memfd_create(name.c_str(), flags));
  if (!fd.valid()) {
    return NoDescriptor(absl::StrCat("memfd_create ", name), errno);
  }
  const mode_t mode = access == Access::kServed ? 0400 : 0600;
  if (fchmod(fd.get(), mode) != 0) {
    return MakeError(ErrorId::kInternal, ErrnoText(absl::StrCat("fchmod of ", name), errno));
  }
  if (ftruncate(fd.get(), static_cast<off_t>(size_bytes)) != 0) {
    if (errno == EFBIG) {
      return MakeError(ErrorId::kDramLimit,
                       absl::StrCat("arena ", name, " of ", size_bytes,
                                    " bytes is larger than a file of this process may be "
                                    "(RLIMIT_FSIZE)"),
                       "LimitFSIZE=infinity in the unit, or ulimit -f unlimited");
    }
    return MakeError(ErrorId::kInternal,
                     ErrnoText(absl::StrCat("ftruncate of ", name, " to ", size_bytes), errno));
  }
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return MakeError(ErrorId::kInternal, ErrnoText(absl::StrCat("sealing of ", name), errno));
  }
  return fd;
}

absl::StatusOr<protocol::UniqueFd> Reopen(const protocol::UniqueFd& fd, int flags) {
  const std::string path = absl::StrCat("/proc/self/fd/", fd.get());
  // O_NONBLOCK: a lease that somebody holds on the file is an error, not a wait.
  protocol::UniqueFd again(open(path.c_str(), flags | O_CLOEXEC | O_NONBLOCK));
  if (!again.valid()) return NoDescriptor(absl::StrCat("open ", path), errno);
  return again;
}

absl::StatusOr<protocol::UniqueFd> ReopenWritable(const protocol::UniqueFd& fd) {
  constexpr mode_t kForOwner = 0600;
  constexpr mode_t kForReaders = 0400;
  if (fchmod(fd.get(), kForOwner) != 0) {
    return MakeError(ErrorId::kInternal, ErrnoText("fchmod of an arena", errno));
  }
  absl::StatusOr<protocol::UniqueFd> again = Reopen(fd, O_RDWR);
  if (fchmod(fd.get(), kForReaders) != 0) {
    return MakeError(ErrorId::kInternal, ErrnoText("fchmod of an arena", errno));
  }
  return again;
}

bool FreePages(int fd, const ArenaPart& part) {
  const int mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
  int result = 0;
  do {
    result = fallocate(fd, mode, static_cast<off_t>(part.offset_bytes),
                       static_cast<off_t>(part.size_bytes));
  } while (result != 0 && errno == EINTR);
  return result == 0;
}

UseCheck::UseCheck(int reader_fd) : fd_(reader_fd), result_(OtherUsers::kNone) {
  // Whoever opens the memfd while we hold the lease makes the kernel send a signal: SIGIO would end
  // this process, SIGURG is ignored unless somebody handles it.
  if (fcntl(fd_, F_SETSIG, SIGURG) == 0 && fcntl(fd_, F_SETLEASE, F_WRLCK) == 0) return;
  result_ = errno == EAGAIN ? OtherUsers::kSome : OtherUsers::kUnknown;
}

UseCheck::~UseCheck() {
  if (result_ == OtherUsers::kNone) (void)fcntl(fd_, F_SETLEASE, F_UNLCK);
}

}  // namespace forebay::pinned_mem::internal
