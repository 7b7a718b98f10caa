// What each instruction set provides. Part of the kernels' contract: no function of ours is inline
// here, so that nothing compiled for a newer processor can replace code of an older one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu_adam/stream_kernel.h"
#include "cpu_adam/update_kernel.h"

namespace forebay::cpu_adam::internal {

// A master is counted when its bits, sign aside, reach this: float32 infinity, or the first value
// whose bfloat16 is infinite.
inline constexpr int32_t kFp32BadBits = 0x7F800000;
inline constexpr int32_t kExactBadBits = 0x7F7F8000;

// `from` and `to` are the same planes, or do not overlap.
using UpdateFn = uint64_t(const StepScalars&, size_t n, Gradient, const StatePlanes& from,
                          const StatePlanes& to);

inline constexpr size_t kRules = 8;
inline constexpr size_t kStateFormats = 2;

// By rule and format, each less 1.
struct UpdateKernels {
  UpdateFn* by_rule[kRules][kStateFormats];
};

struct StreamKernels {
  void (*chunk_square_sums)(size_t n, Gradient, double* chunk_sums);
  void (*copy_with_square_sums)(size_t n, Gradient, void* dst, double* chunk_sums);
  bool (*all_finite)(size_t n, Gradient);
  void (*add_gradient)(size_t n, Gradient, AddMode, float* dst);
  void (*round_to_bf16)(size_t n, const float* src, uint16_t* dst);
  void (*widen_bf16)(size_t n, const uint16_t* src, float* dst);
  void (*split_master)(size_t n, const float* w, uint16_t* param, int16_t* remainder);
  void (*join_master)(size_t n, const uint16_t* param, const int16_t* remainder, float* w);
};

// The std::fma reference: always built, the definition of every bit.
extern const UpdateKernels kScalarUpdateKernels;
extern const StreamKernels kScalarStreamKernels;

// The kernels of one Highway target (a HWY_* bit), or null where it is not compiled in.
const UpdateKernels* UpdateKernelsOf(int64_t hwy_target);
const StreamKernels* StreamKernelsOf(int64_t hwy_target);

}  // namespace forebay::cpu_adam::internal
