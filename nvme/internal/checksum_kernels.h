// SPDX-License-Identifier: Apache-2.0
// XXH3-64 compiled for two instruction sets. Uses plain C types only: no inline function of Forebay may be compiled for the
// wider set.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace forebay::nvme::internal {

inline constexpr size_t kDigestedBytes = 4096;  // protocol::kPageBytes

struct ChecksumKernels {
  // Writes the XXH3-64 of each page to `digests`; the last page may be short. Returns the number of pages.
  size_t (*digest_pages)(const unsigned char* data, size_t size, uint64_t* digests);
  // Returns the XXH3-64 of 32 bytes of identity followed by the digests.
  uint64_t (*of_digests)(const unsigned char* identity, const uint64_t* digests, size_t count);
  // Returns of_digests() of the digests of all pages of `data`.
  uint64_t (*of_bytes)(const unsigned char* identity, const unsigned char* data, size_t size);
};

extern const ChecksumKernels kBaselineChecksum;
#if defined(__x86_64__)
extern const ChecksumKernels kAvx2Checksum;  // call it only on a processor with AVX2
#endif

}  // namespace forebay::nvme::internal
