// The definition of a step: one element at a time, every rounding written out.

#include <bit>
#include <cmath>

#include "cpu_adam/internal/kernel_table.h"

namespace forebay::cpu_adam::internal {
namespace {

float LoadGrad(Gradient g, size_t i) {
  if (g.type == GradType::kFp32) return static_cast<const float*>(g.data)[i];
  return std::bit_cast<float>(uint32_t{static_cast<const uint16_t*>(g.data)[i]} << 16);
}

struct Element {
  float w, m, v;
};

Element Step(const StepConstants& k, float grad, const Element& old) {
  const float g = grad * k.grad_scale;
  const float m = std::fma(k.beta1, old.m, k.one_minus_beta1 * g);
  const float v = std::fma(k.beta2, old.v, (k.one_minus_beta2 * g) * g);
  const float denominator = std::fma(std::sqrt(v), k.inv_sqrt_bias2, k.eps);
  const float w = std::fma(-k.step, m / denominator, k.decay * old.w);
  return {.w = w, .m = m, .v = v};
}

bool Reaches(uint32_t bits, int32_t bad_bits) {
  return static_cast<int32_t>(bits & 0x7FFFFFFF) >= bad_bits;
}

uint64_t StepFp32(const StepConstants& k, size_t n, Gradient g, const Fp32Planes& from,
                  const Fp32Planes& to) {
  uint64_t bad = 0;
  for (size_t i = 0; i < n; ++i) {
    const Element now = Step(k, LoadGrad(g, i), {.w = from.w[i], .m = from.m[i], .v = from.v[i]});
    to.w[i] = now.w;
    to.m[i] = now.m;
    to.v[i] = now.v;
    bad += Reaches(std::bit_cast<uint32_t>(now.w), kFp32BadBits) ? 1 : 0;
  }
  return bad;
}

uint64_t StepExact(const StepConstants& k, size_t n, Gradient g, const ExactPlanes& from,
                   const ExactPlanes& to) {
  uint64_t bad = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t old_bits =
        (uint32_t{from.param[i]} << 16) + static_cast<uint32_t>(int32_t{from.remainder[i]});
    const Element now = Step(k, LoadGrad(g, i),
                             {.w = std::bit_cast<float>(old_bits), .m = from.m[i], .v = from.v[i]});
    const uint32_t bits = std::bit_cast<uint32_t>(now.w);
    const auto param = static_cast<uint16_t>((bits + 0x8000) >> 16);
    to.param[i] = param;
    to.remainder[i] = static_cast<int16_t>(bits - (uint32_t{param} << 16));
    to.m[i] = now.m;
    to.v[i] = now.v;
    bad += Reaches(bits, kExactBadBits) ? 1 : 0;
  }
  return bad;
}

}  // namespace

const StepKernels kScalarStepKernels = {.fp32 = StepFp32, .exact = StepExact};

}  // namespace forebay::cpu_adam::internal
