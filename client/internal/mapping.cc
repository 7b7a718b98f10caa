// SPDX-License-Identifier: Apache-2.0
#include "client/internal/mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/units.h"

namespace forebay::client::internal {
namespace {

using protocol::ErrnoText;
using protocol::ErrorId;
using protocol::kHugePageBytes;
using protocol::MakeError;

absl::Status NoAddressSpace(uint64_t size_bytes, int error_number) {
  return MakeError(ErrorId::kLimit,
                   ErrnoText(absl::StrCat("mmap of ", size_bytes, " bytes"), error_number),
                   "raise the limit of address space (ulimit -v)");
}

}  // namespace

absl::StatusOr<std::shared_ptr<Mapping>> Mapping::MapFile(int fd, uint64_t size_bytes,
                                                          MapAccess access) {
  struct stat info {};
  if (::fstat(fd, &info) != 0 || info.st_size < 0 ||
      static_cast<uint64_t>(info.st_size) < size_bytes || size_bytes == 0) {
    return MakeError(
        ErrorId::kProtocol,
        absl::StrCat("the shared memory that the daemon sent has ", info.st_size,
                     " bytes, but its reply says ", size_bytes),
        "daemon and client are of different builds: restart forebayd, then attach again");
  }
  // A file that shrank under the mapping would kill this process with SIGBUS.
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return MakeError(
        ErrorId::kProtocol,
        "the shared memory that the daemon sent is not sealed against shrinking",
        "daemon and client are of different builds: restart forebayd, then attach again");
  }
  // Reserves enough to begin on a 2 MiB border, then maps the file over the middle of it.
  const uint64_t reserve_bytes = size_bytes + kHugePageBytes;
  void* reserved =
      ::mmap(nullptr, reserve_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return NoAddressSpace(reserve_bytes, errno);
  const auto begin = reinterpret_cast<uintptr_t>(reserved);
  const uintptr_t aligned = protocol::RoundUp(begin, kHugePageBytes);
  const int protection = access == MapAccess::kRead ? PROT_READ : PROT_READ | PROT_WRITE;
  void* mapped = ::mmap(reinterpret_cast<void*>(aligned), size_bytes, protection,
                        MAP_SHARED | MAP_FIXED, fd, 0);
  if (mapped == MAP_FAILED) {
    const int error_number = errno;
    ::munmap(reserved, reserve_bytes);
    return NoAddressSpace(size_bytes, error_number);
  }
  const uintptr_t end = protocol::RoundUp(aligned + size_bytes, protocol::kPageBytes);
  if (aligned > begin) ::munmap(reserved, aligned - begin);
  if (begin + reserve_bytes > end) {
    ::munmap(reinterpret_cast<void*>(end), begin + reserve_bytes - end);
  }
  return std::make_shared<Mapping>(static_cast<std::byte*>(mapped), size_bytes);
}

absl::StatusOr<std::shared_ptr<Mapping>> Mapping::MapPrivate(uint64_t size_bytes) {
  void* mapped =
      ::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return NoAddressSpace(size_bytes, errno);
  return std::make_shared<Mapping>(static_cast<std::byte*>(mapped), size_bytes);
}

void Mapping::MakeReadOnly() { FOREBAY_CHECK(::mprotect(address_, size_bytes_, PROT_READ) == 0); }

Mapping::~Mapping() { ::munmap(address_, size_bytes_); }

}  // namespace forebay::client::internal
