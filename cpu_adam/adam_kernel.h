// The arithmetic of one AdamW step and the streaming passes around it. No allocation, no threads,
// no I/O, no errors.
#pragma once

#include <cstddef>
#include <cstdint>

namespace forebay::cpu_adam {

// Scalars of step t >= 1, computed once per step in double and then rounded to float32.
struct AdamScalars {
  float lr;              // η
  float beta1, beta2;    // β₁, β₂ in [0, 1)
  float eps;             // ε > 0, outside the square root
  float weight_decay;    // λ, decoupled from the gradient
  float inv_bias1;       // 1 / (1 - β₁ᵗ)
  float inv_sqrt_bias2;  // 1 / sqrt(1 - β₂ᵗ)
  float one_minus_beta1;  // 1 - β₁ rounded from double, which 1.0f - beta1 is not (0.999: 5e-5 off)
  float one_minus_beta2;
  float grad_scale;  // multiplied into the gradient first: world mean, clip; 1 changes no bit
};

// What a person sets, per parameter group; defaults as torch.optim.AdamW's.
struct AdamHyper {
  double lr = 1e-3;
  double beta1 = 0.9, beta2 = 0.999;  // in [0, 1)
  double eps = 1e-8;                  // > 0
  double weight_decay = 1e-2;
};

AdamScalars MakeAdamScalars(const AdamHyper& hyper, uint64_t t, float grad_scale);  // t >= 1

enum class GradType : uint8_t { kFp32 = 1, kBf16 = 2 };

// A run of elements that is read once: float32[n], or bfloat16[n] as raw bits.
struct Gradient {
  const void* data;
  GradType type;
};

// Planes of format `fp32`: the image is the master.
struct Fp32Planes {
  float* w;
  float* m;
  float* v;
};

// Planes of format `exact`: the image is `param`, and param and remainder together are the float32
// master w, bit for bit. With bits = the bits of w:
//
//   param = (bits + 0x8000) >> 16      remainder = int16(bits - (param << 16))
//   bits  = (param << 16) + remainder
//
// so param is w rounded to nearest, ties away from zero.
struct ExactPlanes {
  uint16_t* param;  // bfloat16 as raw bits
  int16_t* remainder;
  float* m;
  float* v;
};

// Updates n elements; for each i in [0, n), in float32, in this order, fma rounded once:
//
//   decay = fma(-η, λ, 1)      step = η·inv_bias1                 (once)
//   g' = g[i]·grad_scale
//   m' = fma(β₁, m[i], one_minus_beta1·g')
//   v' = fma(β₂, v[i], (one_minus_beta2·g')·g')
//   d  = fma(sqrt(v'), inv_sqrt_bias2, ε)
//   w' = fma(-step, m' / d, decay·w[i])
//
// The plain forms work in place; the To forms read `from` and write `to`, with stores that bypass
// the cache where every plane of `to` is aligned to 64 bytes. Both return how many w' are not
// finite or, in `exact`, round to an infinite param.
//
// Shapes   Every plane and the gradient have n elements; n may be 0 and need not be a multiple of
//          any vector width.
// Memory   Planes and gradient do not overlap. Any alignment that the element type allows is
//          correct; 64 bytes is fastest. The stores of the To forms are visible to other threads
//          after any later release by this one.
// Threads  Pure. Disjoint ranges may run at once; the split changes no bit of the result.
// Exact    Every target returns the bits of `scalar` (adam_scalar.cc), whose std::fma arithmetic is
//          the definition; only sign and payload of a NaN are free. Given the same gradients,
//          `fp32` and `exact` hold the same masters. Requires the default MXCSR: no FTZ, no DAZ.
// Source   Kingma & Ba, arXiv:1412.6980, algorithm 1; Loshchilov & Hutter, arXiv:1711.05101,
//          algorithm 2, with λ scaled by η and constants rounded as in torch.optim.AdamW.
uint64_t AdamStepFp32(const AdamScalars& scalars, size_t n, Gradient g, const Fp32Planes& state);
uint64_t AdamStepFp32To(const AdamScalars& scalars, size_t n, Gradient g, const Fp32Planes& from,
                        const Fp32Planes& to);
uint64_t AdamStepExact(const AdamScalars& scalars, size_t n, Gradient g, const ExactPlanes& state);
uint64_t AdamStepExactTo(const AdamScalars& scalars, size_t n, Gradient g, const ExactPlanes& from,
                         const ExactPlanes& to);

// Elements of one chunk of a sum of squares; all chunks but the last are whole.
inline constexpr size_t kSumChunkElems = 4096;
inline constexpr size_t kSumLanes = 32;

// Writes one sum of squares, in double, for each of the ceil(n / kSumChunkElems) chunks. Lane j of
// a chunk adds the squares of its elements j, j + 32, j + 64, … in this order (each square is
// exact); then lane j adds lane j + 16, then j + 8, 4, 2, 1. A sum is finite if and only if every
// element of its chunk is. square_sum.h joins chunks to a total that does not depend on their
// order.
void ChunkSquareSums(size_t n, Gradient g, double* chunk_sums);

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
