// SPDX-License-Identifier: Apache-2.0
#include "pinned_mem/internal/segment.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "pinned_mem/internal/huge_pages.h"
#include "pinned_mem/internal/numa_policy.h"
#include "pinned_mem/memory_limit.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22  // asm-generic/mman-common.h, 5.14
#endif
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

// Least number of pieces for each thread. With fewer pieces a further thread costs more time than it saves.
constexpr uint64_t kPiecesPerThread = 16;

// Populates 4 KiB pages. Touches the pages itself if the kernel is older than 5.14 (EINVAL). Returns 0 or an errno.
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

// Maps pages that have memory. Touches the pages itself if the kernel is older than 5.14 (EINVAL). Returns 0 or an errno.
int MapSmall(const std::byte* begin, uint64_t size_bytes) {
  auto* const address = const_cast<std::byte*>(begin);  // madvise(2) takes no const
  while (madvise(address, size_bytes, MADV_POPULATE_READ) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno != EINVAL) return errno;
    for (uint64_t at = 0; at < size_bytes; at += kPageBytes) {
      (void)*static_cast<const volatile std::byte*>(begin + at);
    }
    return 0;
  }
  return 0;
}

struct Populated {
  bool huge = false;
  int error_number = 0;
};

// Populates a piece of at most 2 MiB: as one huge page if the kernel allows it, otherwise as 4 KiB pages.
Populated PopulatePiece(std::span<std::byte> piece) {
  Populated populated;
  if (piece.size() == kHugePageBytes) {
    // A piece without any page cannot be collapsed (EINVAL): populates one page first.
    populated.error_number = PopulateSmall(piece.data(), kPageBytes);
    populated.huge =
        populated.error_number == 0 && madvise(piece.data(), kHugePageBytes, MADV_COLLAPSE) == 0;
  }
  if (!populated.huge && populated.error_number == 0) {
    populated.error_number = PopulateSmall(piece.data(), piece.size());
  }
  return populated;
}

}  // namespace

absl::StatusOr<Segment> Segment::Map(int fd, uint64_t size_bytes) {
  // Reserves enough for any alignment, maps the segment over the middle, unmaps the margins.
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
  // Excludes the segment from core dumps, because it holds parameters of jobs.
  (void)madvise(begin, size_bytes, MADV_DONTDUMP);
  return Segment({begin, size_bytes});
}

absl::Status Segment::Populate(const ArenaPart& part, const PopulateOptions& options) {
  RETURN_IF_ERROR(
      ForEachPiece(part, options, [&options](uint64_t index, std::span<std::byte> piece) {
        const Populated populated = PopulatePiece(piece);
        if (populated.huge) options.huge_pieces[index] = 1;
        return populated.error_number;
      }));
  KeepOnNodes(bytes_.subspan(part.offset_bytes, part.size_bytes), options.placement);
  return absl::OkStatus();
}

absl::Status Segment::MapPages(const ArenaPart& part, const PopulateOptions& options) {
  RETURN_IF_ERROR(ForEachPiece(part, options, [](uint64_t, std::span<std::byte> piece) {
    return MapSmall(piece.data(), piece.size());
  }));
  const std::span<std::byte> bytes = bytes_.subspan(part.offset_bytes, part.size_bytes);
  KeepOnNodes(bytes, options.placement);
  MarkHugePieces(bytes_, part, options.huge_pieces);
  return absl::OkStatus();
}

absl::Status Segment::ForEachPiece(const ArenaPart& part, const PopulateOptions& options,
                                   const PieceTask& task) {
  const uint64_t part_end = part.offset_bytes + part.size_bytes;
  const uint64_t first = part.offset_bytes / kHugePageBytes;
  const uint64_t pieces = (part_end + kHugePageBytes - 1) / kHugePageBytes - first;
  std::atomic<uint64_t> next = first;
  std::atomic<int> error_number = 0;
  const auto populate = [&] {
    PreferredNode preferred;
    while (error_number.load(std::memory_order_relaxed) == 0) {
      const uint64_t index = next.fetch_add(1, std::memory_order_relaxed);
      const uint64_t begin = std::max(index * kHugePageBytes, part.offset_bytes);
      if (begin >= part_end) return;
      const auto piece =
          bytes_.subspan(begin, std::min((index + 1) * kHugePageBytes, part_end) - begin);
      preferred.Set(options.placement.NodeAt(begin + piece.size() / 2));
      const int error = task(index, piece);
      if (error != 0) error_number = error;
      if (options.populated_bytes != nullptr) *options.populated_bytes += piece.size();
    }
  };
  const uint64_t threads =
      std::clamp<uint64_t>(pieces / kPiecesPerThread, 1, static_cast<uint64_t>(options.threads));
  if (threads == 1) {
    populate();
  } else {
    std::vector<std::thread> running;
    try {
      for (uint64_t i = 0; i < threads; ++i) running.emplace_back(populate);
    } catch (const std::system_error& error) {
      if (running.empty()) populate();  // no thread could be started: works on this thread
    }
    for (std::thread& thread : running) thread.join();
  }
  if (error_number != 0) {
    return MakeError(
        ErrorId::kDramLimit,
        absl::StrCat(ErrnoText(absl::StrCat("no memory for all of ", FormatBytes(part.size_bytes)),
                               error_number),
                     "; now available: ", FormatBytes(AvailableBytes())),
        "free memory on this node, or ask for less");
  }
  return absl::OkStatus();
}

// Calls the system call, because the sanitizers replace mlock() by a function that does nothing and reports success.
int Segment::Lock(const ArenaPart& part) {
  return syscall(SYS_mlock, bytes_.data() + part.offset_bytes, part.size_bytes) == 0 ? 0 : errno;
}

void Segment::Unlock(const ArenaPart& part) {
  (void)syscall(SYS_munlock, bytes_.data() + part.offset_bytes, part.size_bytes);
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
