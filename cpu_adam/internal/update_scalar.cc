// SPDX-License-Identifier: Apache-2.0
// The definition of an update: one element at a time, every rounding written out.

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>

#include "cpu_adam/decode.h"
#include "cpu_adam/internal/kernel_table.h"
#include "protocol/float16.h"

namespace forebay::cpu_adam::internal {
namespace {

uint32_t BitsOf(float value) { return std::bit_cast<uint32_t>(value); }
float FloatOf(uint32_t bits) { return std::bit_cast<float>(bits); }

float LoadGrad(Gradient g, size_t i) {
  if (g.type == DType::kFloat32) return static_cast<const float*>(g.data)[i];
  const uint16_t bits = static_cast<const uint16_t*>(g.data)[i];
  if (g.type == DType::kFloat16) return protocol::WidenFp16(bits);
  return FloatOf(uint32_t{bits} << 16);
}

// Rounds to nearest, ties away from zero.
uint16_t RoundToBf16(uint32_t bits) { return static_cast<uint16_t>((bits + 0x8000) >> 16); }

// ----------------------------------------------------------------------------------------- the rules

struct Element {
  float w = 0;
  float moments[kMomentsMax] = {};
};

void StepAdam(Optimizer optimizer, const StepScalars& k, float g, Element& e) {
  auto& [a, b, c] = e.moments;
  if (optimizer == Optimizer::kAdam || optimizer == Optimizer::kAdamAmsgrad)
    g = std::fma(k.l2, e.w, g);
  a = std::fma(k.beta1, a, k.one_minus_beta1 * g);
  b = std::fma(k.beta2, b, (k.one_minus_beta2 * g) * g);
  if (optimizer == Optimizer::kLamb) return;
  float largest = b;
  if (optimizer == Optimizer::kAdamWAmsgrad || optimizer == Optimizer::kAdamAmsgrad) {
    if (c < b) c = b;
    largest = c;
  }
  const float denominator = std::fma(std::sqrt(largest), k.inv_sqrt_bias2, k.eps);
  e.w = std::fma(-k.step_size, a / denominator, k.decay * e.w);
}

void StepAdagrad(const StepScalars& k, float g, Element& e) {
  float& a = e.moments[0];
  g = std::fma(k.l2, e.w, g);
  a = std::fma(g, g, a + k.initial_accumulator);
  e.w = std::fma(-k.step_size, g / (std::sqrt(a) + k.eps), e.w);
}

void StepLion(const StepScalars& k, float g, Element& e) {
  float& a = e.moments[0];
  const float mixed = std::fma(k.beta1, a, k.one_minus_beta1 * g);
  const float sign = static_cast<float>(mixed > 0) - static_cast<float>(mixed < 0);
  e.w = std::fma(-k.step_size, sign, k.decay * e.w);
  a = std::fma(k.beta2, a, k.one_minus_beta2 * g);
}

void StepSgd(Optimizer optimizer, const StepScalars& k, float g, Element& e) {
  float& a = e.moments[0];
  g = std::fma(k.l2, e.w, g);
  a = std::fma(k.beta1, a, k.one_minus_beta1 * g);
  const float u = optimizer == Optimizer::kSgdNesterov ? std::fma(k.beta1, a, g) : a;
  e.w = std::fma(-k.step_size, u, e.w);
}

template <Optimizer kOptimizer>
void Step(const StepScalars& k, float grad, Element& e) {
  float g = grad * k.grad_scale;
  if (k.clamps_grad) {
    if (g < k.grad_min) g = k.grad_min;
    if (g > k.grad_max) g = k.grad_max;
  }
  if constexpr (kOptimizer == Optimizer::kAdagrad) {
    StepAdagrad(k, g, e);
  } else if constexpr (kOptimizer == Optimizer::kLion) {
    StepLion(k, g, e);
  } else if constexpr (kOptimizer == Optimizer::kSgd || kOptimizer == Optimizer::kSgdNesterov) {
    StepSgd(kOptimizer, k, g, e);
  } else {
    StepAdam(kOptimizer, k, g, e);
  }
}

// --------------------------------------------------------------------------------------- the masters

uint32_t LoadMaster(StateFormat format, const StatePlanes& from, size_t i) {
  if (format.format == Format::kFp32) {
    if (format.weights != DType::kFloat32) return BitsOf(from.master[i]);
    return BitsOf(static_cast<const float*>(from.weights)[i]);
  }
  const uint16_t weights = static_cast<const uint16_t*>(from.weights)[i];
  return (uint32_t{weights} << 16) + static_cast<uint32_t>(int32_t{from.remainder[i]});
}

void StoreWeight(DType type, uint32_t master, void* weights, size_t i) {
  if (type == DType::kFloat32) {
    static_cast<float*>(weights)[i] = FloatOf(master);
  } else {
    static_cast<uint16_t*>(weights)[i] =
        type == DType::kFloat16 ? protocol::RoundToFp16(master) : RoundToBf16(master);
  }
}

// Returns 1 if the master is non-finite.
template <StateFormat kFormat>
uint64_t StoreMaster(const StatePlanes& to, size_t i, uint32_t bits) {
  StoreWeight(kFormat.weights, bits, to.weights, i);
  if (kHasMaster<kFormat>) to.master[i] = FloatOf(bits);
  if (kHasRemainder<kFormat>) {
    to.remainder[i] = static_cast<int16_t>(bits - (uint32_t{RoundToBf16(bits)} << 16));
  }
  const int32_t non_finite = kWeightsAreMaster<kFormat>           ? kFp32NonFiniteBits
                             : kFormat.weights == DType::kFloat16 ? kFp16NonFiniteBits
                                                                  : kBf16NonFiniteBits;
  return static_cast<int32_t>(bits & 0x7FFFFFFF) >= non_finite ? 1 : 0;
}

// --------------------------------------------------------------------------------------- the moments

uint32_t Hash(const StepScalars& k, uint32_t elem) {
  const uint32_t x = elem * kElemStep + k.rounding_key[0];
  return x ^ (x >> 16);
}

// The random bits of a moment, `bits` of them.
uint32_t RoundingBits(const StepScalars& k, uint32_t hash, size_t moment, int bits) {
  const uint32_t factors[kMomentsMax] = {kFirstRounding, k.rounding_key[1] | 1, kThirdRounding};
  return (hash * factors[moment]) >> (32 - bits);
}

// Byte of element i among the codes of a plane.
size_t CodeAt(size_t i) {
  const size_t e = i % kScaleElems;
  return i - e + 4 * (e % 64 / 2) + 2 * (e / 64) + e % 2;
}

// Moment `index` is a square, whose root is coded.
bool IsSquare(Optimizer optimizer, size_t index) {
  return (kMomentShapes[static_cast<size_t>(optimizer) - 1].squares >> index & 1) != 0;
}

float DecodeCode(Optimizer optimizer, size_t index, const StatePlanes& from, size_t i) {
  const uint8_t code = static_cast<const uint8_t*>(from.moments[index])[CodeAt(i)];
  const float scale = from.scales[index][i / kScaleElems];
  if (!IsSquare(optimizer, index)) return static_cast<float>(static_cast<int8_t>(code)) * scale;
  const float root = static_cast<float>(std::max<uint8_t>(code, 1)) * scale;
  return root * root;
}

float LoadMoment(Optimizer optimizer, Format format, size_t index, const StatePlanes& from,
                 size_t i) {
  if (format == Format::kInt8) return DecodeCode(optimizer, index, from, i);
  if (format == Format::kBf16) {
    return FloatOf(uint32_t{static_cast<const uint16_t*>(from.moments[index])[i]} << 16);
  }
  return static_cast<const float*>(from.moments[index])[i];
}

template <Optimizer kOptimizer, StateFormat kFormat>
Element Load(const StatePlanes& from, size_t i) {
  constexpr size_t kMoments = kMomentShape<kOptimizer>.count;
  Element e{.w = FloatOf(LoadMaster(kFormat, from, i))};
  for (size_t m = 0; m < kMoments; ++m) {
    e.moments[m] = LoadMoment(kOptimizer, kFormat.format, m, from, i);
  }
  return e;
}

// The codes of a group of moments whose first element is `begin`: x[i] becomes moment `index` of element
// begin + i, rounded with the 15 bits of random(i). `x` has kScaleElems elements, 0 behind the last one.
template <typename Random>
void EncodeGroup(bool square, size_t index, float* x, size_t begin, const StatePlanes& to,
                 const Random& random) {
  float largest = 0;
  for (size_t i = 0; i < kScaleElems; ++i) {
    if (square) x[i] = std::min(std::sqrt(x[i]), kRootLimit);
    largest = std::max(largest, std::fabs(x[i]));
  }
  float scale = largest * (square ? kRootUnit : kLinearUnit);
  if (scale < kScaleMin) scale = 0;
  const float inverse = scale > 0 ? 1 / scale : 0;
  auto* const codes = static_cast<uint8_t*>(to.moments[index]);
  for (size_t i = 0; i < kScaleElems; ++i) {
    const uint32_t zero = (square ? kRootZeroBits : kLinearZeroBits) | random(i);
    const auto byte = static_cast<uint8_t>(BitsOf(std::fma(x[i], inverse, FloatOf(zero))) >> 15);
    codes[CodeAt(begin + i)] = square ? byte : byte ^ 0x80;
  }
  to.scales[index][begin / kScaleElems] = scale;
}

template <Optimizer kOptimizer, size_t kIndex>
void Encode(const StepScalars& k, const Element* elements, size_t n, size_t begin,
            const StatePlanes& to) {
  float x[kScaleElems] = {};
  for (size_t i = 0; i < n; ++i) x[i] = elements[i].moments[kIndex];
  EncodeGroup(kIsSquare<kOptimizer, kIndex>, kIndex, x, begin, to, [&](size_t i) {
    const uint32_t hash = Hash(k, static_cast<uint32_t>(to.first_elem + begin + i));
    return RoundingBits(k, hash, kIndex, 15);
  });
}

template <Optimizer kOptimizer, StateFormat kFormat>
void StoreMoments(const StepScalars& k, const Element* elements, size_t n, size_t begin,
                  const StatePlanes& to) {
  constexpr size_t kMoments = kMomentShape<kOptimizer>.count;
  if constexpr (kFormat.format == Format::kInt8) {
    Encode<kOptimizer, 0>(k, elements, n, begin, to);
    if constexpr (kMoments > 1) Encode<kOptimizer, 1>(k, elements, n, begin, to);
    if constexpr (kMoments > 2) Encode<kOptimizer, 2>(k, elements, n, begin, to);
    return;
  }
  for (size_t i = 0; i < n; ++i) {
    const uint32_t hash = Hash(k, static_cast<uint32_t>(to.first_elem + begin + i));
    for (size_t j = 0; j < kMoments; ++j) {
      const float moment = elements[i].moments[j];
      if constexpr (kFormat.format == Format::kBf16) {
        static_cast<uint16_t*>(to.moments[j])[begin + i] =
            static_cast<uint16_t>((BitsOf(moment) + RoundingBits(k, hash, j, 16)) >> 16);
      } else {
        static_cast<float*>(to.moments[j])[begin + i] = moment;
      }
    }
  }
}

// ---------------------------------------------------------------------------------------- the passes

// Saves `count` values of a plane, from value i on, in a slot. Returns the end of the slot, which has room for a whole plane.
template <typename T>
std::byte* SavePlane(const void* plane, size_t i, size_t count, std::byte* to) {
  std::memcpy(to, static_cast<const T*>(plane) + i, count * sizeof(T));
  return to + SavedPlaneBytes(sizeof(T));
}

template <Optimizer kOptimizer, StateFormat kFormat>
void Save(const SavedElems& saved, const StatePlanes& state, size_t i, size_t n,
          uint64_t non_finite) {
  constexpr size_t kMoments = kMomentShape<kOptimizer>.count;
  constexpr Format kStates = kFormat.format;
  const size_t count = std::min(kSavedElems, n - i);
  std::byte* to = saved.slots + i / kSavedElems % 2 * SavedSlotBytes(kOptimizer, kFormat);
  non_finite += saved.non_finite;
  std::memcpy(to, &non_finite, sizeof(non_finite));
  to += kSavedCountBytes;
  to = kWeightsAreMaster<kFormat> ? SavePlane<float>(state.weights, i, count, to)
                                  : SavePlane<uint16_t>(state.weights, i, count, to);
  if (kHasRemainder<kFormat>) to = SavePlane<int16_t>(state.remainder, i, count, to);
  for (size_t m = 0; m < kMoments; ++m) {
    to = kStates == Format::kInt8   ? SavePlane<uint8_t>(state.moments[m], i, kSavedElems, to)
         : kStates == Format::kBf16 ? SavePlane<uint16_t>(state.moments[m], i, count, to)
                                    : SavePlane<float>(state.moments[m], i, count, to);
  }
  for (size_t m = 0; kStates == Format::kInt8 && m < kMoments; ++m) {
    std::memcpy(to, state.scales[m] + i / kScaleElems, sizeof(float));
    to += kSavedScaleBytes;
  }
  if (kHasMaster<kFormat>) SavePlane<float>(state.master, i, count, to);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  saved.done->store(saved.at_first + 2 * i, std::memory_order_relaxed);
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

template <Optimizer kOptimizer, StateFormat kFormat>
uint64_t Run(const StepScalars& k, size_t n, Gradient g, const StatePlanes& state,
             const SavedElems* saved) {
  static_assert(kSavedElems == kScaleElems);
  uint64_t non_finite = 0;
  for (size_t begin = 0; begin < n; begin += kScaleElems) {
    const size_t count = std::min(kScaleElems, n - begin);
    if (saved != nullptr) Save<kOptimizer, kFormat>(*saved, state, begin, n, non_finite);
    Element group[kScaleElems];
    for (size_t i = 0; i < count; ++i) {
      group[i] = Load<kOptimizer, kFormat>(state, begin + i);
      Step<kOptimizer>(k, LoadGrad(g, begin + i), group[i]);
      non_finite += StoreMaster<kFormat>(state, begin + i, BitsOf(group[i].w));
    }
    StoreMoments<kOptimizer, kFormat>(k, group, count, begin, state);
  }
  return non_finite;
}

template <Optimizer kOptimizer, StateFormat kFormat>
uint64_t RunWeights(const StepScalars& k, size_t n, Gradient g, const StatePlanes& state,
                    const SavedElems*) {
  for (size_t i = 0; i < n; ++i) {
    Element e = Load<kOptimizer, kFormat>(state, i);
    Step<kOptimizer>(k, LoadGrad(g, i), e);
    StoreWeight(kFormat.weights, BitsOf(e.w), state.new_weights, i);
  }
  return 0;
}

template <StateFormat kFormat>
void Direction(const StepScalars& k, size_t n, const StatePlanes& from, float* w, float* u) {
  for (size_t i = 0; i < n; ++i) {
    const Element e = Load<Optimizer::kLamb, kFormat>(from, i);
    const float root = std::fma(std::sqrt(e.moments[1]), k.inv_sqrt_bias2, k.eps);
    w[i] = e.w;
    u[i] = std::fma(k.decay, e.w, e.moments[0] * k.inv_bias1 / root);
  }
}

template <StateFormat kFormat>
uint64_t Apply(float step_size, size_t n, const float* w, const float* u, const StatePlanes& to) {
  uint64_t non_finite = 0;
  for (size_t i = 0; i < n; ++i) {
    non_finite += StoreMaster<kFormat>(to, i, BitsOf(std::fma(-step_size, u[i], w[i])));
  }
  return non_finite;
}

}  // namespace

#define FOREBAY_KERNELS(format)                                                    \
  {                                                                                \
    FOREBAY_ROW(Run, (Run<Optimizer::kLamb, format>), format),                     \
        FOREBAY_ROW(RunWeights, nullptr, format), Direction<format>, Apply<format> \
  }
const FormatKernels kScalarFormats[kStateFormatCount] = {
    FOREBAY_KERNELS(StateFormat::kFp32),     FOREBAY_KERNELS(StateFormat::kExact),
    FOREBAY_KERNELS(StateFormat::kBf16),     FOREBAY_KERNELS(StateFormat::kInt8),
    FOREBAY_KERNELS(StateFormat::kFp32Bf16), FOREBAY_KERNELS(StateFormat::kFp32Fp16),
};
#undef FOREBAY_KERNELS

}  // namespace forebay::cpu_adam::internal

namespace forebay::cpu_adam {

void DecodeMasters(StateFormat format, size_t n, const StatePlanes& state, float* out) {
  for (size_t i = 0; i < n; ++i) {
    out[i] = std::bit_cast<float>(internal::LoadMaster(format, state, i));
  }
}

void EncodeMasters(StateFormat format, size_t n, const float* masters, const StatePlanes& state) {
  for (size_t i = 0; i < n; ++i) {
    const auto bits = std::bit_cast<uint32_t>(masters[i]);
    internal::StoreWeight(format.weights, bits, state.weights, i);
    if (state.master != nullptr) state.master[i] = masters[i];
    if (state.remainder == nullptr) continue;
    const uint32_t weights = static_cast<const uint16_t*>(state.weights)[i];
    state.remainder[i] = static_cast<int16_t>(bits - (weights << 16));
  }
}

void DecodeMoment(Optimizer optimizer, StateFormat format, size_t moment, ElementRange range,
                  const StatePlanes& state, float* out) {
  for (size_t i = 0; i < range.n; ++i) {
    out[i] = internal::LoadMoment(optimizer, format.format, moment, state, range.first + i);
  }
}

void EncodeMoment(Optimizer optimizer, StateFormat format, size_t moment, size_t n,
                  const float* values, const StatePlanes& state) {
  if (format.format == Format::kInt8) {
    const bool square = internal::IsSquare(optimizer, moment);
    for (size_t begin = 0; begin < n; begin += kScaleElems) {
      float x[kScaleElems] = {};
      std::copy_n(values + begin, std::min(kScaleElems, n - begin), x);
      constexpr uint32_t kHalf = 1U << 14;  // 0.5 in 15 bits
      internal::EncodeGroup(square, moment, x, begin, state, [](size_t) { return kHalf; });
    }
    return;
  }
  for (size_t i = 0; i < n; ++i) {
    if (format.format == Format::kBf16) {
      static_cast<uint16_t*>(state.moments[moment])[i] =
          internal::RoundToBf16(std::bit_cast<uint32_t>(values[i]));
    } else {
      static_cast<float*>(state.moments[moment])[i] = values[i];
    }
  }
}

}  // namespace forebay::cpu_adam
