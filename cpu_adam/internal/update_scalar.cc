// The definition of an update: one element at a time, every rounding written out.

#include <bit>
#include <cmath>

#include "cpu_adam/internal/float16.h"
#include "cpu_adam/internal/kernel_table.h"

namespace forebay::cpu_adam::internal {
namespace {

float LoadGrad(Gradient g, size_t i) {
  if (g.type == GradType::kFp32) return static_cast<const float*>(g.data)[i];
  const uint16_t bits = static_cast<const uint16_t*>(g.data)[i];
  if (g.type == GradType::kFp16) return WidenFp16(bits);
  return std::bit_cast<float>(uint32_t{bits} << 16);
}

struct Element {
  float w = 0;
  float moments[kMomentsMax] = {};
};

void StepAdam(Rule rule, const StepScalars& k, float g, Element& e) {
  auto& [a, b, c] = e.moments;
  if (rule == Rule::kAdam || rule == Rule::kAdamAmsgrad) g = std::fma(k.l2, e.w, g);
  a = std::fma(k.beta1, a, k.one_minus_beta1 * g);
  b = std::fma(k.beta2, b, (k.one_minus_beta2 * g) * g);
  float largest = b;
  if (rule == Rule::kAdamWAmsgrad || rule == Rule::kAdamAmsgrad) {
    if (c < b) c = b;
    largest = c;
  }
  const float denominator = std::fma(std::sqrt(largest), k.inv_sqrt_bias2, k.eps);
  e.w = std::fma(-k.step, a / denominator, k.decay * e.w);
}

void StepAdagrad(const StepScalars& k, float g, Element& e) {
  float& a = e.moments[0];
  g = std::fma(k.l2, e.w, g);
  a = std::fma(g, g, a + k.first);
  e.w = std::fma(-k.step, g / (std::sqrt(a) + k.eps), e.w);
}

void StepLion(const StepScalars& k, float g, Element& e) {
  float& a = e.moments[0];
  const float mixed = std::fma(k.beta1, a, k.one_minus_beta1 * g);
  const float sign = static_cast<float>(mixed > 0) - static_cast<float>(mixed < 0);
  e.w = std::fma(-k.step, sign, k.decay * e.w);
  a = std::fma(k.beta2, a, k.one_minus_beta2 * g);
}

void StepSgd(Rule rule, const StepScalars& k, float g, Element& e) {
  float& a = e.moments[0];
  g = std::fma(k.l2, e.w, g);
  a = std::fma(k.beta1, a, k.one_minus_beta1 * g);
  const float u = rule == Rule::kSgdNesterov ? std::fma(k.beta1, a, g) : a;
  e.w = std::fma(-k.step, u, e.w);
}

template <Rule kRule>
void Step(const StepScalars& k, float grad, Element& e) {
  const float g = grad * k.grad_scale;
  if constexpr (kRule == Rule::kAdagrad) {
    StepAdagrad(k, g, e);
  } else if constexpr (kRule == Rule::kLion) {
    StepLion(k, g, e);
  } else if constexpr (kRule == Rule::kSgd || kRule == Rule::kSgdNesterov) {
    StepSgd(kRule, k, g, e);
  } else {
    StepAdam(kRule, k, g, e);
  }
}

bool Reaches(uint32_t bits, int32_t bad_bits) {
  return static_cast<int32_t>(bits & 0x7FFFFFFF) >= bad_bits;
}

uint32_t LoadMaster(StateFormat format, const StatePlanes& from, size_t i) {
  if (format == StateFormat::kFp32) {
    return std::bit_cast<uint32_t>(static_cast<const float*>(from.image)[i]);
  }
  const uint16_t image = static_cast<const uint16_t*>(from.image)[i];
  return (uint32_t{image} << 16) + static_cast<uint32_t>(int32_t{from.remainder[i]});
}

void StoreMaster(StateFormat format, const StatePlanes& to, size_t i, uint32_t bits) {
  if (format == StateFormat::kFp32) {
    static_cast<float*>(to.image)[i] = std::bit_cast<float>(bits);
    return;
  }
  const auto image = static_cast<uint16_t>((bits + 0x8000) >> 16);
  static_cast<uint16_t*>(to.image)[i] = image;
  to.remainder[i] = static_cast<int16_t>(bits - (uint32_t{image} << 16));
}

template <Rule kRule, StateFormat kFormat>
uint64_t Run(const StepScalars& k, size_t n, Gradient g, const StatePlanes& from,
             const StatePlanes& to) {
  const size_t moments = MomentCount(kRule);
  const int32_t bad_bits = kFormat == StateFormat::kFp32 ? kFp32BadBits : kExactBadBits;
  uint64_t bad = 0;
  for (size_t i = 0; i < n; ++i) {
    Element e{.w = std::bit_cast<float>(LoadMaster(kFormat, from, i))};
    for (size_t j = 0; j < moments; ++j) e.moments[j] = from.moments[j][i];
    Step<kRule>(k, LoadGrad(g, i), e);
    const uint32_t bits = std::bit_cast<uint32_t>(e.w);
    StoreMaster(kFormat, to, i, bits);
    for (size_t j = 0; j < moments; ++j) to.moments[j][i] = e.moments[j];
    bad += Reaches(bits, bad_bits) ? 1 : 0;
  }
  return bad;
}

}  // namespace

#define FOREBAY_FORMATS(rule) \
  { Run<rule, StateFormat::kFp32>, Run<rule, StateFormat::kExact> }
const UpdateKernels kScalarUpdateKernels = {{
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

}  // namespace forebay::cpu_adam::internal
