// The fused pass of a step: each state of an element is read once and written once. No allocation,
// no threads, no I/O, no errors.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu_adam/gradient.h"
#include "cpu_adam/optimizer.h"

namespace forebay::cpu_adam {

// kFp32   the image is the float32 master.
// kExact  image and remainder together are the float32 master w, bit for bit. With bits = the bits
//         of w:
//
//           image = (bits + 0x8000) >> 16      remainder = int16(bits - (image << 16))
//           bits  = (image << 16) + remainder
//
//         so the image is w as bfloat16, rounded to nearest, ties away from zero.
enum class StateFormat : uint8_t { kFp32 = 1, kExact = 2 };

// Planes of n elements each. `moments` are float32 and as many as MomentCount of the rule.
struct StatePlanes {
  void* image;         // float32, or bfloat16 as raw bits
  int16_t* remainder;  // kExact
  float* moments[kMomentsMax];
};

// The same planes from element `elems` on. Planes that the rule and format do not have stay.
StatePlanes Advance(const StatePlanes& planes, Rule rule, StateFormat format, size_t elems);

// Updates n elements; for each i in [0, n), in float32, in this order, fma rounded once, with the
// names of StepScalars and a, b, c for the moments:
//
//   g  = g[i]·grad_scale
//   kAdamW         a' = fma(beta1, a, one_minus_beta1·g)
//                  b' = fma(beta2, b, (one_minus_beta2·g)·g)
//                  w' = fma(-step, a' / fma(sqrt(b'), inv_sqrt_bias2, eps), decay·w)
//   kAdam          the same with fma(l2, w, g) for g
//   k…Amsgrad      the same with c' = max(c, b') for b' in the last line
//   kAdagrad       g' = fma(l2, w, g)
//                  a' = fma(g', g', a + first)
//                  w' = fma(-step, g' / (sqrt(a') + eps), w)
//   kLion          w' = fma(-step, sign(fma(beta1, a, one_minus_beta1·g)), decay·w)
//                  a' = fma(beta2, a, one_minus_beta2·g)              sign of 0 and of NaN is 0
//   kSgd           g' = fma(l2, w, g)
//                  a' = fma(beta1, a, one_minus_beta1·g')
//                  w' = fma(-step, a', w)
//   kSgdNesterov   the same with fma(beta1, a', g') for a' in the last line
//
// Update works in place; UpdateTo reads `from` and writes `to`, with stores that bypass the cache
// where every plane of `to` is aligned to 64 bytes. Both return how many w' are not finite or, in
// kExact, round to an infinite image.
//
// Shapes   Every plane and the gradient have n elements; n may be 0 and need not be a multiple of
//          any vector width.
// Memory   Planes and gradient do not overlap. Any alignment that the element type allows is
//          correct; 64 bytes is fastest. The stores of UpdateTo are visible to other threads after
//          any later release by this one.
// Threads  Pure. Disjoint ranges may run at once; the split changes no bit of the result.
// Exact    Every target returns the bits of `scalar` (update_scalar.cc), whose std::fma arithmetic
//          is the definition; only sign and payload of a NaN are free. Given the same gradients,
//          both formats hold the same masters. Requires the default MXCSR: no FTZ, no DAZ.
uint64_t Update(Rule rule, StateFormat format, const StepScalars& scalars, size_t n, Gradient g,
                const StatePlanes& state);
uint64_t UpdateTo(Rule rule, StateFormat format, const StepScalars& scalars, size_t n, Gradient g,
                  const StatePlanes& from, const StatePlanes& to);

}  // namespace forebay::cpu_adam
