// SPDX-License-Identifier: Apache-2.0
// XXH3-64 compiled for two instruction sets. Uses plain C types only: no inline function of Forebay may be compiled for the
// wider set.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace forebay::nvme::internal {

inline constexpr size_t kDigestedBytes = 4096;  // protocol::kPageBytes

struct ChecksumKernels {
  // XXH3-64 of each page, the last of which may be short; returns how many.
  size_t (*digest_pages)(const unsigned char* data, size_t size, uint64_t* digests);
  // XXH3-64 of 32 bytes of identity, then of the digests.
  uint64_t (*of_digests)(const unsigned char* identity, const uint64_t* digests, size_t count);
  // The two in one.
  uint64_t (*of_bytes)(const unsigned char* identity, const unsigned char* data, size_t size);
};

extern const ChecksumKernels kBaselineChecksum;
#if defined(__x86_64__)
extern const ChecksumKernels kAvx2Checksum;  // only where the processor has AVX2
#endif

}  // namespace forebay::nvme::internal
