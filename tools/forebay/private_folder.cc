// SPDX-License-Identifier: Apache-2.0
#include "tools/forebay/private_folder.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"

namespace forebay::tools {
namespace {

namespace fs = std::filesystem;
using protocol::ErrnoText;
using protocol::ErrorId;
using protocol::MakeError;
using protocol::UniqueFd;

constexpr char kNameStart[] = "forebay-run-";
constexpr char kLockName[] = "lock";
constexpr char kNewLockName[] = "lock.new";

// Returns the first 63 bytes of a small file, or nothing if the file cannot be read.
std::string ContentOf(int fd) {
  std::array<char, 63> text{};
  const ssize_t size = ::pread(fd, text.data(), text.size(), 0);
  return std::string(text.data(), size < 0 ? 0 : static_cast<size_t>(size));
}

std::string BootId() {
  const UniqueFd file(::open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));
  return ContentOf(file.get());
}

// Creates the lock file of a folder. The file is locked before it gets its final name, so no other process sees the name
// unlocked while this process lives.
UniqueFd MakeLock(const fs::path& folder) {
  const fs::path made = folder / kNewLockName;
  const std::string boot = BootId();
  UniqueFd lock(::open(made.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!lock.valid() || ::flock(lock.get(), LOCK_EX | LOCK_NB) != 0 ||
      ::write(lock.get(), boot.data(), boot.size()) != static_cast<ssize_t>(boot.size())) {
    return UniqueFd();
  }
  return ::rename(made.c_str(), (folder / kLockName).c_str()) == 0 ? std::move(lock) : UniqueFd();
}

// Returns true if the folder's process ran on this machine in the current boot and has ended.
bool IsLeft(const fs::path& folder) {
  const UniqueFd directory(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat status {};
  if (!directory.valid() || ::fstat(directory.get(), &status) != 0) return false;
  if (status.st_uid != ::geteuid()) return false;
  const UniqueFd lock(::openat(directory.get(), kLockName, O_RDONLY | O_NOFOLLOW | O_CLOEXEC));
  if (!lock.valid()) return false;
  const std::string boot = BootId();
  return !boot.empty() && ContentOf(lock.get()) == boot &&
         ::flock(lock.get(), LOCK_EX | LOCK_NB) == 0;
}

void RemoveLeftFolders(const fs::path& parent) {
  std::vector<fs::path> left;
  std::error_code error;
  for (fs::directory_iterator at(parent, error), end; !error && at != end; at.increment(error)) {
    const bool is_ours = at->path().filename().string().starts_with(kNameStart);
    if (is_ours && IsLeft(at->path())) left.push_back(at->path());
  }
  for (const fs::path& folder : left) fs::remove_all(folder, error);
}

}  // namespace

PrivateFolder::PrivateFolder(fs::path path)
    : path_(std::make_unique<fs::path>(std::move(path))), lock_(MakeLock(*path_)) {}

PrivateFolder::~PrivateFolder() {
  if (path_ == nullptr) return;
  std::error_code ignored;
  fs::remove_all(*path_, ignored);
}

absl::StatusOr<PrivateFolder> PrivateFolder::Create(const fs::path& parent) {
  RemoveLeftFolders(parent);
  std::string pattern = (parent / absl::StrCat(kNameStart, "XXXXXX")).string();
  if (::mkdtemp(pattern.data()) == nullptr) {  // mode 0700
    return MakeError(ErrorId::kOption,
                     ErrnoText(absl::StrCat("make a folder in ", parent.string()), errno));
  }
  return PrivateFolder(pattern);
}

}  // namespace forebay::tools
