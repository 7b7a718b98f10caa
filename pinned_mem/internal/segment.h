// SPDX-License-Identifier: Apache-2.0
// Mapping of a whole memfd, populated with the largest pages that the kernel provides.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinned_mem/numa_placement.h"
#include "pinned_mem/pinned_arena.h"

namespace forebay::pinned_mem::internal {

struct PopulateOptions {
  Placement placement;
  int threads = 1;
  // Counter to which the populated bytes are added; null: no counter.
  std::atomic<uint64_t>* populated_bytes = nullptr;
  // Set to 1 for each piece of 2 MiB of the segment that is one huge page.
  std::span<uint8_t> huge_pieces;
};

// Owns the mapping, not the descriptor.
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

  // Populates every page of `part`: each whole piece of 2 MiB as one huge page if MADV_COLLAPSE succeeds, all other pages as 4
  // KiB pages.
  //
  // Errors  E_DRAM_LIMIT  the kernel has no free page; some pages may be populated.
  absl::Status Populate(const ArenaPart& part, const PopulateOptions& options);

  // Maps every page of a part that has memory, so that no later access faults. Changes no byte.
  //
  // Errors  E_DRAM_LIMIT  the kernel cannot bring a page back from swap.
  absl::Status MapPages(const ArenaPart& part, const PopulateOptions& options);

  // Locks a part. Returns 0, or the errno of mlock(2).
  int Lock(const ArenaPart& part);
  void Unlock(const ArenaPart& part);

  std::span<std::byte> bytes() const { return bytes_; }

 private:
  // Called with the index of a piece of 2 MiB, and the bytes of the piece that are in the part. Returns 0 or an errno.
  using PieceTask = std::function<int(uint64_t index, std::span<std::byte> piece)>;

  // Calls `task` for every piece, on several threads if that saves time.
  absl::Status ForEachPiece(const ArenaPart& part, const PopulateOptions& options,
                            const PieceTask& task);

  explicit Segment(std::span<std::byte> bytes) : bytes_(bytes) {}

  std::span<std::byte> bytes_;
};

}  // namespace forebay::pinned_mem::internal
