// What each instruction set provides. Part of the kernels' contract: no function of ours is inline
// here, so that nothing compiled for a newer processor can replace code of an older one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu_adam/adam_kernel.h"

namespace forebay::cpu_adam::internal {

// AdamScalars with what a step derives from them once.
struct StepConstants {
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
  float eps, inv_sqrt_bias2;
  float decay;  // fma(-lr, weight_decay, 1)
  float step;   // lr * inv_bias1
  float grad_scale;
};

// A master is counted when its bits, sign aside, reach this: float32 infinity, or the first value
// whose bfloat16 is infinite.
inline constexpr int32_t kFp32BadBits = 0x7F800000;
inline constexpr int32_t kExactBadBits = 0x7F7F8000;

// `from` and `to` are the same planes, or do not overlap.
struct StepKernels {
  uint64_t (*fp32)(const StepConstants&, size_t n, Gradient, const Fp32Planes& from,
                   const Fp32Planes& to);
  uint64_t (*exact)(const StepConstants&, size_t n, Gradient, const ExactPlanes& from,
                    const ExactPlanes& to);
};

struct StreamKernels {
  void (*chunk_square_sums)(size_t n, Gradient, double* chunk_sums);
  bool (*all_finite)(size_t n, Gradient);
  void (*add_gradient)(size_t n, Gradient, AddMode, float* dst);
  void (*round_to_bf16)(size_t n, const float* src, uint16_t* dst);
  void (*widen_bf16)(size_t n, const uint16_t* src, float* dst);
  void (*split_master)(size_t n, const float* w, uint16_t* param, int16_t* remainder);
  void (*join_master)(size_t n, const uint16_t* param, const int16_t* remainder, float* w);
};

// The std::fma reference: always built, the definition of every bit.
extern const StepKernels kScalarStepKernels;
extern const StreamKernels kScalarStreamKernels;

// The kernels of one Highway target (a HWY_* bit), or null where it is not compiled in.
const StepKernels* StepKernelsOf(int64_t hwy_target);
const StreamKernels* StreamKernelsOf(int64_t hwy_target);

}  // namespace forebay::cpu_adam::internal
