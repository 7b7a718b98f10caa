// SPDX-License-Identifier: Apache-2.0
// The fused pass of a step: each state of an element is read once and written once. No allocation,
// no threads, no I/O, no errors.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "cpu_adam/gradient.h"
#include "protocol/optimizer_ids.h"

namespace forebay::cpu_adam {

using protocol::Format;
using protocol::kMomentsMax;
using protocol::kScaleElems;
using protocol::Optimizer;
using protocol::StateFormat;

// Scalars of one step, the same for all elements that share hyper-parameters and t; MakeStepScalars
// (step_scalars.h) computes them.
struct StepScalars {
  // Multiplied into the gradient first: mean over the world, clipping. 1 changes no bit.
  float grad_scale;
  // The scaled gradient is then brought into [grad_min, grad_max], where clamps_grad says so:
  // grad_min < 0 < grad_max.
  bool clamps_grad;
  float grad_min, grad_max;
  // λ of a decay that is added to the gradient.
  float l2;
  // Factor of the weight: fma(-η, λ, 1). LAMB: λ.
  float decay;
  // 1 - β from double, which 1.0f - β is not (0.999: 5e-5 off). SGD: momentum, and 1 - dampening (1
  // at t = 1 or momentum 0).
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
  float eps;
  // 1 / sqrt(1 - β₂ᵗ)
  float inv_sqrt_bias2;
  // η, times 1 / (1 - β₁ᵗ) (Adam), over 1 + (t - 1)·lr_decay (Adagrad).
  float step_size;
  // Adagrad: at t = 1 what the sum of squares begins with, else 0.
  float initial_accumulator;
  // LAMB: 1 / (1 - β₁ᵗ)
  float inv_bias1;
  // Key of stochastic rounding (SetRoundingKey).
  uint32_t rounding_key[2];
};

// A format determines the place of the float32 master w of an element, and the encoding of its moments.
//
// kFp32   with float32 weights: the weights are the master. With bfloat16 or binary16 weights
//         (kFp32Bf16, kFp32Fp16): the master is a separate plane; the weights are the master,
//         rounded as in kExact, or to nearest, ties to even. Moments are float32.
// kExact  weights and remainder together are the master, bit for bit. With bits = the bits of w:
//
//           weights = (bits + 0x8000) >> 16      remainder = int16(bits - (weights << 16))
//           bits    = (weights << 16) + remainder
//
//         so the weights are w as bfloat16, rounded to nearest, ties away from zero. Moments are
//         float32.
// kBf16   master as in kExact; moments bfloat16. A new moment is rounded stochastically:
//         (bits + r) >> 16 with the 16 random bits r of its element, see Rounding below.
// kInt8   master as in kExact; moments as codes of 8 bits in groups of kScaleElems elements, each
//         group with a float32 scale s. Moments m (Adam's first, Lion's, SGD's) are linear: q·s
//         with q an int8 from -127 to 127. Moments v (Adam's second and its largest, Adagrad's)
//         are codes c from 0 to 255 of their root: v = (max(c, 1)·s)², never 0 beside others that
//         are not: an update would be divided by it. Encoding, in float32 and with u = r·2⁻¹⁵ of 15
//         random bits r:
//
//           s = max|x|·unit, 0 where that is below 2⁻¹²⁶       1/s is 0 where s is 0
//           q = floor(fma(x, 1/s, 384 + u)) - 384    x = m,                    unit = 1.000001/127
//           c = floor(fma(x, 1/s, 256 + u)) - 256    x = min(sqrt(v), 1.8e19), unit = 1.000001/255
//
//         The code of element e of a group is its byte 4·((e mod 64) div 2) + 2·(e div 64) + e mod 2,
//         so that no instruction set has to move bytes between lanes.

// Planes of n elements each; a format has those that its description names.
struct StatePlanes {
  void* weights = nullptr;       // float32; bfloat16 or binary16 as raw bits
  int16_t* remainder = nullptr;  // kExact, kBf16, kInt8
  // One plane for each moment of the optimizer (kMomentShapes): float32, bfloat16 as raw bits, or codes of 8 bits. Codes come
  // in whole groups of kScaleElems: the bytes after element n - 1 are written too.
  void* moments[kMomentsMax] = {};
  float* scales[kMomentsMax] = {};  // kInt8: one for each group that has begun
  float* master = nullptr;          // kFp32Bf16, kFp32Fp16
  void* new_weights = nullptr;      // UpdateWeights: place of the new weights, in their type
  uint32_t first_elem = 0;          // index of the first element in its parameter: see Rounding
};

// Returns the planes from element `elems` on. In kInt8 `elems` is a multiple of kScaleElems.
StatePlanes Advance(const StatePlanes& planes, StateFormat format, size_t elems);

// Number of elements that an update saves at once.
inline constexpr size_t kSavedElems = 128;
static_assert(kSavedElems % kScaleElems == 0);

// Memory where an update saves elements before it changes them. If the process is killed, the reader of this memory can undo
// the elements that were being updated. Before the update writes any of elements [i, i + kSavedElems), i a multiple of
// kSavedElems, it writes all of them to slot i / kSavedElems % 2, then stores at_first + 2·i in `done`: elements before i are
// done. The stores are in program order, without fences.
//
// A slot begins with a count of 8 bytes: how many masters of elements before i have become non-finite, in addition to
// `non_finite`. The planes follow, each at a multiple of 64 bytes, in the order of StatePlanes: weights, remainder, moments,
// scales, master, as far as the format has them. A plane has kSavedElems elements, or fewer after the last whole piece, but
// whole groups of codes.
struct SavedElems {
  std::byte* slots = nullptr;  // two, of SavedSlotBytes(), each aligned to 64 bytes
  std::atomic<uint64_t>* done = nullptr;
  uint64_t at_first = 0;
  uint64_t non_finite = 0;
};
size_t SavedSlotBytes(Optimizer optimizer, StateFormat format);

// Updates n elements; for each i in [0, n), in float32, in this order, fma rounded once, with the
// names of StepScalars and a, b, c for the moments:
//
//   g  = g[i]·grad_scale, clamped where clamps_grad
//   kAdamW         a' = fma(beta1, a, one_minus_beta1·g)
//                  b' = fma(beta2, b, (one_minus_beta2·g)·g)
//                  w' = fma(-step_size, a' / fma(sqrt(b'), inv_sqrt_bias2, eps), decay·w)
//   kAdam          the same with fma(l2, w, g) for g
//   k…Amsgrad      the same with c' = max(c, b') for b' in the last line
//   kAdagrad       g' = fma(l2, w, g)
//                  a' = fma(g', g', a + initial_accumulator)
//                  w' = fma(-step_size, g' / (sqrt(a') + eps), w)
//   kLion          w' = fma(-step_size, sign(fma(beta1, a, one_minus_beta1·g)), decay·w)
//                  a' = fma(beta2, a, one_minus_beta2·g)              sign of 0 and of NaN is 0
//   kSgd           g' = fma(l2, w, g)
//                  a' = fma(beta1, a, one_minus_beta1·g')
//                  w' = fma(-step_size, a', w)
//   kSgdNesterov   the same with fma(beta1, a', g') for a' in the last line
//   kLamb          a' and b' of kAdamW, w' = w, which the other half changes: see lamb.h
//
// in place; w' is computed from the moments before these are rounded to the format. Returns how many
// w' are not finite or round to infinite weights.
//
// Rounding  In kBf16 and kInt8 each element has a hash z of rounding_key and e = first_elem + i, all
//           modulo 2³²:
//             x = e·0x9E3779B9 + rounding_key[0]     z = x ^ (x >> 16)
//           The random bits of moments 0, 1, 2 are the 16 high bits, in kInt8 the 15 high ones, of
//           z·0x846CA68B, z·(rounding_key[1] | 1), z·0x9E3779B1: of each, every value is as likely as
//           any other over the keys.
// Shapes   Every plane and the gradient have n elements; n may be 0 and need not be a multiple of
//          any vector width.
// Saved    Null: nothing is saved.
// Memory   Planes and gradient do not overlap. Any alignment that the element type allows is
//          correct; 64 bytes is fastest.
// Threads  Pure. Disjoint ranges may run at once; the split changes no bit of the result (kInt8:
//          split at multiples of kScaleElems).
// Exact    Every target returns the bits of `scalar` (internal/update_scalar.cc), whose std::fma
//          arithmetic is the definition; only sign and payload of a NaN are free, and the codes of one. Given
//          the same gradients, kFp32, kExact, kFp32Bf16 and kFp32Fp16 hold the same masters. Requires
//          the default MXCSR: no FTZ, no DAZ.
uint64_t Update(Optimizer optimizer, StateFormat format, const StepScalars& scalars, size_t n,
                Gradient g, const StatePlanes& state, const SavedElems* saved = nullptr);

// Computes the weights that Update with the same arguments will write, and writes them to `state.new_weights`. Writes nothing
// else: the other planes may be read-only, and other threads may read them meanwhile. Counts no non-finite masters.
//
// Shapes   As Update. `new_weights` has n elements.
// Limits   Not kLamb: its weights depend on norms of whole parameters, which its first pass over all states computes. So an
//          optimizer with one pass has a weights pass (OptimizerInfo::passes).
// Memory   `new_weights` and the other planes do not overlap. The stores are non-temporal if `new_weights` is aligned to 64 bytes,
//          and are visible to other threads after any later release by this thread.
// Threads  Pure. Disjoint ranges may run at once; the split changes no bit of the result.
// Exact    The weights have the bits of Update, because Update computes them before it rounds the moments.
void UpdateWeights(Optimizer optimizer, StateFormat format, const StepScalars& scalars, size_t n,
                   Gradient g, const StatePlanes& state);

}  // namespace forebay::cpu_adam
