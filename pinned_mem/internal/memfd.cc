#include "pinned_mem/internal/memfd.h"

#include <fcntl.h>
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

}  // namespace

absl::Status NoDescriptor(const std::string& what, int error_number) {
  const std::string text = ErrnoText(what, error_number);
  if (error_number != EMFILE && error_number != ENFILE) {
    return MakeError(ErrorId::kInternal, text);
  }
  return MakeError(ErrorId::kLimit, text,
                   "raise the limit of open files (ulimit -n, LimitNOFILE=)");
}

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
    return MakeError(ErrorId::kInternal,
                     ErrnoText(absl::StrCat("ftruncate of ", name, " to ", size_bytes), errno));
  }
  RETURN_IF_ERROR(AddSeals(fd.get(), F_SEAL_SHRINK | F_SEAL_GROW));
  return fd;
}

absl::Status AddSeals(int fd, int seals) {
  if (fcntl(fd, F_ADD_SEALS, seals) != 0) {
    return MakeError(ErrorId::kInternal, ErrnoText("fcntl F_ADD_SEALS", errno));
  }
  return absl::OkStatus();
}

bool HasSeals(int fd, int seals) {
  const int present = fcntl(fd, F_GET_SEALS);
  return present >= 0 && (present & seals) == seals;
}

}  // namespace forebay::pinned_mem::internal
