// SPDX-License-Identifier: Apache-2.0
// The definition of the streaming passes, one element at a time.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "cpu_adam/internal/kernel_table.h"
#include "protocol/float16.h"

namespace forebay::cpu_adam::internal {
namespace {

float Widen(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

float LoadGrad(Gradient g, size_t i) {
  if (g.type == DType::kFloat32) return static_cast<const float*>(g.data)[i];
  const uint16_t bits = static_cast<const uint16_t*>(g.data)[i];
  return g.type == DType::kFloat16 ? protocol::WidenFp16(bits) : Widen(bits);
}

double SumChunkInFloat(size_t begin, size_t end, Gradient g) {
  double sums[8] = {};
  for (size_t run = begin; run < end; run += kSumRunElems) {
    float lanes[kSumLanes] = {};
    for (size_t i = run; i < std::min(end, run + kSumRunElems); ++i) {
      const float value = LoadGrad(g, i);
      float& lane = lanes[(i - run) % kSumLanes];
      lane = std::fma(value, value, lane);
    }
    const auto pair = [&lanes](size_t j) { return double{lanes[j]} + double{lanes[j + 16]}; };
    for (size_t j = 0; j < 8; ++j) sums[j] += pair(j) + pair(j + 8);
  }
  for (size_t width = 4; width > 0; width /= 2) {
    for (size_t j = 0; j < width; ++j) sums[j] += sums[j + width];
  }
  return sums[0];
}

double SumChunkInDouble(size_t begin, size_t end, Gradient g) {
  double lanes[kSumLanes] = {};
  for (size_t i = begin; i < end; ++i) {
    const double value = LoadGrad(g, i);
    lanes[(i - begin) % kSumLanes] += value * value;  // the product is exact
  }
  for (size_t width = kSumLanes / 2; width > 0; width /= 2) {
    for (size_t j = 0; j < width; ++j) lanes[j] += lanes[j + width];
  }
  return lanes[0];
}

void ScalarChunkSquareSums(size_t n, Gradient g, double* chunk_sums) {
  for (size_t begin = 0; begin < n; begin += kSumChunkElems) {
    const size_t end = std::min(n, begin + kSumChunkElems);
    double sum = SumChunkInFloat(begin, end, g);
    if (!(sum >= kFloatSumMin && sum <= kFloatSumMax)) sum = SumChunkInDouble(begin, end, g);
    chunk_sums[begin / kSumChunkElems] = sum;
  }
}

void ScalarCopyWithSquareSums(size_t n, Gradient g, void* dst, double* chunk_sums) {
  const size_t width = g.type == DType::kFloat32 ? sizeof(float) : sizeof(uint16_t);
  if (n > 0) std::memcpy(dst, g.data, n * width);  // g.data may be null if n is 0
  ScalarChunkSquareSums(n, {dst, g.type}, chunk_sums);
}

bool ScalarAllFinite(size_t n, Gradient g) {
  for (size_t i = 0; i < n; ++i) {
    if ((std::bit_cast<uint32_t>(LoadGrad(g, i)) & 0x7F800000) == 0x7F800000) return false;
  }
  return true;
}

void ScalarAddGradient(size_t n, Gradient g, AddMode mode, float* dst) {
  for (size_t i = 0; i < n; ++i) {
    const float value = LoadGrad(g, i);
    dst[i] = mode == AddMode::kSet ? value : dst[i] + value;
  }
}

void ScalarAddGradients(size_t n, const Gradient* src, size_t count, AddMode mode, float* dst,
                        double* chunk_sums) {
  for (size_t s = 0; s < count; ++s) {
    ScalarAddGradient(n, src[s], s == 0 ? mode : AddMode::kAdd, dst);
  }
  ScalarChunkSquareSums(n, {dst, DType::kFloat32}, chunk_sums);
}

}  // namespace

const StreamKernels kScalarStreamKernels = {
    .chunk_square_sums = ScalarChunkSquareSums,
    .copy_with_square_sums = ScalarCopyWithSquareSums,
    .all_finite = ScalarAllFinite,
    .add_gradient = ScalarAddGradient,
    .add_gradients = ScalarAddGradients,
};

}  // namespace forebay::cpu_adam::internal
