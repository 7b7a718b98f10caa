// SPDX-License-Identifier: Apache-2.0
// The loops that `forebay bench adam` takes for the memory limit, compiled for several instruction
// sets. Plain C types alone: no inline function of ours may be compiled for the wider sets.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace forebay::tools::loops {

inline constexpr size_t kLineBytes = 64;
inline constexpr size_t kStepElems = 64;     // all streams advance by this, one behind the other
inline constexpr size_t kChunkElems = 2048;  // a loop goes over whole chunks
inline constexpr size_t kStreamsMax = 16;

struct Stream {
  const unsigned char* from;  // null: the stream is written alone
  unsigned char* to;          // null: it is read alone; from: in place
  size_t step_lines;          // 1, 2, 4: lines in kStepElems elements; 0: one line in a chunk
};

// Reads and writes each line of each stream once. What is written equals what was read (a stream
// that is written alone gets zeros) where `zero` is 0: the values must depend on all that is read.
// Returns a digest of what was read alone.
using LoopFn = uint64_t(const Stream* streams, size_t count, size_t chunks, uint64_t zero);

struct Loops {
  const char* name;
  LoopFn* plain;
  LoopFn* non_temporal;  // stores that go past the cache; plain ones where the set has none
};

extern const Loops kBaseline;
#if defined(__x86_64__)
extern const Loops kAvx2;
extern const Loops kAvx512;
#endif

}  // namespace forebay::tools::loops
