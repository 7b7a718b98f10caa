// SPDX-License-Identifier: Apache-2.0
// Checksum of swapped data: covers an opaque identity and the digests of all pages. Correct bytes in a wrong place or from an
// old step therefore fail. Each page can be digested separately, in any order, while it is in the cache.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace forebay::nvme {

// Identity of the bytes (for the daemon: job, block, step). nvme does not interpret it.
using Identity = std::array<std::byte, 32>;

// Returns the XXH3-64 of the 32 bytes of `identity` followed by the XXH3-64 of each page of `bytes`, in order, as 8 bytes each,
// little-endian. Pages have protocol::kPageBytes bytes; the last page may be short.
//
// Threads  Pure; call it on a worker while the bytes are warm.
// Exact    Every instruction set gives the same value.
// Limits   About 26 GB/s and more per core; no allocation.
uint64_t Checksum(const Identity& identity, std::span<const std::byte> bytes);

// Returns the Checksum() of data whose pages have these digests, in order.
uint64_t ChecksumOfDigests(const Identity& identity, std::span<const uint64_t> digests);

// Computes Checksum() while the bytes are written: each page is digested as soon as it is final.
//
// Threads  Different pages may be added at once. Checksum() comes after all of them.
// Memory   `bytes` outlive it. Allocates 8 bytes a page once.
class PageDigests {
 public:
  explicit PageDigests(std::span<const std::byte> bytes);

  // Digests pages [begin, end), which must be final. end <= pages(). Add each page once.
  void Add(size_t begin, size_t end);

  // Returns Checksum(identity, bytes). Call it after every page was added.
  uint64_t Checksum(const Identity& identity) const;

  size_t pages() const { return digests_.size(); }
  // Returns the digest of each page; 0 for a page that was not added.
  std::span<const uint64_t> digests() const { return digests_; }

 private:
  std::span<const std::byte> bytes_;
  std::vector<uint64_t> digests_;
};

}  // namespace forebay::nvme
