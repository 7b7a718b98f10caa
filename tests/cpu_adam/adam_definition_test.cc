// SPDX-License-Identifier: Apache-2.0
// Goal    The scalar AdamW is close to double precision in every step and right at the first and the millionth step. Format
//         `exact` holds the masters of `fp32`.
// Method  Recompute each line of update_kernel.h in double from the same float32 inputs and compare
//         with a bound that is derived below; compare the two formats bit by bit over 30 steps.

#include <algorithm>
#include <limits>
#include <tuple>

#include "cpu_adam/decode.h"
#include "cpu_adam/update_kernel.h"
#include "gtest/gtest.h"
#include "tests/cpu_adam/optimizers.h"
#include "tests/cpu_adam/planes.h"

namespace forebay::cpu_adam {
namespace {

using ::forebay::testing::AdamData;
using ::forebay::testing::kAllOptimizers;
using ::forebay::testing::kGradTypes;
using ::forebay::testing::kHyper;
using ::forebay::testing::NameOf;
using ::forebay::testing::RemainderOf;
using ::forebay::testing::RoundToBf16;
using ::forebay::testing::SameBits;
using ::forebay::testing::TargetGuard;
using protocol::HyperParams;

constexpr double kUnit = 0x1p-24;   // largest relative error of one rounding to float32
constexpr double kTiny = 0x1p-149;  // smallest float32: the error of roundings that underflow
constexpr uint32_t kSeed = 11;

// Spacing of float32 at |x|.
double Ulp(double x) {
  const float magnitude = std::max(static_cast<float>(std::abs(x)), 0x1p-126f);
  return std::ldexp(1.0, std::ilogb(magnitude) - 23);
}

StatePlanes PlanesOf(AdamData& data) {
  return {data.w.data(), nullptr, {data.m.data(), data.v.data()}};
}

void ExpectNear(double actual, double expected, double bound, double largest_term, const char* what,
                size_t i) {
  EXPECT_LE(std::abs(actual - expected), bound * (1 + 1e-6)) << what << " of element " << i;
  EXPECT_LE(std::abs(actual - expected), 4 * Ulp(largest_term)) << what << " of element " << i;
}

// First-order rounding errors, in units u = 2^-24 of the value they are taken of. With grad_scale
// 1, g' = g exactly.
//   m' : u·|(1-β₁)g|, then u·|m'| by the fma.
//   v' : the two products 2u·(1-β₂)g², then u·|v'| by the fma; all terms positive.
//   w' : of the update s·m'/d: u each for the square root, the fma of d and the quotient, within
//        4u; of the decayed weight: u for `decay` (which is below 1), u for the product:
//        2u; then u·|w'| by the last fma. m' and v' are taken as the kernel returned them.
// A product or quotient that underflows adds up to 2^-149 instead.
TEST(AdamDefinition, IsWithinTheDerivedBoundOfDoublePrecisionInEveryStep) {
  const HyperParams hyper = {
      .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1};
  AdamData data(5000, kSeed);
  for (uint64_t t = 1; t <= 10; ++t) {
    const StepScalars s = MakeStepScalars(Optimizer::kAdamW, hyper, t, 1.0f);
    for (float& g : data.grad) g = std::abs(g) > 1e17f ? 1e17f : g;  // v stays finite
    const std::vector<float> w = data.w, m = data.m, v = data.v;
    ASSERT_EQ(Update(Optimizer::kAdamW, StateFormat::kFp32, s, w.size(), data.Grad(DType::kFloat32),
                     PlanesOf(data)),
              0u);
    for (size_t i = 0; i < w.size(); ++i) {
      const double g = data.grad[i];
      const double old_m = double{s.beta1} * m[i], new_m = double{s.one_minus_beta1} * g;
      ExpectNear(data.m[i], old_m + new_m,
                 kUnit * (std::abs(new_m) + std::abs(old_m + new_m)) + 2 * kTiny,
                 std::max(std::abs(old_m), std::abs(new_m)), "m", i);
      const double old_v = double{s.beta2} * v[i], new_v = double{s.one_minus_beta2} * g * g;
      // (1-β₂)g may underflow before it is multiplied by g once more.
      ExpectNear(data.v[i], old_v + new_v,
                 kUnit * (2 * new_v + old_v + new_v) + (2 + std::abs(g)) * kTiny,
                 std::max(old_v, new_v), "v", i);
      const double step = s.step_size;
      const double denominator = std::sqrt(double{data.v[i]}) * s.inv_sqrt_bias2 + s.eps;
      const double update = step * data.m[i] / denominator;
      const double kept = (1.0 - double{static_cast<float>(hyper.lr)} * hyper.weight_decay) * w[i];
      ExpectNear(
          data.w[i], kept - update,
          kUnit * (4 * std::abs(update) + 2 * std::abs(kept) + std::abs(kept - update)) + 3 * kTiny,
          std::max(std::abs(kept), std::abs(update)), "w", i);
      if (HasFailure()) return;
    }
  }
}

TEST(AdamDefinition, TheFirstStepMovesByTheLearningRateWhateverTheGradientsSize) {
  const StepScalars s = MakeStepScalars(
      Optimizer::kAdamW, {.lr = 0.01, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0},
      1, 1.0f);
  for (const float g : {1e-4f, -0.5f, 3.0f, -1e6f}) {
    float w = 1.0f, m = 0, v = 0;
    Update(Optimizer::kAdamW, StateFormat::kFp32, s, 1, {&g, DType::kFloat32},
           {&w, nullptr, {&m, &v}});
    // η·m̂ / (sqrt(v̂) + ε) with m̂ = g, v̂ = g²: five roundings of the update, one of the result;
    // ε shortens the update by ε/|g|.
    const double update = 0.01 * g / (std::abs(double{g}) + 1e-8);
    EXPECT_NEAR(w, 1.0 - update, 0.01 * 8 * kUnit + kUnit);
  }
}

TEST(AdamDefinition, BiasCorrectionIsRightFromTheFirstToTheMillionthStep) {
  const HyperParams hyper = kHyper;
  for (const uint64_t t : {1u, 2u, 10u, 1000u, 1000000u}) {
    const StepScalars s = MakeStepScalars(Optimizer::kAdamW, hyper, t, 1.0f);
    const long double bias1 = 1 - std::pow(0.9L, static_cast<long double>(t));
    const long double bias2 = 1 - std::pow(0.999L, static_cast<long double>(t));
    EXPECT_FLOAT_EQ(s.step_size, static_cast<float>(0.001L / bias1)) << t;
    EXPECT_FLOAT_EQ(s.inv_sqrt_bias2, static_cast<float>(1 / std::sqrt(bias2))) << t;
  }
  EXPECT_EQ(MakeStepScalars(Optimizer::kAdamW, hyper, 1000000, 1.0f).step_size, 0.001f);
  EXPECT_EQ(MakeStepScalars(Optimizer::kAdamW, hyper, 1, 1.0f).one_minus_beta2,
            0.001f);  // unlike 1.0f - 0.999f
  const StepScalars no_momentum = MakeStepScalars(
      Optimizer::kAdamW, {.lr = 1e-3, .beta1 = 0, .beta2 = 0, .eps = 1e-8}, 3, 1.0f);
  EXPECT_EQ(no_momentum.step_size, 0.001f);
  EXPECT_EQ(no_momentum.inv_sqrt_bias2, 1.0f);
}

TEST(AdamDefinition, AGradientScaleIsTheSameAsAScaledGradient) {
  constexpr float kScale = 0.25f;  // a power of two: the product is exact
  AdamData a(1000, kSeed), b(1000, kSeed);
  for (float& g : b.grad) g *= kScale;
  Update(Optimizer::kAdamW, StateFormat::kFp32,
         MakeStepScalars(Optimizer::kAdamW, kHyper, 1, kScale), 1000, a.Grad(DType::kFloat32),
         PlanesOf(a));
  Update(Optimizer::kAdamW, StateFormat::kFp32, MakeStepScalars(Optimizer::kAdamW, kHyper, 1, 1.0f),
         1000, b.Grad(DType::kFloat32), PlanesOf(b));
  EXPECT_TRUE(SameBits(a.w, b.w));
  EXPECT_TRUE(SameBits(a.m, b.m));
  EXPECT_TRUE(SameBits(a.v, b.v));
}

TEST(AdamDefinition, BoundsAreTheSameAsAClampedGradient) {
  constexpr float kScale = 0.25f;
  constexpr float kMin = -1e-3f;
  constexpr float kMax = 2e-3f;
  AdamData a(1000, kSeed), b(1000, kSeed);
  size_t clamped = 0;
  for (float& g : b.grad) {
    const float within = std::clamp(g * kScale, kMin, kMax);
    if (within != g * kScale) ++clamped;
    g = within;
  }
  EXPECT_GT(clamped, 0U);
  EXPECT_LT(clamped, b.grad.size());
  StepScalars bounded = MakeStepScalars(Optimizer::kAdamW, kHyper, 1, kScale);
  SetGradientBounds(kMin, kMax, bounded);
  Update(Optimizer::kAdamW, StateFormat::kFp32, bounded, 1000, a.Grad(DType::kFloat32),
         PlanesOf(a));
  Update(Optimizer::kAdamW, StateFormat::kFp32, MakeStepScalars(Optimizer::kAdamW, kHyper, 1, 1.0f),
         1000, b.Grad(DType::kFloat32), PlanesOf(b));
  EXPECT_TRUE(SameBits(a.w, b.w));
  EXPECT_TRUE(SameBits(a.m, b.m));
  EXPECT_TRUE(SameBits(a.v, b.v));
}

class ExactFormat : public ::testing::TestWithParam<std::tuple<std::string, Optimizer>> {};

TEST_P(ExactFormat, HoldsTheMastersOfFp32AndServesTheirRoundingAtEveryStep) {
  const auto& [target_name, optimizer] = GetParam();
  TargetGuard target;
  target.Force(target_name);
  constexpr size_t kElems = 1013;
  for (const DType type : kGradTypes) {
    AdamData wide(kElems, kSeed), narrow(kElems, kSeed);
    std::vector<uint16_t> weights(kElems), rounded(kElems);
    std::vector<int16_t> remainder(kElems);
    std::vector<float> rebuilt(kElems), wide_third(kElems), narrow_third(kElems);
    std::ranges::transform(narrow.w, weights.begin(), RoundToBf16);
    std::ranges::transform(narrow.w, remainder.begin(), RemainderOf);
    for (uint64_t t = 1; t <= 30; ++t) {
      const AdamData fresh(kElems, kSeed + static_cast<uint32_t>(t));
      const StepScalars s = MakeStepScalars(optimizer,
                                            {.lr = 0.01,
                                             .beta1 = 0.9,
                                             .beta2 = 0.999,
                                             .eps = 1e-8,
                                             .weight_decay = 1e-2,
                                             .momentum = 0.9},
                                            t, 0.5f);
      Update(optimizer, StateFormat::kFp32, s, kElems, fresh.Grad(type),
             {wide.w.data(), nullptr, {wide.m.data(), wide.v.data(), wide_third.data()}});
      const StatePlanes exact = {weights.data(),
                                 remainder.data(),
                                 {narrow.m.data(), narrow.v.data(), narrow_third.data()}};
      Update(optimizer, StateFormat::kExact, s, kElems, fresh.Grad(type), exact);
      DecodeMasters(StateFormat::kExact, kElems, exact, rebuilt.data());
      std::ranges::transform(wide.w, rounded.begin(), RoundToBf16);
      ASSERT_TRUE(SameBits(rebuilt, wide.w)) << "step " << t << ", seed " << kSeed;
      ASSERT_EQ(weights, rounded) << "step " << t << ", seed " << kSeed;
      ASSERT_TRUE(SameBits(narrow.m, wide.m));
      ASSERT_TRUE(SameBits(narrow.v, wide.v));
      ASSERT_TRUE(SameBits(narrow_third, wide_third));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Supported, ExactFormat,
                         ::testing::Combine(::testing::ValuesIn(SupportedTargets()),
                                            ::testing::ValuesIn(kAllOptimizers)),
                         [](const auto& run) {
                           return std::get<0>(run.param) + "_" + NameOf(std::get<1>(run.param));
                         });

}  // namespace
}  // namespace forebay::cpu_adam
