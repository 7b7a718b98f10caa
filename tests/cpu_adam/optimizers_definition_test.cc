// SPDX-License-Identifier: Apache-2.0
// Goal    Each optimizer matches its source: every step is close to double precision, and the scalars of the first, second and
//         millionth step are right.
// Method  Recompute every result in double from the float32 inputs of the step and compare within 4
//         ulp of the largest term that it was summed from; check scalars and single steps by hand.

#include <algorithm>
#include <cmath>

#include "cpu_adam/update_kernel.h"
#include "gtest/gtest.h"
#include "tests/cpu_adam/optimizers.h"
#include "tests/cpu_adam/planes.h"

namespace forebay::cpu_adam {
namespace {

using ::forebay::testing::AdamData;
using ::forebay::testing::kAllOptimizers;
using ::forebay::testing::kHyper;
using ::forebay::testing::MomentCount;
using ::forebay::testing::NameOf;
using protocol::HyperParams;

constexpr uint32_t kSeed = 77;

// A sum in double, and its largest term.
struct Sum {
  double value = 0;
  double largest_term = 0;
};

Sum Add(double x, double y) { return {x + y, std::max(std::abs(x), std::abs(y))}; }

// Spacing of float32 at |x|.
double Ulp(double x) {
  const float magnitude = std::max(static_cast<float>(std::abs(x)), 0x1p-126f);
  return std::ldexp(1.0, std::ilogb(magnitude) - 23);
}

// Expected results of a step for one element. They start from the gradient, scaled and with weight decay, rounded to float32:
// cancellation in that sum is not the optimizer's error.
struct Expected {
  Sum w;
  Sum moments[kMomentsMax];
};

Expected Adam(Optimizer optimizer, const StepScalars& k, double g, double w, const double* old) {
  Expected e;
  e.moments[0] = Add(double{k.beta1} * old[0], double{k.one_minus_beta1} * g);
  e.moments[1] = Add(double{k.beta2} * old[1], double{k.one_minus_beta2} * g * g);
  if (optimizer == Optimizer::kLamb) {  // LAMB moves its weights in the second pass
    e.w = {w, w};
    return e;
  }
  double largest = e.moments[1].value;
  if (MomentCount(optimizer) == 3) {
    largest = std::max(old[2], largest);
    e.moments[2] = {largest, e.moments[1].largest_term};
  }
  const double denominator = std::sqrt(largest) * k.inv_sqrt_bias2 + k.eps;
  e.w = Add(double{k.decay} * w, -double{k.step_size} * e.moments[0].value / denominator);
  return e;
}

Expected Other(Optimizer optimizer, const StepScalars& k, double g, double w, double old) {
  Expected e;
  if (optimizer == Optimizer::kAdagrad) {
    e.moments[0] = Add(old + k.initial_accumulator, g * g);
    e.w = Add(w, -double{k.step_size} * g / (std::sqrt(e.moments[0].value) + k.eps));
    return e;
  }
  if (optimizer == Optimizer::kLion) {
    const double mixed = double{k.beta1} * old + double{k.one_minus_beta1} * g;
    const double sign = mixed > 0 ? 1 : mixed < 0 ? -1 : 0;
    e.w = Add(double{k.decay} * w, -double{k.step_size} * sign);
    e.moments[0] = Add(double{k.beta2} * old, double{k.one_minus_beta2} * g);
    return e;
  }
  e.moments[0] = Add(double{k.beta1} * old, double{k.one_minus_beta1} * g);
  const double buffer = e.moments[0].value;
  e.w = Add(w, -double{k.step_size} *
                   (optimizer == Optimizer::kSgdNesterov ? k.beta1 * buffer + g : buffer));
  return e;
}

class OptimizerDefinition : public ::testing::TestWithParam<Optimizer> {};

// Products, quotient and root round by half an ulp each, and the sum by another half. At most six such roundings enter a
// result. If a sum cancels, the bound is in ulp of its largest term.
TEST_P(OptimizerDefinition, IsWithinFourUlpOfDoublePrecisionInEveryStep) {
  const Optimizer optimizer = GetParam();
  const HyperParams hyper = {.lr = 1e-3,
                             .beta1 = 0.9,
                             .beta2 = 0.999,
                             .eps = 1e-8,
                             .weight_decay = 0.1,
                             .momentum = 0.9,
                             .dampening = 0.25,
                             .lr_decay = 0.01,
                             .initial_accumulator_value = 0.1};
  AdamData data(1000, kSeed);
  for (float& v : data.v) v += 1e-12f;  // avoids the root of a denormal
  std::vector<float> largest = data.v;
  for (uint64_t t = 1; t <= 10; ++t) {
    const StepScalars k = MakeStepScalars(optimizer, hyper, t, 0.5f);
    AdamData fresh(data.w.size(), kSeed + static_cast<uint32_t>(t));
    for (float& g : fresh.grad) g = std::clamp(g, -1e3f, 1e3f);
    const std::vector<float> w = data.w;
    const std::vector<float> old[] = {data.m, data.v, largest};
    const StatePlanes state = {.weights = data.w.data(),
                               .moments = {data.m.data(), data.v.data(), largest.data()}};
    if (MomentCount(optimizer) == 1 && optimizer == Optimizer::kAdagrad) {
      for (float& m : data.m) m = std::abs(m);
    }
    const std::vector<float> first = data.m;
    ASSERT_EQ(
        Update(optimizer, StateFormat::kFp32, k, w.size(), fresh.Grad(DType::kFloat32), state), 0u);
    for (size_t i = 0; i < w.size(); ++i) {
      const double g = std::fma(k.l2, w[i], fresh.grad[i] * k.grad_scale);
      const double moments[] = {first[i], old[1][i], old[2][i]};
      const Expected e = MomentCount(optimizer) >= 2 ? Adam(optimizer, k, g, w[i], moments)
                                                     : Other(optimizer, k, g, w[i], moments[0]);
      const float* const now[] = {&data.m[i], &data.v[i], &largest[i]};
      for (size_t j = 0; j < MomentCount(optimizer); ++j) {
        ASSERT_LE(std::abs(*now[j] - e.moments[j].value), 4 * Ulp(e.moments[j].largest_term))
            << "moment " << j << " of element " << i << " in step " << t;
      }
      ASSERT_LE(std::abs(data.w[i] - e.w.value), 4 * Ulp(e.w.largest_term))
          << "element " << i << " in step " << t;
    }
  }
}

// Gradients of 0.5 to 1, weights of 0.5 to 1.5 and decays that are not negative: no sum of moments cancels. Let u = 2^-24.
// Relative error of a moment in step t: at most 6t·u (a product, a fused sum and their inputs round three times, the scaled and
// decayed gradient three times more). Relative error of an update: (12t + 16)·u, from its moments, a root, a quotient, a
// product and a sum. Error of a weight: the sum of its updates' errors, and three roundings in every step.
TEST_P(OptimizerDefinition, StaysWithinTheDerivedBoundOverTenSteps) {
  const Optimizer optimizer = GetParam();
  constexpr double kUnit = 0x1p-24;
  constexpr size_t kElems = 500;
  const HyperParams hyper = {.lr = 1e-3,
                             .beta1 = 0.9,
                             .beta2 = 0.999,
                             .eps = 1e-8,
                             .weight_decay = 0.1,
                             .momentum = 0.9,
                             .initial_accumulator_value = 0.1};
  std::mt19937 random(kSeed);
  std::uniform_real_distribution<float> half_to_one(0.5f, 1.0f);
  std::vector<float> w(kElems), moments[kMomentsMax];
  for (float& x : w) x = 2 * half_to_one(random) - 0.5f;
  std::vector<double> exact_w(w.begin(), w.end()), exact[kMomentsMax], bound(kElems, 0.0);
  for (size_t m = 0; m < kMomentsMax; ++m) {
    moments[m].assign(kElems, 0.0f);
    exact[m].assign(kElems, 0.0);
  }
  const StatePlanes state = {.weights = w.data(),
                             .moments = {moments[0].data(), moments[1].data(), moments[2].data()}};
  for (uint64_t t = 1; t <= 10; ++t) {
    const StepScalars k = MakeStepScalars(optimizer, hyper, t, 1.0f);
    std::vector<float> g(kElems);
    for (float& x : g) x = half_to_one(random);
    ASSERT_EQ(Update(optimizer, StateFormat::kFp32, k, kElems, {g.data(), DType::kFloat32}, state),
              0u);
    for (size_t i = 0; i < kElems; ++i) {
      const double decayed = double{g[i]} + double{k.l2} * exact_w[i];
      const double old[] = {exact[0][i], exact[1][i], exact[2][i]};
      const Expected e = MomentCount(optimizer) >= 2
                             ? Adam(optimizer, k, decayed, exact_w[i], old)
                             : Other(optimizer, k, decayed, exact_w[i], old[0]);
      const auto steps = static_cast<double>(t);
      bound[i] += std::abs(e.w.value - exact_w[i]) * (12 * steps + 16) * kUnit +
                  3 * kUnit * std::abs(exact_w[i]);
      exact_w[i] = e.w.value;
      for (size_t m = 0; m < MomentCount(optimizer); ++m) {
        exact[m][i] = e.moments[m].value;
        ASSERT_LE(std::abs(moments[m][i] - exact[m][i]), 6 * steps * kUnit * exact[m][i])
            << "moment " << m << " of element " << i << " in step " << t;
      }
      ASSERT_LE(std::abs(w[i] - exact_w[i]), bound[i]) << "element " << i << " in step " << t;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Every, OptimizerDefinition, ::testing::ValuesIn(kAllOptimizers),
                         [](const auto& run) { return NameOf(run.param); });

TEST(MakeStepScalars, DecayGoesToTheWeightOrToTheGradient) {
  for (const Optimizer optimizer : kAllOptimizers) {
    const StepScalars k = MakeStepScalars(
        optimizer, {.lr = 0.5, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.25}, 1,
        1.0f);
    const bool to_weight = optimizer == Optimizer::kAdamW ||
                           optimizer == Optimizer::kAdamWAmsgrad || optimizer == Optimizer::kLion;
    if (optimizer == Optimizer::kLamb) {  // LAMB adds the decay to the direction
      EXPECT_EQ(k.decay, 0.25f);
      EXPECT_EQ(k.l2, 0.0f);
      continue;
    }
    EXPECT_EQ(k.decay, to_weight ? 0.875f : 1.0f) << NameOf(optimizer);
    EXPECT_EQ(k.l2, to_weight ? 0.0f : 0.25f) << NameOf(optimizer);
  }
}

TEST(MakeStepScalars, SgdDampensFromItsSecondStepOn) {
  const HyperParams hyper = {.momentum = 0.9, .dampening = 0.25};
  EXPECT_EQ(MakeStepScalars(Optimizer::kSgd, hyper, 1, 1.0f).one_minus_beta1, 1.0f);
  EXPECT_EQ(MakeStepScalars(Optimizer::kSgd, hyper, 2, 1.0f).one_minus_beta1, 0.75f);
}

TEST(MakeStepScalars, SgdWithoutMomentumDampensNothing) {
  const HyperParams hyper = {.momentum = 0, .dampening = 0.25};
  EXPECT_EQ(MakeStepScalars(Optimizer::kSgd, hyper, 2, 1.0f).one_minus_beta1, 1.0f);
}

TEST(MakeStepScalars, AdagradDecaysItsRateAndStartsItsAccumulatorOnce) {
  const HyperParams hyper = {.lr = 0.1,
                             .beta1 = 0.9,
                             .beta2 = 0.999,
                             .eps = 1e-8,
                             .lr_decay = 0.5,
                             .initial_accumulator_value = 0.1};
  EXPECT_EQ(MakeStepScalars(Optimizer::kAdagrad, hyper, 1, 1.0f).step_size, 0.1f);
  EXPECT_EQ(MakeStepScalars(Optimizer::kAdagrad, hyper, 3, 1.0f).step_size, 0.05f);
  EXPECT_EQ(MakeStepScalars(Optimizer::kAdagrad, hyper, 1, 1.0f).initial_accumulator, 0.1f);
  EXPECT_EQ(MakeStepScalars(Optimizer::kAdagrad, hyper, 2, 1.0f).initial_accumulator, 0.0f);
}

TEST(OptimizerStep, LionMovesByItsRateOrNotAtAll) {
  const StepScalars k = MakeStepScalars(
      Optimizer::kLion, {.lr = 0.25, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0},
      1, 1.0f);
  float w[] = {1.0f, 1.0f, 1.0f}, m[] = {0, 0, 0};
  const float g[] = {1e-30f, -5.0f, 0.0f};
  Update(Optimizer::kLion, StateFormat::kFp32, k, 3, {g, DType::kFloat32},
         {.weights = w, .moments = {m}});
  EXPECT_EQ(w[0], 0.75f);
  EXPECT_EQ(w[1], 1.25f);
  EXPECT_EQ(w[2], 1.0f);
}

TEST(OptimizerStep, AmsgradKeepsTheLargestSecondMoment) {
  const StepScalars k = MakeStepScalars(Optimizer::kAdamWAmsgrad, kHyper, 1, 1.0f);
  float w[] = {1.0f, 1.0f}, m[] = {0, 0}, v[] = {0, 0}, largest[] = {4.0f, 0.0f};
  const float g[] = {1.0f, 1.0f};
  Update(Optimizer::kAdamWAmsgrad, StateFormat::kFp32, k, 2, {g, DType::kFloat32},
         {.weights = w, .moments = {m, v, largest}});
  EXPECT_EQ(largest[0], 4.0f);
  EXPECT_EQ(largest[1], v[1]);
  EXPECT_LT(v[0], 1.0f);
}

}  // namespace
}  // namespace forebay::cpu_adam
