// SPDX-License-Identifier: Apache-2.0
#include "daemon/gateway/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"

namespace forebay::gateway {

using protocol::ErrnoText;
using protocol::ErrorId;
using protocol::MakeError;

absl::StatusOr<std::shared_ptr<SharedMemory>> SharedMemory::Map(protocol::UniqueFd file,
                                                                uint64_t size_bytes,
                                                                Access access) {
  struct stat info {};
  if (::fstat(file.get(), &info) != 0 || static_cast<uint64_t>(info.st_size) < size_bytes) {
    return MakeError(ErrorId::kProtocol,
                     absl::StrCat("a memfd of ", info.st_size, " bytes, not ", size_bytes));
  }
  if (size_bytes == 0) return MakeError(ErrorId::kProtocol, "a memfd of no bytes");
  const int protection = access == Access::kRead ? PROT_READ : PROT_READ | PROT_WRITE;
  void* const address = ::mmap(nullptr, size_bytes, protection, MAP_SHARED, file.get(), 0);
  if (address == MAP_FAILED) {
    return MakeError(ErrorId::kLimit, ErrnoText(absl::StrCat("map ", size_bytes, " bytes"), errno));
  }
  return std::shared_ptr<SharedMemory>(
      new SharedMemory(std::move(file), std::span(static_cast<std::byte*>(address), size_bytes)));
}

absl::StatusOr<std::shared_ptr<SharedMemory>> SharedMemory::Create(const char* name,
                                                                   uint64_t size_bytes) {
  protocol::UniqueFd file(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file.valid() || ::ftruncate(file.get(), static_cast<off_t>(size_bytes)) != 0 ||
      ::fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return MakeError(ErrorId::kLimit,
                     ErrnoText(absl::StrCat("make a memfd of ", size_bytes, " bytes"), errno));
  }
  return Map(std::move(file), size_bytes, Access::kReadWrite);
}

uint64_t SharedMemory::inode() const {
  struct stat info {};
  return ::fstat(file_.get(), &info) == 0 ? info.st_ino : 0;
}

SharedMemory::~SharedMemory() { (void)::munmap(bytes_.data(), bytes_.size()); }

}  // namespace forebay::gateway
