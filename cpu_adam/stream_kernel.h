// SPDX-License-Identifier: Apache-2.0
// The passes over gradients around an update. No allocation, no threads, no I/O, no errors.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu_adam/gradient.h"

namespace forebay::cpu_adam {

// Elements of one chunk of a sum of squares; all chunks but the last are whole. A chunk is summed
// in runs, the last of which may be short, and a run in lanes.
inline constexpr size_t kSumChunkElems = 4096;
inline constexpr size_t kSumRunElems = 512;
inline constexpr size_t kSumLanes = 32;

// Between these bounds the sum of a chunk is the one computed in float32.
inline constexpr double kFloatSumMin = 0x1p-100, kFloatSumMax = 0x1p100;

// Writes one sum of squares, in double, for each of the ceil(n / kSumChunkElems) chunks. The sum of a chunk depends on the
// elements of the chunk alone:
//
//   lane j of a run, from 0 on: in float32, lane = fma(g, g, lane) for its elements j, j + 32, …
//   in double, lane j adds lane j + 16, then j + 8; the 8 results are added to those of the runs
//   before; at the end result j adds result j + 4, then 2, 1.
//
// If this is not from kFloatSumMin to kFloatSumMax (overflow, underflow, zero, NaN), the chunk is
// summed again: in double, lane j adds the squares of elements j, j + 32, … of the chunk (each
// square is exact); then lane j adds lane j + 16, then j + 8, 4, 2, 1.
//
// A sum is finite if and only if every element of its chunk is. Its relative error is at most
// 1.001·2⁻²⁰: 16 roundings of 2⁻²⁴ each in a lane, where all terms have one sign; those in double
// and what is lost below 2⁻¹²⁶, 4096·2⁻¹⁵⁰ beside 2⁻¹⁰⁰, come to less than 2⁻³⁷. square_sum.h joins
// chunks to a total that does not depend on their order.
void ChunkSquareSums(size_t n, Gradient g, double* chunk_sums);

// Copies dst[i] = src[i] in the type of src, and writes the sums of ChunkSquareSums of dst. Each element is read once, so the
// sums are those of dst even if another process writes to src meanwhile. The stores are non-temporal if dst is aligned to 64
// bytes, and are visible to other threads after any later release by this thread.
void CopyWithSquareSums(size_t n, Gradient src, void* dst, double* chunk_sums);

bool AllFinite(size_t n, Gradient g);  // true for n = 0

enum class AddMode : uint8_t { kSet = 1, kAdd = 2 };

// dst[i] = src[i] (kSet) or dst[i] + src[i] (kAdd), in float32.
void AddGradient(size_t n, Gradient src, AddMode mode, float* dst);

// dst[i] = src[0][i] + src[1][i] + … + src[count - 1][i], in float32 and in this order; kAdd begins
// with dst[i]. Writes the sums of ChunkSquareSums of dst too. Every source is read once and dst is
// written once, past the cache where it is aligned to 64 bytes: with 8 sources of 16 bits and kSet
// that are 20 bytes of memory an element.
//
// Shapes   count > 0; chunk_sums has one element for each chunk that has begun.
void AddGradients(size_t n, const Gradient* src, size_t count, AddMode mode, float* dst,
                  double* chunk_sums);

}  // namespace forebay::cpu_adam
