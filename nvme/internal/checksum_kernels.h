// The same hash compiled for two instruction sets. Plain C types alone: no inline function of ours
// may be compiled for the wider set.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace forebay::nvme::internal {

// XXH3-64 of 32 bytes of identity, then `size` bytes of data.
using ChecksumFn = uint64_t(const unsigned char* identity, const unsigned char* data, size_t size);

ChecksumFn ChecksumBaseline;
#if defined(__x86_64__)
ChecksumFn ChecksumAvx2;  // only where the processor has AVX2
#endif

}  // namespace forebay::nvme::internal
