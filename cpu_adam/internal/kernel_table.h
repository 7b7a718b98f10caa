// SPDX-License-Identifier: Apache-2.0
// The kernels of each instruction set. Part of the kernels' contract: no function of Forebay is inline here, so that code
// compiled for a newer processor cannot replace code of an older one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "cpu_adam/stream_kernel.h"
#include "cpu_adam/update_kernel.h"

namespace forebay::cpu_adam::internal {

using protocol::kMomentShapes;
using protocol::kOptimizerCount;
using protocol::kStateFormatCount;
using protocol::kStateFormats;
using protocol::MomentShape;

// A master is counted when its bits, sign aside, reach this: float32 infinity, or the first value
// whose bfloat16 or binary16 is infinite.
inline constexpr int32_t kFp32NonFiniteBits = 0x7F800000;
inline constexpr int32_t kBf16NonFiniteBits = 0x7F7F8000;
inline constexpr int32_t kFp16NonFiniteBits = 0x477FF000;

// Constants of the random bits and codes of update_kernel.h.
inline constexpr uint32_t kElemStep = 0x9E3779B9u, kFirstRounding = 0x846CA68Bu,
                          kThirdRounding = 0x9E3779B1u;
// A root whose square is finite.
inline constexpr float kRootLimit = 1.8e19f;
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
// A little more than 1/127 and 1/255: the largest moment never rounds up past the last code.
inline constexpr float kLinearUnit = 1.000001f / 127, kRootUnit = 1.000001f / 255;
inline constexpr float kScaleMin = 0x1p-126f;
inline constexpr uint32_t kLinearZeroBits = 0x43C00000;  // 384: the code + 128 stands above bit 15
inline constexpr uint32_t kRootZeroBits = 0x43800000;    // 256: the code stands above bit 15

template <Optimizer kOptimizer>
inline constexpr MomentShape kMomentShape = kMomentShapes[static_cast<size_t>(kOptimizer) - 1];
// Moment kIndex is a square, whose root is coded.
template <Optimizer kOptimizer, size_t kIndex>
inline constexpr bool kIsSquare = (kMomentShape<kOptimizer>.squares >> kIndex & 1) != 0;

// The master is the sum of weights and remainder.
template <StateFormat kFormat>
inline constexpr bool kHasRemainder = kFormat.format != Format::kFp32;
// True if the master is a separate plane.
template <StateFormat kFormat>
inline constexpr bool kHasMaster = !kHasRemainder<kFormat> && kFormat.weights != DType::kFloat32;
template <StateFormat kFormat>
inline constexpr bool kWeightsAreMaster = kFormat.weights == DType::kFloat32;

// The planes that a kernel writes: those of the state (Update), or the new weights alone (UpdateWeights).
enum class Stores : uint8_t { kState, kNewWeights };

using UpdateFn = uint64_t(const StepScalars&, size_t n, Gradient, const StatePlanes&,
                          const SavedElems*);

// Bytes of an element in a plane.
constexpr size_t WeightsWidth(StateFormat format) {
  return format.weights == DType::kFloat32 ? sizeof(float) : sizeof(uint16_t);
}
constexpr size_t MomentWidth(StateFormat format) {
  return format.format == Format::kInt8   ? sizeof(uint8_t)
         : format.format == Format::kBf16 ? sizeof(uint16_t)
                                          : sizeof(float);
}

// Bytes of the parts of a slot of SavedElems.
inline constexpr size_t kSavedCountBytes = 64;
inline constexpr size_t kSavedScaleBytes = 64;
constexpr size_t SavedPlaneBytes(size_t width) { return (kSavedElems * width + 63) / 64 * 64; }

// The kernels of one format.
struct FormatKernels {
  UpdateFn* updates[kOptimizerCount];  // index: optimizer, less 1
  UpdateFn* weights[kOptimizerCount];  // UpdateWeights: saves nothing and returns 0; null for LAMB
  // The second half of a LAMB update of n elements (lamb.h), after the update of the moments. lamb_direction computes w and u
  // from the planes. lamb_apply writes fma(-step_size, u, w) to the planes, and returns the number of non-finite masters.
  void (*lamb_direction)(const StepScalars&, size_t n, const StatePlanes&, float* w, float* u);
  uint64_t (*lamb_apply)(float step_size, size_t n, const float* w, const float* u,
                         const StatePlanes&);
};

// A row of FormatKernels: `kernel` of each optimizer with the template arguments behind `lamb`, which is LAMB's kernel.
#define FOREBAY_ROW(kernel, lamb, ...)                                                          \
  {                                                                                             \
    kernel<Optimizer::kAdamW, __VA_ARGS__>, kernel<Optimizer::kAdam, __VA_ARGS__>,              \
        kernel<Optimizer::kAdamWAmsgrad, __VA_ARGS__>,                                          \
        kernel<Optimizer::kAdamAmsgrad, __VA_ARGS__>, kernel<Optimizer::kAdagrad, __VA_ARGS__>, \
        kernel<Optimizer::kLion, __VA_ARGS__>, kernel<Optimizer::kSgd, __VA_ARGS__>,            \
        kernel<Optimizer::kSgdNesterov, __VA_ARGS__>, lamb                                      \
  }

struct StreamKernels {
  void (*chunk_square_sums)(size_t n, Gradient, double* chunk_sums);
  void (*copy_with_square_sums)(size_t n, Gradient, void* dst, double* chunk_sums);
  bool (*all_finite)(size_t n, Gradient);
  void (*add_gradient)(size_t n, Gradient, AddMode, float* dst);
  void (*add_gradients)(size_t n, const Gradient* src, size_t count, AddMode, float* dst,
                        double* chunk_sums);
};

// The std::fma reference: always built, the definition of every bit.
// kernels of each format, in the order of kStateFormats
extern const FormatKernels kScalarFormats[kStateFormatCount];
extern const StreamKernels kScalarStreamKernels;

// The kernels of one Highway target (a HWY_* bit), or null where it is not compiled in.
const FormatKernels* Fp32KernelsOf(int64_t hwy_target);
const FormatKernels* ExactKernelsOf(int64_t hwy_target);
const FormatKernels* Bf16KernelsOf(int64_t hwy_target);
const FormatKernels* Int8KernelsOf(int64_t hwy_target);
const FormatKernels* Fp32Bf16KernelsOf(int64_t hwy_target);
const FormatKernels* Fp32Fp16KernelsOf(int64_t hwy_target);
const StreamKernels* StreamKernelsOf(int64_t hwy_target);

}  // namespace forebay::cpu_adam::internal
