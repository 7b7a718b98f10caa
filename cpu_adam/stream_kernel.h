// The passes around an update: over gradients, and between the types of a master. No allocation, no
// threads, no I/O, no errors.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu_adam/gradient.h"

namespace forebay::cpu_adam {

// Elements of one chunk of a sum of squares; all chunks but the last are whole.
inline constexpr size_t kSumChunkElems = 4096;
inline constexpr size_t kSumLanes = 32;

// Writes one sum of squares, in double, for each of the ceil(n / kSumChunkElems) chunks. Lane j of
// a chunk adds the squares of its elements j, j + 32, j + 64, … in this order (each square is
// exact); then lane j adds lane j + 16, then j + 8, 4, 2, 1. A sum is finite if and only if every
// element of its chunk is. square_sum.h joins chunks to a total that does not depend on their
// order.
void ChunkSquareSums(size_t n, Gradient g, double* chunk_sums);

// dst[i] = src[i] in the type of src, and the sums of ChunkSquareSums of what was written: each
// element is read once, so that the sums are those of dst whatever another process writes to src
// meanwhile. The stores bypass the cache where dst is aligned to 64 bytes, and are visible to other
// threads after any later release by this one.
void CopyWithSquareSums(size_t n, Gradient src, void* dst, double* chunk_sums);

bool AllFinite(size_t n, Gradient g);  // true for n = 0

enum class AddMode : uint8_t { kSet = 1, kAdd = 2 };

// dst[i] = src[i] (kSet: the first rank) or dst[i] + src[i] (kAdd), in float32.
void AddGradient(size_t n, Gradient src, AddMode mode, float* dst);

// dst = src as bfloat16, to nearest, ties away from zero: the rounding of `exact`.
void RoundToBf16(size_t n, const float* src, uint16_t* dst);
void WidenBf16(size_t n, const uint16_t* src, float* dst);

// Masters to and from the two planes of `exact`, with any bits, NaN included.
void SplitMaster(size_t n, const float* w, uint16_t* param, int16_t* remainder);
void JoinMaster(size_t n, const uint16_t* param, const int16_t* remainder, float* w);

}  // namespace forebay::cpu_adam
