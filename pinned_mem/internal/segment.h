// A mapping of a whole memfd, populated with the largest pages the kernel gives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace forebay::pinned_mem::internal {

// Owns the mapping, not the descriptor. Immovable inside its owner; unmaps in its destructor.
class Segment {
 public:
  Segment() = default;
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

  // Maps [0, size_bytes) of `fd` writable at an address aligned to 2 MiB; touches no page.
  //
  // Errors  E_INTERNAL  mmap failed.
  static absl::StatusOr<Segment> Map(int fd, uint64_t size_bytes);

  // Gives every page memory: whole 2 MiB pieces by MADV_COLLAPSE where the kernel can, the rest and
  // the tail on 4 KiB pages. Returns the bytes on 2 MiB pages.
  //
  // Errors  E_DRAM_LIMIT  the kernel found no page; some may be populated.
  absl::StatusOr<uint64_t> Populate();

  // 0, or the errno of mlock(2).
  int Lock();

  std::span<std::byte> bytes() const { return bytes_; }

 private:
  explicit Segment(std::span<std::byte> bytes) : bytes_(bytes) {}

  std::span<std::byte> bytes_;
};

}  // namespace forebay::pinned_mem::internal
