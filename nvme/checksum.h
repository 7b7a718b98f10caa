// The checksum of swapped data: XXH3 of an opaque identity followed by the bytes, so that right
// bytes in a wrong place or from an old step fail too.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace forebay::nvme {

// Says whose bytes these are (for the daemon: job, block, step); nvme never looks inside.
using Identity = std::array<std::byte, 32>;

// XXH3-64 of the 32 bytes of `identity` followed by `bytes`.
//
// Threads  Pure; call it on a worker while the bytes are warm.
// Exact    Every instruction set gives the same value.
// Limits   About 26 GB/s and more per core; no allocation.
uint64_t Checksum(const Identity& identity, std::span<const std::byte> bytes);

}  // namespace forebay::nvme
