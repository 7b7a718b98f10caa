// The step for every instruction set that has a fused multiply-add. Includes its contract and
// Highway alone; the bits are those of internal/adam_scalar.cc.

#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4)  // no fused multiply-add
#define HWY_WANT_AVX3_DL
#endif

#include "cpu_adam/internal/kernel_table.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu_adam/adam_kernel_simd.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace forebay::cpu_adam::internal::HWY_NAMESPACE {

#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128

namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using DI = hn::RebindToSigned<D>;
using DU = hn::RebindToUnsigned<D>;
using DU16Half = hn::Rebind<uint16_t, D>;  // as many lanes as D
using DI16Half = hn::Rebind<int16_t, D>;
using DU16 = hn::Repartition<uint16_t, D>;  // twice as many: one pair of vectors
using V = hn::Vec<D>;
using VU = hn::Vec<DU>;
using VU16 = hn::Vec<DU16>;

constexpr size_t kRestMax = 4 * HWY_MAX_BYTES / sizeof(float);  // the loops take 2 or 4 vectors

enum class Store { kCached, kStream };

template <Store kStore, class DV, class T>
HWY_INLINE void Put(hn::Vec<DV> value, DV d, T* to) {
  if constexpr (kStore == Store::kStream) {
    hn::Stream(value, d, to);
  } else {
    hn::StoreU(value, d, to);
  }
}

HWY_INLINE VU WidenU16(const uint16_t* from) {
  return hn::ShiftLeft<16>(hn::PromoteTo(DU(), hn::LoadU(DU16Half(), from)));
}

template <GradType kGrad>
HWY_INLINE V LoadGrad(Gradient g, size_t i) {
  if constexpr (kGrad == GradType::kFp32) {
    return hn::LoadU(D(), static_cast<const float*>(g.data) + i);
  } else {
    return hn::BitCast(D(), WidenU16(static_cast<const uint16_t*>(g.data) + i));
  }
}

// One vector of the definition in adam_kernel.h.
HWY_INLINE void Step(const StepConstants& k, V grad, V& w, V& m, V& v) {
  const D d;
  const V g = hn::Mul(grad, hn::Set(d, k.grad_scale));
  m = hn::MulAdd(hn::Set(d, k.beta1), m, hn::Mul(hn::Set(d, k.one_minus_beta1), g));
  v = hn::MulAdd(hn::Set(d, k.beta2), v, hn::Mul(hn::Mul(hn::Set(d, k.one_minus_beta2), g), g));
  const V denominator = hn::MulAdd(hn::Sqrt(v), hn::Set(d, k.inv_sqrt_bias2), hn::Set(d, k.eps));
  w = hn::NegMulAdd(hn::Set(d, k.step), hn::Div(m, denominator), hn::Mul(hn::Set(d, k.decay), w));
}

HWY_INLINE size_t CountBad(V w, int32_t bad_bits) {
  const DI d;
  const auto magnitude = hn::And(hn::BitCast(d, w), hn::Set(d, 0x7FFFFFFF));
  return hn::CountTrue(d, hn::Gt(magnitude, hn::Set(d, bad_bits - 1)));
}

uint64_t CountBadBits(uint32_t bits, int32_t bad_bits) {
  return static_cast<int32_t>(bits & 0x7FFFFFFF) >= bad_bits ? 1 : 0;
}

template <GradType kGrad>
struct GradBuffer;
template <>
struct GradBuffer<GradType::kFp32> {
  using Elem = float;
  Elem elems[kRestMax] = {};
};
template <>
struct GradBuffer<GradType::kBf16> {
  using Elem = uint16_t;
  Elem elems[kRestMax] = {};
};

// The last n elements of a gradient, zeros behind them.
template <GradType kGrad>
Gradient CopyGrad(Gradient g, size_t begin, size_t n, GradBuffer<kGrad>& buffer) {
  const auto* elems = static_cast<const typename GradBuffer<kGrad>::Elem*>(g.data) + begin;
  for (size_t i = 0; i < n; ++i) buffer.elems[i] = elems[i];
  return {buffer.elems, kGrad};
}

template <GradType kGrad, Store kStore>
HWY_INLINE size_t Fp32Pair(const StepConstants& k, Gradient g, const Fp32Planes& from,
                           const Fp32Planes& to, size_t i) {
  const D d;
  const size_t j = i + hn::Lanes(d);
  V w0 = hn::LoadU(d, from.w + i), m0 = hn::LoadU(d, from.m + i), v0 = hn::LoadU(d, from.v + i);
  V w1 = hn::LoadU(d, from.w + j), m1 = hn::LoadU(d, from.m + j), v1 = hn::LoadU(d, from.v + j);
  Step(k, LoadGrad<kGrad>(g, i), w0, m0, v0);
  Step(k, LoadGrad<kGrad>(g, j), w1, m1, v1);
  Put<kStore>(w0, d, to.w + i);
  Put<kStore>(w1, d, to.w + j);
  Put<kStore>(m0, d, to.m + i);
  Put<kStore>(m1, d, to.m + j);
  Put<kStore>(v0, d, to.v + i);
  Put<kStore>(v1, d, to.v + j);
  return CountBad(w0, kFp32BadBits) + CountBad(w1, kFp32BadBits);
}

template <GradType kGrad, Store kStore>
uint64_t RunFp32(const StepConstants& k, size_t n, Gradient g, const Fp32Planes& from,
                 const Fp32Planes& to) {
  const size_t pair = 2 * hn::Lanes(D());
  uint64_t bad = 0;
  size_t i = 0;
  for (; i + pair <= n; i += pair) bad += Fp32Pair<kGrad, kStore>(k, g, from, to, i);
  if constexpr (kStore == Store::kStream) hwy::FlushStream();
  if (i == n) return bad;

  HWY_ALIGN float w[kRestMax] = {}, m[kRestMax] = {}, v[kRestMax] = {};
  GradBuffer<kGrad> grad;
  const Gradient rest = CopyGrad<kGrad>(g, i, n - i, grad);
  const Fp32Planes planes = {w, m, v};
  for (size_t j = 0; i + j < n; ++j) {
    w[j] = from.w[i + j];
    m[j] = from.m[i + j];
    v[j] = from.v[i + j];
  }
  Fp32Pair<kGrad, Store::kCached>(k, rest, planes, planes, 0);
  for (size_t j = 0; i + j < n; ++j) {
    to.w[i + j] = w[j];
    to.m[i + j] = m[j];
    to.v[i + j] = v[j];
    uint32_t bits;
    hwy::CopySameSize(&w[j], &bits);
    bad += CountBadBits(bits, kFp32BadBits);
  }
  return bad;
}

HWY_INLINE V LoadMaster(const ExactPlanes& from, size_t i) {
  const auto remainder = hn::PromoteTo(DI(), hn::LoadU(DI16Half(), from.remainder + i));
  return hn::BitCast(D(), hn::Add(WidenU16(from.param + i), hn::BitCast(DU(), remainder)));
}

// One vector: moments and master of element i on.
template <GradType kGrad>
HWY_INLINE void ExactVector(const StepConstants& k, Gradient g, const ExactPlanes& from, size_t i,
                            V& w, V& m, V& v) {
  w = LoadMaster(from, i);
  m = hn::LoadU(D(), from.m + i);
  v = hn::LoadU(D(), from.v + i);
  Step(k, LoadGrad<kGrad>(g, i), w, m, v);
}

// param << 16 has zeros below, so the remainder is the low half of the master as it is.
HWY_INLINE VU16 Remainders(V w0, V w1) {
  const DU16 du16;
  return hn::ConcatEven(du16, hn::BitCast(du16, w1), hn::BitCast(du16, w0));
}

HWY_INLINE VU16 Params(V w0, V w1) {
  const DU du;
  const DU16 du16;
  const VU half = hn::Set(du, 0x8000u);
  return hn::ConcatOdd(du16, hn::BitCast(du16, hn::Add(hn::BitCast(du, w1), half)),
                       hn::BitCast(du16, hn::Add(hn::BitCast(du, w0), half)));
}

// Four vectors, loaded and computed before the first store, so that with 32-byte vectors too each
// plane is written in whole lines of 64 bytes and no load parts their halves: lines that bypass the
// cache in two pieces cost several times as much.
template <GradType kGrad, Store kStore>
HWY_INLINE size_t ExactQuad(const StepConstants& k, Gradient g, const ExactPlanes& from,
                            const ExactPlanes& to, size_t i) {
  const D d;
  const size_t lanes = hn::Lanes(d);
  V w0, m0, v0, w1, m1, v1, w2, m2, v2, w3, m3, v3;
  ExactVector<kGrad>(k, g, from, i, w0, m0, v0);
  ExactVector<kGrad>(k, g, from, i + lanes, w1, m1, v1);
  ExactVector<kGrad>(k, g, from, i + 2 * lanes, w2, m2, v2);
  ExactVector<kGrad>(k, g, from, i + 3 * lanes, w3, m3, v3);
  Put<kStore>(m0, d, to.m + i);
  Put<kStore>(m1, d, to.m + i + lanes);
  Put<kStore>(m2, d, to.m + i + 2 * lanes);
  Put<kStore>(m3, d, to.m + i + 3 * lanes);
  Put<kStore>(v0, d, to.v + i);
  Put<kStore>(v1, d, to.v + i + lanes);
  Put<kStore>(v2, d, to.v + i + 2 * lanes);
  Put<kStore>(v3, d, to.v + i + 3 * lanes);
  const DU16 du16;
  auto* const remainder = reinterpret_cast<uint16_t*>(to.remainder);
  Put<kStore>(Params(w0, w1), du16, to.param + i);
  Put<kStore>(Params(w2, w3), du16, to.param + i + 2 * lanes);
  Put<kStore>(Remainders(w0, w1), du16, remainder + i);
  Put<kStore>(Remainders(w2, w3), du16, remainder + i + 2 * lanes);
  return CountBad(w0, kExactBadBits) + CountBad(w1, kExactBadBits) + CountBad(w2, kExactBadBits) +
         CountBad(w3, kExactBadBits);
}

template <GradType kGrad, Store kStore>
uint64_t RunExact(const StepConstants& k, size_t n, Gradient g, const ExactPlanes& from,
                  const ExactPlanes& to) {
  const size_t quad = 4 * hn::Lanes(D());
  uint64_t bad = 0;
  size_t i = 0;
  for (; i + quad <= n; i += quad) bad += ExactQuad<kGrad, kStore>(k, g, from, to, i);
  if constexpr (kStore == Store::kStream) hwy::FlushStream();
  if (i == n) return bad;

  HWY_ALIGN float m[kRestMax] = {}, v[kRestMax] = {};
  HWY_ALIGN uint16_t param[kRestMax] = {};
  HWY_ALIGN int16_t remainder[kRestMax] = {};
  GradBuffer<kGrad> grad;
  const Gradient rest = CopyGrad<kGrad>(g, i, n - i, grad);
  const ExactPlanes planes = {param, remainder, m, v};
  for (size_t j = 0; i + j < n; ++j) {
    param[j] = from.param[i + j];
    remainder[j] = from.remainder[i + j];
    m[j] = from.m[i + j];
    v[j] = from.v[i + j];
  }
  ExactQuad<kGrad, Store::kCached>(k, rest, planes, planes, 0);
  for (size_t j = 0; i + j < n; ++j) {
    to.param[i + j] = param[j];
    to.remainder[i + j] = remainder[j];
    to.m[i + j] = m[j];
    to.v[i + j] = v[j];
    const uint32_t low = static_cast<uint32_t>(int32_t{remainder[j]});
    bad += CountBadBits((uint32_t{param[j]} << 16) + low, kExactBadBits);
  }
  return bad;
}

bool IsAligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 64 == 0; }

uint64_t StepFp32(const StepConstants& k, size_t n, Gradient g, const Fp32Planes& from,
                  const Fp32Planes& to) {
  const bool bf16 = g.type == GradType::kBf16;
  if (from.w != to.w && IsAligned(to.w) && IsAligned(to.m) && IsAligned(to.v)) {
    return bf16 ? RunFp32<GradType::kBf16, Store::kStream>(k, n, g, from, to)
                : RunFp32<GradType::kFp32, Store::kStream>(k, n, g, from, to);
  }
  return bf16 ? RunFp32<GradType::kBf16, Store::kCached>(k, n, g, from, to)
              : RunFp32<GradType::kFp32, Store::kCached>(k, n, g, from, to);
}

uint64_t StepExact(const StepConstants& k, size_t n, Gradient g, const ExactPlanes& from,
                   const ExactPlanes& to) {
  const bool bf16 = g.type == GradType::kBf16;
  if (from.m != to.m && IsAligned(to.param) && IsAligned(to.remainder) && IsAligned(to.m) &&
      IsAligned(to.v)) {
    return bf16 ? RunExact<GradType::kBf16, Store::kStream>(k, n, g, from, to)
                : RunExact<GradType::kFp32, Store::kStream>(k, n, g, from, to);
  }
  return bf16 ? RunExact<GradType::kBf16, Store::kCached>(k, n, g, from, to)
              : RunExact<GradType::kFp32, Store::kCached>(k, n, g, from, to);
}

extern const StepKernels kStepKernels;
const StepKernels kStepKernels = {StepFp32, StepExact};

#endif  // a target with vectors

}  // namespace forebay::cpu_adam::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace forebay::cpu_adam::internal {

const StepKernels* StepKernelsOf(int64_t hwy_target) {
  switch (hwy_target) {
#if HWY_TARGETS & HWY_AVX3_DL
    case HWY_AVX3_DL:
      return &N_AVX3_DL::kStepKernels;
#endif
#if HWY_TARGETS & HWY_AVX3
    case HWY_AVX3:
      return &N_AVX3::kStepKernels;
#endif
#if HWY_TARGETS & HWY_AVX2
    case HWY_AVX2:
      return &N_AVX2::kStepKernels;
#endif
#if HWY_TARGETS & HWY_SVE2
    case HWY_SVE2:
      return &N_SVE2::kStepKernels;
#endif
#if HWY_TARGETS & HWY_SVE
    case HWY_SVE:
      return &N_SVE::kStepKernels;
#endif
#if HWY_TARGETS & HWY_NEON
    case HWY_NEON:
      return &N_NEON::kStepKernels;
#endif
    default:
      return nullptr;
  }
}

}  // namespace forebay::cpu_adam::internal
#endif  // HWY_ONCE
