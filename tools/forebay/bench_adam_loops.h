// SPDX-License-Identifier: Apache-2.0
// Loops that measure the memory limit for `forebay bench adam`, compiled for several instruction sets. This header uses only
// plain C types, so that no inline function of Forebay is compiled for the wider sets.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace forebay::tools::loops {

inline constexpr size_t kLineBytes = 64;
inline constexpr size_t kStepElems = 64;     // elements of one array before the next array's turn
inline constexpr size_t kChunkElems = 2048;  // a loop goes over whole chunks
inline constexpr size_t kStreamsMax = 16;

struct Stream {
  const unsigned char* from;  // null: the stream is only written
  unsigned char* to;          // null: the stream is only read; equal to `from`: in place
  size_t step_lines;          // 1, 2, 4: lines in kStepElems elements; 0: one line in a chunk
};

// Reads and writes each line of each stream once. If `zero` is 0, the written values equal the read ones, and streams that
// are only written get zeros. The values depend on all read bytes, so that no read is optimized away. Returns a digest of
// the streams that are only read.
using LoopFn = uint64_t(const Stream* streams, size_t count, size_t chunks, uint64_t zero);

struct Loops {
  const char* name;
  LoopFn* plain;
  LoopFn* non_temporal;  // stores are non-temporal if the instruction set has such stores
};

extern const Loops kBaseline;
#if defined(__x86_64__)
extern const Loops kAvx2;
extern const Loops kAvx512;
#endif

}  // namespace forebay::tools::loops
