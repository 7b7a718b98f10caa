// SPDX-License-Identifier: Apache-2.0
// A mapping of a whole memfd, populated with the largest pages the kernel gives.
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
  // Grows as pages get memory; may be null.
  std::atomic<uint64_t>* populated_bytes = nullptr;
  // By piece of 2 MiB of the segment: set to 1 where the piece is one huge page.
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

  // Populates every page of `part`: each whole 2 MiB piece as one huge page if MADV_COLLAPSE succeeds,
  // everything else as 4 KiB pages.
  //
  // Errors  E_DRAM_LIMIT  the kernel found no page; some may be populated.
  absl::Status Populate(const ArenaPart& part, const PopulateOptions& options);

  // Maps every page of a part that has memory already, so that no use of it faults; changes no byte.
  //
  // Errors  E_DRAM_LIMIT  the kernel cannot bring a page back from swap.
  absl::Status MapPages(const ArenaPart& part, const PopulateOptions& options);

  // 0, or the errno of mlock(2).
  int Lock(const ArenaPart& part);
  void Unlock(const ArenaPart& part);

  std::span<std::byte> bytes() const { return bytes_; }

 private:
  // The index of a piece of 2 MiB, and its bytes of the part; 0 or an errno.
  using PieceTask = std::function<int(uint64_t index, std::span<std::byte> piece)>;

  // Calls `task` for every piece, on threads where that saves time.
  absl::Status ForEachPiece(const ArenaPart& part, const PopulateOptions& options,
                            const PieceTask& task);

  explicit Segment(std::span<std::byte> bytes) : bytes_(bytes) {}

  std::span<std::byte> bytes_;
};

}  // namespace forebay::pinned_mem::internal
