// SPDX-License-Identifier: Apache-2.0
#include "daemon/instance_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"

namespace forebay::daemon {
namespace {

using protocol::ErrorId;
using protocol::MakeError;
using protocol::UniqueFd;

// A lock file may be removed between open and lock.
constexpr int kTriesMax = 16;
constexpr int kBacklog = 128;

absl::Status Failed(const std::string& what) {
  return MakeError(ErrorId::kConfig, protocol::ErrnoText(what, errno),
                   "socket.path must lie in a directory that this user may write");
}

std::string HolderOf(int fd) {
  std::array<char, 32> text{};
  const ssize_t got = ::pread(fd, text.data(), text.size() - 1, 0);
  const std::string pid(text.data(), got > 0 ? static_cast<size_t>(got) : 0);
  return pid.substr(0, pid.find('\n'));
}

bool IsNamed(const std::string& path, dev_t device, ino_t inode) {
  struct stat named = {};
  return ::lstat(path.c_str(), &named) == 0 && named.st_dev == device && named.st_ino == inode;
}

bool IsStillNamed(const std::string& path, int fd) {
  struct stat opened = {};
  return ::fstat(fd, &opened) == 0 && IsNamed(path, opened.st_dev, opened.st_ino);
}

}  // namespace

InstanceLock::InstanceLock(std::string path, UniqueFd fd)
    : path_(std::move(path)), fd_(std::move(fd)) {}

InstanceLock::~InstanceLock() {
  if (IsStillNamed(path_, fd_.get())) ::unlink(path_.c_str());
}

absl::StatusOr<std::unique_ptr<InstanceLock>> InstanceLock::Acquire(
    const std::string& socket_path) {
  const std::string path = absl::StrCat(socket_path, ".lock");
  for (int i = 0; i < kTriesMax; ++i) {
    UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644));
    if (!fd.valid()) return Failed(absl::StrCat("open ", path));
    // The lock belongs to the open file, not to the process: it also holds between two daemons of one process.
    struct flock lock = {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    if (::fcntl(fd.get(), F_OFD_SETLK, &lock) != 0) {
      return MakeError(
          ErrorId::kBusy,
          absl::StrCat("daemon ", HolderOf(fd.get()), " already listens on ", socket_path),
          "stop it, or give this one another socket.path");
    }
    if (!IsStillNamed(path, fd.get())) continue;  // the last holder has removed the file: try again
    const std::string pid = absl::StrCat(::getpid(), "\n");
    if (::ftruncate(fd.get(), 0) != 0 || ::pwrite(fd.get(), pid.data(), pid.size(), 0) < 0) {
      return Failed(absl::StrCat("write ", path));
    }
    return std::unique_ptr<InstanceLock>(new InstanceLock(path, std::move(fd)));
  }
  return MakeError(
      ErrorId::kBusy,
      absl::StrCat("cannot lock ", path, ": other daemons made and removed it ", kTriesMax,
                   " times"),
      "another forebayd with this socket.path restarts again and again: stop it, then retry");
}

ListeningSocket::ListeningSocket(std::string path, UniqueFd fd, const struct stat& bound)
    : path_(std::move(path)), fd_(std::move(fd)), device_(bound.st_dev), inode_(bound.st_ino) {}

ListeningSocket::~ListeningSocket() {
  if (IsNamed(path_, device_, inode_)) ::unlink(path_.c_str());
}

absl::StatusOr<std::unique_ptr<ListeningSocket>> ListeningSocket::Create(const std::string& path,
                                                                         unsigned mode) {
  struct stat there = {};
  if (::lstat(path.c_str(), &there) == 0 && !S_ISSOCK(there.st_mode)) {
    return MakeError(ErrorId::kConfig, absl::StrCat(path, " exists and is not a socket"),
                     "give socket.path a name that is free");
  }
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  // Temporary name until the permissions are set.
  const std::string unready = absl::StrCat(path, ".new");
  if (unready.size() >= sizeof(address.sun_path)) {
    return MakeError(ErrorId::kConfig,
                     absl::StrCat("socket.path has ", path.size(), " bytes (at most ",
                                  sizeof(address.sun_path) - 5, "): ", path),
                     "choose a shorter path");
  }
  std::memcpy(address.sun_path, unready.data(), unready.size());
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return Failed("socket");
  ::unlink(unready.c_str());
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return Failed(absl::StrCat("bind ", unready));
  }
  struct stat bound = {};
  if (::chmod(unready.c_str(), mode) != 0 || ::lstat(unready.c_str(), &bound) != 0 ||
      ::listen(fd.get(), kBacklog) != 0 || ::rename(unready.c_str(), path.c_str()) != 0) {
    const absl::Status status = Failed(absl::StrCat("listen at ", path));
    ::unlink(unready.c_str());
    return status;
  }
  return std::unique_ptr<ListeningSocket>(new ListeningSocket(path, std::move(fd), bound));
}

}  // namespace forebay::daemon
