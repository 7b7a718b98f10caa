// SPDX-License-Identifier: Apache-2.0
#include "pinned_mem/internal/memfd.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U  // linux/memfd.h, 6.3
#endif
#ifndef F_SEAL_EXEC
#define F_SEAL_EXEC 0x0020  // linux/fcntl.h, 6.3; what MFD_NOEXEC_SEAL sets
#endif

namespace forebay::pinned_mem::internal {
namespace {

using protocol::ErrnoText;
using protocol::ErrorId;
using protocol::MakeError;

// Returns E_LIMIT if this process or the system cannot open more descriptors, otherwise E_INTERNAL.
absl::Status NoDescriptor(const std::string& what, int error_number) {
  const std::string text = ErrnoText(what, error_number);
  if (error_number != EMFILE && error_number != ENFILE) {
    return MakeError(ErrorId::kInternal, text);
  }
  return MakeError(ErrorId::kLimit, text,
                   "raise the limit of open files (ulimit -n, LimitNOFILE=)");
}

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

mode_t ModeOf(Access access) { return access == Access::kServed ? 0400 : 0600; }

absl::Status NotThisArena(const std::string& name, const std::string& what) {
  return MakeError(ErrorId::kCorrupt,
                   absl::StrCat("a descriptor that was kept is not arena ", name, ": ", what),
                   "attach again, and go on from a checkpoint or a durable step");
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
  if (fchmod(fd.get(), ModeOf(access)) != 0) {
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
  if (fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) {
    return MakeError(ErrorId::kInternal, ErrnoText(absl::StrCat("sealing of ", name), errno));
  }
  return fd;
}

absl::Status CheckMemfd(const protocol::UniqueFd& fd, const std::string& name, uint64_t size_bytes,
                        Access access) {
  // Files of tmpfs have seals too, but not these seals.
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0) return NotThisArena(name, ErrnoText("it has no seals", errno));
  if ((seals & ~F_SEAL_EXEC) != kSeals) {
    return NotThisArena(name, absl::StrCat("its seals are ", absl::Hex(seals), ", not ",
                                           absl::Hex(kSeals), " (hexadecimal)"));
  }
  // Requires the first open file description, which the kernel does not count as a writer: UseCheck relies on that.
  if ((fcntl(fd.get(), F_GETFL) & O_ACCMODE) != O_RDWR) {
    return NotThisArena(name, "it is not open for reading and writing");
  }
  struct stat info = {};
  if (fstat(fd.get(), &info) != 0) {
    return MakeError(ErrorId::kInternal, ErrnoText(absl::StrCat("fstat of ", name), errno));
  }
  if (static_cast<uint64_t>(info.st_size) != size_bytes) {
    return NotThisArena(name, absl::StrCat("it has ", info.st_size, " bytes, not ", size_bytes));
  }
  if (info.st_uid != geteuid()) {
    return NotThisArena(name, absl::StrCat("it belongs to uid ", info.st_uid, ", not ", geteuid()));
  }
  if ((info.st_mode & 07777U) != ModeOf(access)) {
    return NotThisArena(name, absl::StrCat("its mode is ", absl::Hex(info.st_mode & 07777U),
                                           ", not ", absl::Hex(ModeOf(access)), " (hexadecimal)"));
  }
  std::array<char, 512> link{};
  const std::string path = absl::StrCat("/proc/self/fd/", fd.get());
  const ssize_t length = readlink(path.c_str(), link.data(), link.size());
  if (length < 0) return MakeError(ErrorId::kInternal, ErrnoText("readlink " + path, errno));
  const std::string target(link.data(), static_cast<size_t>(length));
  if (target != absl::StrCat("/memfd:", name, " (deleted)")) {
    return NotThisArena(name, absl::StrCat("it is ", target));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<uint64_t>> FindHole(const protocol::UniqueFd& fd,
                                                 std::span<const ArenaPart> parts) {
  // Hole or end that the last search found. The kernel's search does not stop at the end of a part.
  std::optional<uint64_t> hole_bytes;
  for (const ArenaPart& part : parts) {
    if (!hole_bytes || *hole_bytes < part.offset_bytes) {
      const off_t found = lseek(fd.get(), static_cast<off_t>(part.offset_bytes), SEEK_HOLE);
      if (found < 0) {
        return MakeError(ErrorId::kInternal,
                         ErrnoText(absl::StrCat("lseek from ", part.offset_bytes), errno));
      }
      hole_bytes = static_cast<uint64_t>(found);
    }
    if (*hole_bytes < part.offset_bytes + part.size_bytes) return hole_bytes;
  }
  return std::nullopt;
}

absl::StatusOr<protocol::UniqueFd> Reopen(const protocol::UniqueFd& fd, int flags) {
  const std::string path = absl::StrCat("/proc/self/fd/", fd.get());
  // O_NONBLOCK makes the open fail, instead of wait, if another process holds a lease on the file.
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
  // If another process opens the memfd while this process holds the lease, the kernel sends a signal to this process. The
  // default signal, SIGIO, would kill this process. SIGURG is ignored unless it has a handler.
  if (fcntl(fd_, F_SETSIG, SIGURG) == 0 && fcntl(fd_, F_SETLEASE, F_WRLCK) == 0) return;
  result_ = errno == EAGAIN ? OtherUsers::kSome : OtherUsers::kUnknown;
}

UseCheck::~UseCheck() {
  if (result_ == OtherUsers::kNone) (void)fcntl(fd_, F_SETLEASE, F_UNLCK);
}

}  // namespace forebay::pinned_mem::internal
