// SPDX-License-Identifier: Apache-2.0
// The checksum of swapped data: an opaque identity and the digests of all pages, so that right
// bytes in a wrong place or from an old step fail too, and each page can be digested while it is
// warm, in any order.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace forebay::nvme {

// Says whose bytes these are (for the daemon: job, block, step); nvme never looks inside.
using Identity = std::array<std::byte, 32>;

// XXH3-64 of the 32 bytes of `identity` followed by the XXH3-64 of each page of `bytes`, in order,
// as 8 bytes each, little-endian. Pages are protocol::kPageBytes; the last may be short.
//
// Threads  Pure; call it on a worker while the bytes are warm.
// Exact    Every instruction set gives the same value.
// Limits   About 26 GB/s and more per core; no allocation.
uint64_t Checksum(const Identity& identity, std::span<const std::byte> bytes);

// Checksum of the same data from the digests of all its pages, in order.
uint64_t ChecksumOfDigests(const Identity& identity, std::span<const uint64_t> digests);

// Computes Checksum() while the bytes are made: each page is digested as soon as it is final.
//
// Threads  Different pages may be added at once. Checksum() comes after all of them.
// Memory   `bytes` outlive it. Allocates 8 bytes a page once.
class PageDigests {
 public:
  explicit PageDigests(std::span<const std::byte> bytes);

  // Pages [begin, end), end <= pages(), are final. Each is added once.
  void Add(size_t begin, size_t end);

  // Checksum(identity, bytes), when every page has been added.
  uint64_t Checksum(const Identity& identity) const;

  size_t pages() const { return digests_.size(); }
  // Digest of each page; 0 for a page that has not been added.
  std::span<const uint64_t> digests() const { return digests_; }

 private:
  std::span<const std::byte> bytes_;
  std::vector<uint64_t> digests_;
};

}  // namespace forebay::nvme
