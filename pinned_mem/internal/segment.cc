#include "pinned_mem/internal/segment.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "pinned_mem/memory_limit.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/units.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // asm-generic/mman-common.h, 5.14
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // 6.1
#endif

namespace forebay::pinned_mem::internal {
namespace {

using protocol::ErrnoText;
using protocol::ErrorId;
using protocol::FormatBytes;
using protocol::kHugePageBytes;
using protocol::kPageBytes;
using protocol::MakeError;

// Populates pages for which no 2 MiB page was to be had; EINVAL: a kernel before 5.14, so touch
// them.
int PopulateSmall(std::byte* begin, uint64_t size_bytes) {
  while (madvise(begin, size_bytes, MADV_POPULATE_WRITE) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno != EINVAL) return errno;
    for (uint64_t at = 0; at < size_bytes; at += kPageBytes) {
      *static_cast<volatile std::byte*>(begin + at) = std::byte{0};
    }
    return 0;
  }
  return 0;
}

}  // namespace

absl::StatusOr<Segment> Segment::Map(int fd, uint64_t size_bytes) {
  // Room for any alignment, the segment over its middle, the margins given back.
  const uint64_t room_bytes = size_bytes + kHugePageBytes;
  void* const room =
      mmap(nullptr, room_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) {
    return MakeError(ErrorId::kInternal,
                     ErrnoText(absl::StrCat("mmap of ", room_bytes, " bytes of addresses"), errno));
  }
  auto* const room_begin = static_cast<std::byte*>(room);
  const uint64_t lead = -reinterpret_cast<uintptr_t>(room) % kHugePageBytes;
  std::byte* const begin = room_begin + lead;
  const void* const mapped =
      mmap(begin, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
  if (mapped == MAP_FAILED) {
    const int error_number = errno;
    munmap(room, room_bytes);
    return MakeError(ErrorId::kInternal,
                     ErrnoText(absl::StrCat("mmap of ", size_bytes, " bytes"), error_number));
  }
  if (lead > 0) munmap(room_begin, lead);
  if (lead < kHugePageBytes) munmap(begin + size_bytes, kHugePageBytes - lead);
  // Parameters of a job are no business of a core file.
  (void)madvise(begin, size_bytes, MADV_DONTDUMP);
  return Segment({begin, size_bytes});
}

absl::StatusOr<uint64_t> Segment::Populate() {
  uint64_t huge_bytes = 0;
  for (uint64_t at = 0; at < bytes_.size(); at += kHugePageBytes) {
    std::byte* const piece = bytes_.data() + at;
    const uint64_t piece_bytes = std::min(kHugePageBytes, bytes_.size() - at);
    int error_number = 0;
    if (piece_bytes == kHugePageBytes) {
      // A piece with no page at all cannot be collapsed (EINVAL): touch one first.
      error_number = PopulateSmall(piece, kPageBytes);
      if (error_number == 0 && madvise(piece, kHugePageBytes, MADV_COLLAPSE) == 0) {
        huge_bytes += kHugePageBytes;
        continue;
      }
    }
    if (error_number == 0) error_number = PopulateSmall(piece, piece_bytes);
    if (error_number != 0) {
      return MakeError(
          ErrorId::kDramLimit,
          absl::StrCat(ErrnoText(absl::StrCat("no memory for byte ", at, " of ", bytes_.size()),
                                 error_number),
                       "; now available: ", FormatBytes(AvailableBytes())),
          "free memory on this node, or ask for less");
    }
  }
  return huge_bytes;
}

int Segment::Lock() {
  // Not mlock(): the sanitizers replace it by a function that does nothing and reports success.
  return syscall(SYS_mlock, bytes_.data(), bytes_.size()) == 0 ? 0 : errno;
}

Segment::Segment(Segment&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}

Segment& Segment::operator=(Segment&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  return *this;
}

Segment::~Segment() {
  if (!bytes_.empty()) FOREBAY_CHECK(munmap(bytes_.data(), bytes_.size()) == 0);
}

}  // namespace forebay::pinned_mem::internal
