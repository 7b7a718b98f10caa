// SPDX-License-Identifier: Apache-2.0
#include "pinned_mem/internal/huge_pages.h"

#include <fcntl.h>
#include <sys/ioctl.h>

#include <array>
#include <cerrno>

#include "protocol/os/unique_fd.h"
#include "protocol/units.h"

namespace forebay::pinned_mem::internal {
namespace {

using protocol::kHugePageBytes;

// linux/fs.h of 6.7; older headers do not have them.
constexpr uint64_t kPageIsHuge = uint64_t{1} << 6;

struct PageRegion {
  uint64_t start;
  uint64_t end;
  uint64_t categories;
};
static_assert(sizeof(PageRegion) == 24);

struct ScanArguments {
  uint64_t size = sizeof(ScanArguments);
  uint64_t flags = 0;
  uint64_t start = 0;
  uint64_t end = 0;
  uint64_t walk_end = 0;  // address at which the kernel's walk ended
  uint64_t regions = 0;   // address
  uint64_t regions_max = 0;
  uint64_t pages_max = 0;
  uint64_t category_inverted = 0;
  uint64_t category_mask = 0;
  uint64_t category_anyof_mask = 0;
  uint64_t return_mask = 0;
};
static_assert(sizeof(ScanArguments) == 96);

constexpr unsigned long kPagemapScan = _IOWR('f', 16, ScanArguments);

}  // namespace

void MarkHugePieces(std::span<const std::byte> segment, const ArenaPart& part,
                    std::span<uint8_t> huge_pieces) {
  const protocol::UniqueFd pagemap(open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
  if (!pagemap.valid()) return;
  const auto base = reinterpret_cast<uintptr_t>(segment.data());
  std::array<PageRegion, 64> regions{};
  ScanArguments scan{.start = base + part.offset_bytes,
                     .end = base + part.offset_bytes + part.size_bytes,
                     .regions = reinterpret_cast<uintptr_t>(regions.data()),
                     .regions_max = regions.size(),
                     .category_mask = kPageIsHuge,
                     .return_mask = kPageIsHuge};
  while (scan.start < scan.end) {
    const int found = ioctl(pagemap.get(), kPagemapScan, &scan);
    if (found < 0 && errno == EINTR) continue;
    if (found < 0 || scan.walk_end <= scan.start) return;
    for (const PageRegion& region : std::span(regions).first(static_cast<size_t>(found))) {
      const uint64_t first = (region.start - base + kHugePageBytes - 1) / kHugePageBytes;
      const uint64_t end = (region.end - base) / kHugePageBytes;
      for (uint64_t piece = first; piece < end; ++piece) huge_pieces[piece] = 1;
    }
    scan.start = scan.walk_end;
  }
}

}  // namespace forebay::pinned_mem::internal
