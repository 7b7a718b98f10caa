// The update for every instruction set that has a fused multiply-add. Includes its contract and
// Highway alone; the bits are those of internal/update_scalar.cc.

#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4)  // no fused multiply-add
#define HWY_WANT_AVX3_DL
#endif

#include "cpu_adam/internal/kernel_table.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu_adam/update_kernel_simd.cc"
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
using DF16Half = hn::Rebind<hwy::float16_t, D>;
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
  } else if constexpr (kGrad == GradType::kFp16) {
    const auto* halves = static_cast<const hwy::float16_t*>(g.data);
    return hn::PromoteTo(D(), hn::LoadU(DF16Half(), halves + i));
  } else {
    return hn::BitCast(D(), WidenU16(static_cast<const uint16_t*>(g.data) + i));
  }
}

template <Rule kRule>
constexpr bool kIsAmsgrad = kRule == Rule::kAdamWAmsgrad || kRule == Rule::kAdamAmsgrad;
template <Rule kRule>
constexpr bool kIsAdam = kRule == Rule::kAdamW || kRule == Rule::kAdam || kIsAmsgrad<kRule>;
template <Rule kRule>
constexpr bool kIsSgd = kRule == Rule::kSgd || kRule == Rule::kSgdNesterov;
template <Rule kRule>
constexpr bool kAddsDecay =
    kRule != Rule::kAdamW&& kRule != Rule::kAdamWAmsgrad&& kRule != Rule::kLion;
template <Rule kRule>
constexpr size_t kMoments = kIsAmsgrad<kRule> ? 3
                            : kIsAdam<kRule>  ? 2
                                              : 1;

HWY_INLINE V Sign(V x) {
  const D d;
  const V one = hn::Set(d, 1.0f);
  return hn::Sub(hn::IfThenElseZero(hn::Gt(x, hn::Zero(d)), one),
                 hn::IfThenElseZero(hn::Lt(x, hn::Zero(d)), one));
}

// One vector of the definition in update_kernel.h.
template <Rule kRule>
HWY_INLINE void Step(const StepScalars& k, V grad, V& w, V& a, V& b, V& c) {
  const D d;
  const V step = hn::Set(d, k.step);
  const V beta1 = hn::Set(d, k.beta1), rest1 = hn::Set(d, k.one_minus_beta1);
  V g = hn::Mul(grad, hn::Set(d, k.grad_scale));
  if constexpr (kAddsDecay<kRule>) g = hn::MulAdd(hn::Set(d, k.l2), w, g);
  if constexpr (kIsAdam<kRule>) {
    a = hn::MulAdd(beta1, a, hn::Mul(rest1, g));
    b = hn::MulAdd(hn::Set(d, k.beta2), b, hn::Mul(hn::Mul(hn::Set(d, k.one_minus_beta2), g), g));
    V largest = b;
    if constexpr (kIsAmsgrad<kRule>) largest = c = hn::IfThenElse(hn::Lt(c, b), b, c);
    const V denominator =
        hn::MulAdd(hn::Sqrt(largest), hn::Set(d, k.inv_sqrt_bias2), hn::Set(d, k.eps));
    w = hn::NegMulAdd(step, hn::Div(a, denominator), hn::Mul(hn::Set(d, k.decay), w));
  } else if constexpr (kRule == Rule::kAdagrad) {
    a = hn::MulAdd(g, g, hn::Add(a, hn::Set(d, k.first)));
    w = hn::NegMulAdd(step, hn::Div(g, hn::Add(hn::Sqrt(a), hn::Set(d, k.eps))), w);
  } else if constexpr (kRule == Rule::kLion) {
    const V sign = Sign(hn::MulAdd(beta1, a, hn::Mul(rest1, g)));
    w = hn::NegMulAdd(step, sign, hn::Mul(hn::Set(d, k.decay), w));
    a = hn::MulAdd(hn::Set(d, k.beta2), a, hn::Mul(hn::Set(d, k.one_minus_beta2), g));
  } else {
    a = hn::MulAdd(beta1, a, hn::Mul(rest1, g));
    w = hn::NegMulAdd(step, kRule == Rule::kSgdNesterov ? hn::MulAdd(beta1, a, g) : a, w);
  }
}

HWY_INLINE size_t CountBad(V w, int32_t bad_bits) {
  const DI d;
  const auto magnitude = hn::And(hn::BitCast(d, w), hn::Set(d, 0x7FFFFFFF));
  return hn::CountTrue(d, hn::Gt(magnitude, hn::Set(d, bad_bits - 1)));
}

uint64_t CountBadBits(uint32_t bits, int32_t bad_bits) {
  return static_cast<int32_t>(bits & 0x7FFFFFFF) >= bad_bits ? 1 : 0;
}

// Moment kIndex of a rule; zeros where the rule has fewer.
template <Rule kRule, size_t kIndex>
HWY_INLINE V LoadMoment(const StatePlanes& from, size_t i) {
  if constexpr (kIndex < kMoments<kRule>) return hn::LoadU(D(), from.moments[kIndex] + i);
  return hn::Zero(D());
}

template <Rule kRule, size_t kIndex, Store kStore>
HWY_INLINE void PutMoment(V value, const StatePlanes& to, size_t i) {
  if constexpr (kIndex < kMoments<kRule>) Put<kStore>(value, D(), to.moments[kIndex] + i);
}

template <Rule kRule, GradType kGrad, Store kStore>
HWY_INLINE size_t Fp32Pair(const StepScalars& k, Gradient g, const StatePlanes& from,
                           const StatePlanes& to, size_t i) {
  const D d;
  const size_t j = i + hn::Lanes(d);
  const auto* image = static_cast<const float*>(from.image);
  V w0 = hn::LoadU(d, image + i), w1 = hn::LoadU(d, image + j);
  V a0 = LoadMoment<kRule, 0>(from, i), a1 = LoadMoment<kRule, 0>(from, j);
  V b0 = LoadMoment<kRule, 1>(from, i), b1 = LoadMoment<kRule, 1>(from, j);
  V c0 = LoadMoment<kRule, 2>(from, i), c1 = LoadMoment<kRule, 2>(from, j);
  Step<kRule>(k, LoadGrad<kGrad>(g, i), w0, a0, b0, c0);
  Step<kRule>(k, LoadGrad<kGrad>(g, j), w1, a1, b1, c1);
  auto* const written = static_cast<float*>(to.image);
  Put<kStore>(w0, d, written + i);
  Put<kStore>(w1, d, written + j);
  PutMoment<kRule, 0, kStore>(a0, to, i);
  PutMoment<kRule, 0, kStore>(a1, to, j);
  PutMoment<kRule, 1, kStore>(b0, to, i);
  PutMoment<kRule, 1, kStore>(b1, to, j);
  PutMoment<kRule, 2, kStore>(c0, to, i);
  PutMoment<kRule, 2, kStore>(c1, to, j);
  return CountBad(w0, kFp32BadBits) + CountBad(w1, kFp32BadBits);
}

HWY_INLINE V LoadMaster(const StatePlanes& from, size_t i) {
  const auto remainder = hn::PromoteTo(DI(), hn::LoadU(DI16Half(), from.remainder + i));
  const VU image = WidenU16(static_cast<const uint16_t*>(from.image) + i);
  return hn::BitCast(D(), hn::Add(image, hn::BitCast(DU(), remainder)));
}

// One vector: moments and master of element i on.
template <Rule kRule, GradType kGrad>
HWY_INLINE void ExactVector(const StepScalars& k, Gradient g, const StatePlanes& from, size_t i,
                            V& w, V& a, V& b, V& c) {
  w = LoadMaster(from, i);
  a = LoadMoment<kRule, 0>(from, i);
  b = LoadMoment<kRule, 1>(from, i);
  c = LoadMoment<kRule, 2>(from, i);
  Step<kRule>(k, LoadGrad<kGrad>(g, i), w, a, b, c);
}

// image << 16 has zeros below, so the remainder is the low half of the master as it is.
HWY_INLINE VU16 Remainders(V w0, V w1) {
  const DU16 du16;
  return hn::ConcatEven(du16, hn::BitCast(du16, w1), hn::BitCast(du16, w0));
}

HWY_INLINE VU16 Images(V w0, V w1) {
  const DU du;
  const DU16 du16;
  const VU half = hn::Set(du, 0x8000u);
  return hn::ConcatOdd(du16, hn::BitCast(du16, hn::Add(hn::BitCast(du, w1), half)),
                       hn::BitCast(du16, hn::Add(hn::BitCast(du, w0), half)));
}

template <Rule kRule, size_t kIndex, Store kStore>
HWY_INLINE void PutMoments(V v0, V v1, V v2, V v3, const StatePlanes& to, size_t i) {
  const size_t lanes = hn::Lanes(D());
  PutMoment<kRule, kIndex, kStore>(v0, to, i);
  PutMoment<kRule, kIndex, kStore>(v1, to, i + lanes);
  PutMoment<kRule, kIndex, kStore>(v2, to, i + 2 * lanes);
  PutMoment<kRule, kIndex, kStore>(v3, to, i + 3 * lanes);
}

// Four vectors, loaded and computed before the first store, so that with 32-byte vectors too each
// plane is written in whole lines of 64 bytes and no load parts their halves: lines that bypass the
// cache in two pieces cost several times as much.
template <Rule kRule, GradType kGrad, Store kStore>
HWY_INLINE size_t ExactQuad(const StepScalars& k, Gradient g, const StatePlanes& from,
                            const StatePlanes& to, size_t i) {
  const size_t lanes = hn::Lanes(D());
  V w0, a0, b0, c0, w1, a1, b1, c1, w2, a2, b2, c2, w3, a3, b3, c3;
  ExactVector<kRule, kGrad>(k, g, from, i, w0, a0, b0, c0);
  ExactVector<kRule, kGrad>(k, g, from, i + lanes, w1, a1, b1, c1);
  ExactVector<kRule, kGrad>(k, g, from, i + 2 * lanes, w2, a2, b2, c2);
  ExactVector<kRule, kGrad>(k, g, from, i + 3 * lanes, w3, a3, b3, c3);
  PutMoments<kRule, 0, kStore>(a0, a1, a2, a3, to, i);
  PutMoments<kRule, 1, kStore>(b0, b1, b2, b3, to, i);
  PutMoments<kRule, 2, kStore>(c0, c1, c2, c3, to, i);
  const DU16 du16;
  auto* const image = static_cast<uint16_t*>(to.image);
  auto* const remainder = reinterpret_cast<uint16_t*>(to.remainder);
  Put<kStore>(Images(w0, w1), du16, image + i);
  Put<kStore>(Images(w2, w3), du16, image + i + 2 * lanes);
  Put<kStore>(Remainders(w0, w1), du16, remainder + i);
  Put<kStore>(Remainders(w2, w3), du16, remainder + i + 2 * lanes);
  return CountBad(w0, kExactBadBits) + CountBad(w1, kExactBadBits) + CountBad(w2, kExactBadBits) +
         CountBad(w3, kExactBadBits);
}

template <Rule kRule, StateFormat kFormat, GradType kGrad, Store kStore>
HWY_INLINE size_t Vectors(const StepScalars& k, Gradient g, const StatePlanes& from,
                          const StatePlanes& to, size_t i) {
  if constexpr (kFormat == StateFormat::kFp32) {
    return Fp32Pair<kRule, kGrad, kStore>(k, g, from, to, i);
  } else {
    return ExactQuad<kRule, kGrad, kStore>(k, g, from, to, i);
  }
}

// Elements of a state and its gradient that do not fill the vectors of a loop.
struct Rest {
  HWY_ALIGN float moments[kMomentsMax][kRestMax] = {};
  HWY_ALIGN float image[kRestMax] = {};  // also as 16-bit elements
  HWY_ALIGN int16_t remainder[kRestMax] = {};
  HWY_ALIGN float grad[kRestMax] = {};
  StatePlanes planes = {image, remainder, {moments[0], moments[1], moments[2]}};
};

template <class T>
void CopyElems(const void* from, size_t from_begin, size_t n, void* to, size_t to_begin) {
  for (size_t j = 0; j < n; ++j) {
    static_cast<T*>(to)[to_begin + j] = static_cast<const T*>(from)[from_begin + j];
  }
}

template <Rule kRule, StateFormat kFormat>
void CopyPlanes(const StatePlanes& from, size_t from_begin, size_t n, const StatePlanes& to,
                size_t to_begin) {
  for (size_t m = 0; m < kMoments<kRule>; ++m) {
    CopyElems<float>(from.moments[m], from_begin, n, to.moments[m], to_begin);
  }
  if constexpr (kFormat == StateFormat::kFp32) {
    CopyElems<float>(from.image, from_begin, n, to.image, to_begin);
  } else {
    CopyElems<uint16_t>(from.image, from_begin, n, to.image, to_begin);
    CopyElems<int16_t>(from.remainder, from_begin, n, to.remainder, to_begin);
  }
}

template <StateFormat kFormat>
uint32_t MasterBits(const StatePlanes& state, size_t i) {
  if constexpr (kFormat == StateFormat::kFp32) {
    uint32_t bits;
    hwy::CopySameSize(static_cast<const float*>(state.image) + i, &bits);
    return bits;
  } else {
    const uint32_t low = static_cast<uint32_t>(int32_t{state.remainder[i]});
    return (uint32_t{static_cast<const uint16_t*>(state.image)[i]} << 16) + low;
  }
}

// The rest behind element i, in buffers that are long enough for whole vectors.
template <Rule kRule, StateFormat kFormat, GradType kGrad>
HWY_NOINLINE uint64_t RunRest(const StepScalars& k, size_t i, size_t n, Gradient g,
                              const StatePlanes& from, const StatePlanes& to) {
  Rest rest;
  CopyPlanes<kRule, kFormat>(from, i, n - i, rest.planes, 0);
  if constexpr (kGrad == GradType::kFp32) {
    CopyElems<float>(g.data, i, n - i, rest.grad, 0);
  } else {
    CopyElems<uint16_t>(g.data, i, n - i, rest.grad, 0);
  }
  Vectors<kRule, kFormat, kGrad, Store::kCached>(k, {rest.grad, kGrad}, rest.planes, rest.planes,
                                                 0);
  CopyPlanes<kRule, kFormat>(rest.planes, 0, n - i, to, i);
  constexpr int32_t kBadBits = kFormat == StateFormat::kFp32 ? kFp32BadBits : kExactBadBits;
  uint64_t bad = 0;
  for (size_t j = i; j < n; ++j) bad += CountBadBits(MasterBits<kFormat>(to, j), kBadBits);
  return bad;
}

template <Rule kRule, StateFormat kFormat, GradType kGrad, Store kStore>
uint64_t Run(const StepScalars& k, size_t n, Gradient g, const StatePlanes& from,
             const StatePlanes& to) {
  const size_t stride = (kFormat == StateFormat::kFp32 ? 2 : 4) * hn::Lanes(D());
  uint64_t bad = 0;
  size_t i = 0;
  for (; i + stride <= n; i += stride) {
    bad += Vectors<kRule, kFormat, kGrad, kStore>(k, g, from, to, i);
  }
  if constexpr (kStore == Store::kStream) hwy::FlushStream();
  if (i < n) bad += RunRest<kRule, kFormat, kGrad>(k, i, n, g, from, to);
  return bad;
}

bool IsAligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 64 == 0; }

template <Rule kRule, StateFormat kFormat>
bool AreAligned(const StatePlanes& planes) {
  bool aligned = IsAligned(planes.image);
  if (kFormat == StateFormat::kExact) aligned = aligned && IsAligned(planes.remainder);
  for (size_t m = 0; m < kMoments<kRule>; ++m) aligned = aligned && IsAligned(planes.moments[m]);
  return aligned;
}

template <Rule kRule, StateFormat kFormat, Store kStore>
uint64_t RunTyped(const StepScalars& k, size_t n, Gradient g, const StatePlanes& from,
                  const StatePlanes& to) {
  switch (g.type) {
    case GradType::kBf16:
      return Run<kRule, kFormat, GradType::kBf16, kStore>(k, n, g, from, to);
    case GradType::kFp16:
      return Run<kRule, kFormat, GradType::kFp16, kStore>(k, n, g, from, to);
    case GradType::kFp32:
      break;
  }
  return Run<kRule, kFormat, GradType::kFp32, kStore>(k, n, g, from, to);
}

template <Rule kRule, StateFormat kFormat>
uint64_t UpdateOf(const StepScalars& k, size_t n, Gradient g, const StatePlanes& from,
                  const StatePlanes& to) {
  if (from.image != to.image && AreAligned<kRule, kFormat>(to)) {
    return RunTyped<kRule, kFormat, Store::kStream>(k, n, g, from, to);
  }
  return RunTyped<kRule, kFormat, Store::kCached>(k, n, g, from, to);
}

#define FOREBAY_FORMATS(rule) \
  { UpdateOf<rule, StateFormat::kFp32>, UpdateOf<rule, StateFormat::kExact> }
extern const UpdateKernels kUpdateKernels;
const UpdateKernels kUpdateKernels = {{
    FOREBAY_FORMATS(Rule::kAdamW),
    FOREBAY_FORMATS(Rule::kAdam),
    FOREBAY_FORMATS(Rule::kAdamWAmsgrad),
    FOREBAY_FORMATS(Rule::kAdamAmsgrad),
    FOREBAY_FORMATS(Rule::kAdagrad),
    FOREBAY_FORMATS(Rule::kLion),
    FOREBAY_FORMATS(Rule::kSgd),
    FOREBAY_FORMATS(Rule::kSgdNesterov),
}};
#undef FOREBAY_FORMATS

#endif  // a target with vectors

}  // namespace forebay::cpu_adam::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace forebay::cpu_adam::internal {

const UpdateKernels* UpdateKernelsOf(int64_t hwy_target) {
  switch (hwy_target) {
#if HWY_TARGETS & HWY_AVX3_DL
    case HWY_AVX3_DL:
      return &N_AVX3_DL::kUpdateKernels;
#endif
#if HWY_TARGETS & HWY_AVX3
    case HWY_AVX3:
      return &N_AVX3::kUpdateKernels;
#endif
#if HWY_TARGETS & HWY_AVX2
    case HWY_AVX2:
      return &N_AVX2::kUpdateKernels;
#endif
#if HWY_TARGETS & HWY_SVE2
    case HWY_SVE2:
      return &N_SVE2::kUpdateKernels;
#endif
#if HWY_TARGETS & HWY_SVE
    case HWY_SVE:
      return &N_SVE::kUpdateKernels;
#endif
#if HWY_TARGETS & HWY_NEON
    case HWY_NEON:
      return &N_NEON::kUpdateKernels;
#endif
    default:
      return nullptr;
  }
}

}  // namespace forebay::cpu_adam::internal
#endif  // HWY_ONCE
