// SPDX-License-Identifier: Apache-2.0
// The machine's own file system: directories and block devices, locked, checked and reserved.
#include <fcntl.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "nvme/internal/page_buffer.h"
#include "nvme/io/io_engine.h"
#include "nvme/swap_files.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "protocol/os/unique_fd.h"
#include "protocol/units.h"

namespace forebay::nvme {
namespace {

using protocol::ErrnoText;
using protocol::ErrorId;
using protocol::FormatBytes;
using protocol::MakeError;
using protocol::UniqueFd;

constexpr int kTriesMax = 16;  // after EINTR
constexpr std::chrono::seconds kTransfersEnd(20);
constexpr std::chrono::milliseconds kTransfersPause(5);

// A path while it is opened, checked and reserved. Reclaim() undoes that.
struct Candidate {
  Candidate() = default;
  Candidate(Candidate&&) = default;
  Candidate& operator=(Candidate&&) = default;

  uint32_t index = 0;
  std::string name;  // name of the file or device
  UniqueFd lock;     // descriptor of the directory or the device, which is locked
  UniqueFd file;     // descriptor of the file, opened with O_DIRECT
  bool is_device = false;
  bool created = false;         // this call created the file
  bool grown = false;           // this call may have grown the file
  uint64_t capacity_bytes = 0;  // bytes to reserve
  uint64_t old_bytes = 0;       // length of the file or device before this call
  uint64_t old_allocated = 0;   // bytes of the blocks before this call
  dev_t device = 0;             // device of the file system
};

std::string Text(const Candidate& path) {
  return absl::StrFormat("swap path %d (%s)", path.index, path.name);
}

absl::Status PathError(const Candidate& path, const char* what, int error, std::string_view hint) {
  return MakeError(ErrorId::kSwapPath, ErrnoText(absl::StrCat(Text(path), ": ", what), error),
                   hint);
}

// The process that holds an flock, from /proc/locks; 0 where it is not shown (another namespace).
pid_t LockHolder(const struct stat& locked) {
  std::ifstream locks("/proc/locks");
  const std::string wanted =
      absl::StrFormat("%02x:%02x:%d", major(locked.st_dev), minor(locked.st_dev), locked.st_ino);
  std::string line;
  while (std::getline(locks, line)) {
    // "1: FLOCK  ADVISORY  WRITE 1234 fe:00:5678 0 EOF"
    if (line.find("FLOCK") == std::string::npos) continue;
    const size_t place = line.find(" " + wanted + " ");
    const size_t kind = line.find(" WRITE ");
    if (place == std::string::npos || kind == std::string::npos) continue;
    return static_cast<pid_t>(std::strtol(line.c_str() + kind + 7, nullptr, 10));
  }
  return 0;
}

absl::Status BusyError(const Candidate& path, const struct stat& locked) {
  const pid_t pid = LockHolder(locked);
  return MakeError(
      ErrorId::kBusy,
      pid > 0 ? absl::StrFormat("%s is in use by process %d", Text(path), pid)
              : absl::StrFormat("%s is in use by another process, or mounted", Text(path)),
      "stop that process, or name another swap path; while a daemon has it, forebay scrub "
      "without --swap asks that one");
}

absl::Status AcquireLock(Candidate& path) {
  if (flock(path.lock.get(), LOCK_EX | LOCK_NB) == 0) return absl::OkStatus();
  const int error = errno;
  struct stat status {};
  if (error != EWOULDBLOCK || fstat(path.lock.get(), &status) != 0) {
    return PathError(path, "lock", error, "use a local file system");
  }
  return BusyError(path, status);
}

// Waits for transfers of a process that was killed: they continue after its end, and would mix with this process's transfers.
// Transfers in flight hold the open file, and with it the lock on the file. (The lock on a block device is of that kind too:
// the device is busy while such transfers are in flight.)
absl::Status AwaitTransfersOfTheDead(Candidate& path) {
  const auto end = std::chrono::steady_clock::now() + kTransfersEnd;
  while (flock(path.file.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK && errno != EINTR) {
      return PathError(path, "lock", errno, "use a local file system");
    }
    if (std::chrono::steady_clock::now() > end) {
      return MakeError(ErrorId::kBusy,
                       absl::StrFormat("%s: a process that has ended has transfers under way, and "
                                       "the disk has not ended them within %d s",
                                       Text(path), kTransfersEnd.count()),
                       "look at the device's health (dmesg), and start again");
    }
    std::this_thread::sleep_for(kTransfersPause);
  }
  return absl::OkStatus();
}

// Checks that O_DIRECT works: an open with O_DIRECT may succeed without effect (tmpfs), or the file may need a larger alignment
// than kIoAlignment.
absl::Status CheckDirect(const Candidate& path) {
  constexpr std::string_view kHint = "use a directory on a disk file system such as ext4 or XFS";
  struct statfs system {};
  if (fstatfs(path.file.get(), &system) != 0) {
    return PathError(path, "fstatfs", errno, kHint);
  }
  if (!path.is_device && (system.f_type == TMPFS_MAGIC || system.f_type == RAMFS_MAGIC)) {
    return MakeError(ErrorId::kSwapPath,
                     absl::StrCat(Text(path), ": a file system in memory (tmpfs) has no O_DIRECT"),
                     kHint);
  }
  struct statx status {};
  if (statx(path.file.get(), "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) != 0 ||
      (status.stx_mask & STATX_DIOALIGN) == 0) {
    return absl::OkStatus();  // the kernel reports no alignment; the open succeeded
  }
  if (status.stx_dio_mem_align == 0 || status.stx_dio_offset_align == 0) {
    return MakeError(ErrorId::kSwapPath,
                     absl::StrCat(Text(path), ": its file system has no O_DIRECT"), kHint);
  }
  if (status.stx_dio_mem_align > kIoAlignment || status.stx_dio_offset_align > kIoAlignment) {
    return MakeError(
        ErrorId::kSwapPath,
        absl::StrFormat("%s: O_DIRECT wants an alignment of %d bytes there, Forebay has %d",
                        Text(path), std::max(status.stx_dio_mem_align, status.stx_dio_offset_align),
                        kIoAlignment),
        kHint);
  }
  return absl::OkStatus();
}

// Error of an open for reading and, unless `mode` is kInspect, for writing.
absl::Status OpenError(const Candidate& path, OpenMode mode, int error) {
  switch (error) {
    case EINVAL:
      return PathError(path, "open with O_DIRECT", error,
                       "use a directory on a disk file system such as ext4 or XFS");
    case EROFS:
    case EACCES:
    case EPERM:
      if (mode == OpenMode::kInspect) {
        return PathError(path, "open", error, "ask as root, or as the daemon's user");
      }
      return PathError(path, "read-only: open", error,
                       "give the daemon's user write access, or choose another directory");
    default:
      return PathError(path, "open", error, "choose another directory or device");
  }
}

int OpenFlags(OpenMode mode) {
  return (mode == OpenMode::kInspect ? O_RDONLY : O_RDWR) | O_DIRECT | O_CLOEXEC;
}

absl::Status OpenDirectory(const PathOptions& options, OpenMode mode, Candidate& path) {
  path.name = absl::StrCat(options.path, "/", kSwapFileName);
  path.lock.Reset(open(options.path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!path.lock.valid()) return OpenError(path, mode, errno);
  RETURN_IF_ERROR(AcquireLock(path));
  const int flags = OpenFlags(mode) | O_NOFOLLOW;
  const int directory = path.lock.get();
  path.file.Reset(openat(directory, kSwapFileName, flags));
  if (!path.file.valid() && errno == ENOENT && mode == OpenMode::kReclaim) {
    path.file.Reset(openat(directory, kSwapFileName, flags | O_CREAT | O_EXCL, 0600));
    const int error = errno;
    struct stat made {};
    path.created =
        path.file.valid() || (error == EINVAL && fstatat(directory, kSwapFileName, &made, 0) == 0);
    errno = error;
  }
  if (!path.file.valid()) return OpenError(path, mode, errno);
  struct stat status {};
  if (fstat(path.file.get(), &status) != 0) return OpenError(path, mode, errno);
  if (!S_ISREG(status.st_mode)) {
    return MakeError(ErrorId::kSwapPath, absl::StrCat(Text(path), ": not a regular file"));
  }
  RETURN_IF_ERROR(AwaitTransfersOfTheDead(path));
  if (mode != OpenMode::kInspect && fchmod(path.file.get(), 0600) != 0) {
    return PathError(path, "chmod 0600", errno, "");
  }
  path.device = status.st_dev;
  path.old_bytes = static_cast<uint64_t>(status.st_size);
  path.old_allocated = static_cast<uint64_t>(status.st_blocks) * 512;
  return absl::OkStatus();
}

absl::Status OpenDevice(const PathOptions& options, OpenMode mode, const struct stat& status,
                        Candidate& path) {
  path.name = options.path;
  path.is_device = true;
  // O_EXCL: refused while a file system on it is mounted.
  path.file.Reset(open(options.path.c_str(), OpenFlags(mode) | O_EXCL));
  if (!path.file.valid()) {
    return errno == EBUSY ? BusyError(path, status) : OpenError(path, mode, errno);
  }
  path.lock.Reset(fcntl(path.file.get(), F_DUPFD_CLOEXEC, 0));
  if (!path.lock.valid()) return OpenError(path, mode, errno);
  RETURN_IF_ERROR(AcquireLock(path));
  if (ioctl(path.file.get(), BLKGETSIZE64, &path.old_bytes) != 0) {
    return PathError(path, "BLKGETSIZE64", errno, "");
  }
  if (path.old_bytes < path.capacity_bytes) {
    return MakeError(
        ErrorId::kSwapNospc,
        absl::StrFormat("cannot reserve %s on %s (free %s)", FormatBytes(path.capacity_bytes),
                        Text(path), FormatBytes(path.old_bytes)),
        absl::StrFormat("lower --swap-size / swap.capacity to %s", FormatBytes(path.old_bytes)));
  }
  return absl::OkStatus();
}

absl::Status OpenPath(const PathOptions& options, OpenMode mode, std::span<const Candidate> before,
                      Candidate& path) {
  path.name = options.path;
  path.capacity_bytes = options.capacity_bytes;
  struct stat status {};
  if (stat(options.path.c_str(), &status) != 0) {
    return PathError(path, "missing", errno, "make the directory, or correct the path");
  }
  for (const Candidate& other : before) {
    struct stat locked {};
    if (fstat(other.lock.get(), &locked) == 0 && locked.st_dev == status.st_dev &&
        locked.st_ino == status.st_ino) {
      return MakeError(ErrorId::kSwapPath,
                       absl::StrFormat("%s: the same as swap path %d", Text(path), other.index),
                       "name each path once");
    }
  }
  if (S_ISBLK(status.st_mode)) {
    RETURN_IF_ERROR(OpenDevice(options, mode, status, path));
  } else if (S_ISDIR(status.st_mode)) {
    RETURN_IF_ERROR(OpenDirectory(options, mode, path));
  } else {
    return MakeError(ErrorId::kSwapPath,
                     absl::StrCat(Text(path), ": neither a directory nor a block device"),
                     "name a directory: the daemon makes its file in it");
  }
  RETURN_IF_ERROR(CheckDirect(path));
  if (mode != OpenMode::kReclaim && path.old_bytes < path.capacity_bytes) {
    return MakeError(ErrorId::kSwapPath,
                     absl::StrFormat("%s: it has %s (%d bytes), less than its configured %s (%d)",
                                     Text(path), FormatBytes(path.old_bytes), path.old_bytes,
                                     FormatBytes(path.capacity_bytes), path.capacity_bytes),
                     "give the sizes the volume was made with; where the file is damaged, forebayd "
                     "--reclaim makes the volume anew and gives up its jobs");
  }
  return absl::OkStatus();
}

absl::Status CheckContent(const Candidate& path, CheckFirstPage check) {
  internal::PageBuffer page(kIoAlignment);
  if (path.old_bytes < kIoAlignment) return absl::OkStatus();
  const ssize_t size = pread(path.file.get(), page.bytes().data(), kIoAlignment, 0);
  if (size < 0) return PathError(path, "read", errno, "look at the device's health (dmesg)");
  if (static_cast<size_t>(size) < kIoAlignment) return absl::OkStatus();
  return check(Text(path), page.bytes());
}

// Paths on one file system share its free space.
absl::Status CheckSpace(std::span<const Candidate> paths) {
  for (const Candidate& first : paths) {
    if (first.is_device) continue;
    struct statvfs system {};
    if (fstatvfs(first.file.get(), &system) != 0) return PathError(first, "statvfs", errno, "");
    uint64_t needed = 0;
    uint64_t free_bytes = static_cast<uint64_t>(system.f_bavail) * system.f_frsize;
    uint32_t sharing = 0;
    for (const Candidate& path : paths) {
      if (path.is_device || path.device != first.device) continue;
      needed += path.capacity_bytes;
      free_bytes += path.old_allocated;  // reused
      ++sharing;
    }
    if (needed <= free_bytes) continue;
    const std::string where = sharing == 1
                                  ? absl::StrCat("on ", Text(first))
                                  : absl::StrFormat("on %s and %d more on the same file system",
                                                    Text(first), sharing - 1);
    return MakeError(
        ErrorId::kSwapNospc,
        absl::StrFormat("cannot reserve %s %s (free %s)", FormatBytes(needed), where,
                        FormatBytes(free_bytes)),
        absl::StrFormat("lower --swap-size / swap.capacity to %s in all, or free space",
                        FormatBytes(free_bytes)));
  }
  return absl::OkStatus();
}

// Reserves the space of a path. fallocate() retains allocated blocks: they are written already, and need no metadata updates
// later.
absl::Status Reserve(Candidate& path, OpenMode mode, FileLife life) {
  if (path.is_device) return absl::OkStatus();
  const int file = path.file.get();
  int error = 0;
  path.grown = mode == OpenMode::kReclaim;
  for (int tries = 0; mode == OpenMode::kReclaim && tries < kTriesMax; ++tries) {
    error = fallocate(file, 0, 0, static_cast<off_t>(path.capacity_bytes)) == 0 ? 0 : errno;
    if (error != EINTR) break;
  }
  if (error == ENOSPC || error == EDQUOT || error == EFBIG) {
    struct statvfs system {};
    fstatvfs(file, &system);
    return MakeError(ErrorId::kSwapNospc,
                     ErrnoText(absl::StrFormat("cannot reserve %s on %s (free %s)",
                                               FormatBytes(path.capacity_bytes), Text(path),
                                               FormatBytes(static_cast<uint64_t>(system.f_bavail) *
                                                           system.f_frsize)),
                               error),
                     error == EFBIG ? "lower --swap-size / swap.capacity, or raise RLIMIT_FSIZE: "
                                      "LimitFSIZE=infinity in the unit, ulimit -f unlimited"
                                    : "lower --swap-size / swap.capacity, or free space");
  }
  if (error != 0) {
    return PathError(path, "fallocate", error, "use a file system with fallocate, as ext4 or XFS");
  }
  if (mode == OpenMode::kReclaim && path.old_bytes > path.capacity_bytes &&
      ftruncate(file, static_cast<off_t>(path.capacity_bytes)) != 0) {
    return PathError(path, "ftruncate", errno, "");
  }
  if (life == FileLife::kUnlinked) {
    if (unlinkat(path.lock.get(), kSwapFileName, 0) != 0)
      return PathError(path, "unlink", errno, "");
    path.created = false;
    return absl::OkStatus();
  }
  if (fsync(file) != 0 || fsync(path.lock.get()) != 0) return PathError(path, "fsync", errno, "");
  return absl::OkStatus();
}

void Reclaim(std::span<const Candidate> paths) {
  for (const Candidate& path : paths) {
    if (path.created) {
      unlinkat(path.lock.get(), kSwapFileName, 0);
    } else if (path.grown) {
      // Drops what fallocate added behind the old end; failing that, the next start reuses it.
      if (ftruncate(path.file.get(), static_cast<off_t>(path.old_bytes)) != 0) continue;
    }
  }
}

class PosixFile final : public SwapFile {
 public:
  explicit PosixFile(Candidate path) : path_(std::move(path)) {}

  int fd() const override { return path_.file.get(); }
  std::string_view name() const override { return path_.name; }
  void Unlock() override { flock(path_.file.get(), LOCK_UN); }

  absl::Status Read(uint64_t offset_bytes, std::span<std::byte> bytes) override {
    return Transfer("read", offset_bytes, bytes.size(), [&](size_t done, off_t offset) {
      return pread(fd(), bytes.data() + done, bytes.size() - done, offset);
    });
  }
  absl::Status Write(uint64_t offset_bytes, std::span<const std::byte> bytes) override {
    return Transfer("write", offset_bytes, bytes.size(), [&](size_t done, off_t offset) {
      return pwrite(fd(), bytes.data() + done, bytes.size() - done, offset);
    });
  }
  absl::Status Sync() override {
    return fdatasync(fd()) == 0 ? absl::OkStatus() : Error("flush", 0, errno);
  }

 private:
  template <typename Call>
  absl::Status Transfer(const char* verb, uint64_t offset_bytes, size_t size_bytes, Call call) {
    size_t done = 0;
    for (int tries = 0; done < size_bytes;) {
      const ssize_t result = call(done, static_cast<off_t>(offset_bytes + done));
      const size_t whole =
          result > 0 ? static_cast<size_t>(result) / kIoAlignment * kIoAlignment : 0;
      done += whole;
      if (whole > 0) continue;
      if ((result < 0 && errno != EINTR && errno != EAGAIN) || ++tries == kTriesMax) {
        return Error(verb, offset_bytes + done, result < 0 ? errno : ENODATA);
      }
    }
    return absl::OkStatus();
  }

  absl::Status Error(const char* verb, uint64_t offset_bytes, int error) const {
    return MakeError(
        ErrorId::kSwapIo,
        ErrnoText(absl::StrFormat("%s: %s at offset %d", Text(path_), verb, offset_bytes), error));
  }

  Candidate path_;
};

class PosixSwapFileSystem final : public SwapFileSystem {
 public:
  absl::StatusOr<std::vector<std::unique_ptr<SwapFile>>> Open(std::span<const PathOptions> paths,
                                                              OpenMode mode, FileLife life,
                                                              CheckFirstPage check) override {
    std::vector<Candidate> candidates;
    candidates.reserve(paths.size());
    const absl::Status status = OpenAll(paths, mode, life, check, candidates);
    if (!status.ok()) {
      Reclaim(candidates);
      return status;
    }
    std::vector<std::unique_ptr<SwapFile>> files;
    for (Candidate& path : candidates)
      files.push_back(std::make_unique<PosixFile>(std::move(path)));
    return files;
  }

 private:
  static absl::Status OpenAll(std::span<const PathOptions> paths, OpenMode mode, FileLife life,
                              CheckFirstPage check, std::vector<Candidate>& candidates) {
    for (const PathOptions& options : paths) {
      const std::vector<Candidate>& before = candidates;
      Candidate path;
      path.index = static_cast<uint32_t>(candidates.size());
      absl::Status status = OpenPath(options, mode, before, path);
      if (status.ok()) status = CheckContent(path, check);
      candidates.push_back(std::move(path));
      if (!status.ok()) return status;
    }
    if (mode == OpenMode::kReclaim) RETURN_IF_ERROR(CheckSpace(candidates));
    if (mode == OpenMode::kInspect) return absl::OkStatus();
    for (Candidate& path : candidates) RETURN_IF_ERROR(Reserve(path, mode, life));
    return absl::OkStatus();
  }
};

}  // namespace

std::unique_ptr<SwapFileSystem> MakePosixSwapFileSystem() {
  return std::make_unique<PosixSwapFileSystem>();
}

}  // namespace forebay::nvme
