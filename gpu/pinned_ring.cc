// SPDX-License-Identifier: Apache-2.0
#include "gpu/pinned_ring.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/os/status_macros.h"

namespace forebay::gpu {

absl::StatusOr<std::unique_ptr<PinnedRing>> PinnedRing::Create(Device& device) {
  constexpr size_t kBytes = kSlots * kSlotBytes;
  void* const mapped = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (mapped == MAP_FAILED) {
    return protocol::MakeError(
        protocol::ErrorId::kLimit,
        protocol::ErrnoText(absl::StrCat("mmap of ", kBytes, " bytes"), errno));
  }
  std::unique_ptr<PinnedRing> ring(
      new PinnedRing(std::span(static_cast<std::byte*>(mapped), kBytes)));
  ASSIGN_OR_RETURN(ring->registration_, device.Register(ring->bytes_, HostAccess::kReadWrite));
  return ring;
}

PinnedRing::~PinnedRing() {
  registration_.reset();
  ::munmap(bytes_.data(), bytes_.size());
}

absl::StatusOr<size_t> PinnedRing::Begin(Stream& stream, std::span<std::byte> to,
                                         std::span<const std::byte> from) {
  FOREBAY_CHECK(to.size() == from.size());
  size_t begun = 0;
  while (begun < from.size()) {
    if (copied_[next_] != nullptr) {
      ASSIGN_OR_RETURN(const bool is_free, copied_[next_]->Done());
      if (!is_free) return begun;
      copied_[next_].reset();
    }
    const size_t bytes = std::min(kSlotBytes, from.size() - begun);
    const std::span<std::byte> slot = bytes_.subspan(next_ * kSlotBytes, bytes);
    std::memcpy(slot.data(), from.data() + begun, bytes);
    RETURN_IF_ERROR(stream.Copy(to.subspan(begun, bytes), slot));
    ASSIGN_OR_RETURN(copied_[next_], stream.Record());
    next_ = (next_ + 1) % kSlots;
    begun += bytes;
  }
  return begun;
}

}  // namespace forebay::gpu
