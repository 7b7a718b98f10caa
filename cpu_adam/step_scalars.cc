// SPDX-License-Identifier: Apache-2.0
#include "cpu_adam/step_scalars.h"

#include <cmath>

namespace forebay::cpu_adam {
namespace {

using protocol::HyperParams;

// 1 - βᵗ by expm1: accurate for β near 1 and small t, where the difference would cancel.
double BiasOf(double beta, double t) { return beta == 0 ? 1.0 : -std::expm1(t * std::log(beta)); }

bool AddsDecayToGradient(Optimizer optimizer) {
  return optimizer != Optimizer::kAdamW && optimizer != Optimizer::kAdamWAmsgrad &&
         optimizer != Optimizer::kLion && optimizer != Optimizer::kLamb;
}

uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

}  // namespace

void SetRoundingKey(const RoundingKey& key, StepScalars& scalars) {
  constexpr uint64_t kGolden = 0x9E3779B97F4A7C15u;
  const uint64_t mixed = Mix(Mix(Mix(key.seed + kGolden) + key.parameter + kGolden) + key.t);
  scalars.rounding_key[0] = static_cast<uint32_t>(mixed);
  scalars.rounding_key[1] = static_cast<uint32_t>(mixed >> 32);
}

void SetGradientBounds(float min, float max, StepScalars& scalars) {
  scalars.clamps_grad = true;
  scalars.grad_min = min;
  scalars.grad_max = max;
}

StepScalars MakeStepScalars(Optimizer optimizer, const HyperParams& hyper, uint64_t t,
                            float grad_scale) {
  const auto steps = static_cast<double>(t);
  const auto lr = static_cast<float>(hyper.lr);
  const auto weight_decay = static_cast<float>(hyper.weight_decay);
  StepScalars s{};
  SetRoundingKey({}, s);
  s.grad_scale = grad_scale;
  if (AddsDecayToGradient(optimizer)) {
    s.l2 = weight_decay;
    s.decay = 1.0f;
  } else if (optimizer == Optimizer::kLamb) {
    s.decay = weight_decay;
  } else {
    s.decay = std::fma(-lr, weight_decay, 1.0f);
  }
  s.eps = static_cast<float>(hyper.eps);
  s.step_size = lr;
  switch (optimizer) {
    case Optimizer::kSgd:
    case Optimizer::kSgdNesterov:
      s.beta1 = static_cast<float>(hyper.momentum);
      s.one_minus_beta1 =
          t == 1 || hyper.momentum == 0 ? 1.0f : static_cast<float>(1.0 - hyper.dampening);
      return s;
    case Optimizer::kAdagrad:
      s.step_size = static_cast<float>(hyper.lr / (1.0 + (steps - 1.0) * hyper.lr_decay));
      s.initial_accumulator = t == 1 ? static_cast<float>(hyper.initial_accumulator_value) : 0.0f;
      return s;
    case Optimizer::kAdamW:
    case Optimizer::kAdam:
    case Optimizer::kAdamWAmsgrad:
    case Optimizer::kAdamAmsgrad:
      s.step_size = lr * static_cast<float>(1.0 / BiasOf(hyper.beta1, steps));
      s.inv_sqrt_bias2 = static_cast<float>(1.0 / std::sqrt(BiasOf(hyper.beta2, steps)));
      break;
    case Optimizer::kLamb:
      s.inv_bias1 = static_cast<float>(1.0 / BiasOf(hyper.beta1, steps));
      s.inv_sqrt_bias2 = static_cast<float>(1.0 / std::sqrt(BiasOf(hyper.beta2, steps)));
      break;
    case Optimizer::kLion:
      break;
  }
  s.beta1 = static_cast<float>(hyper.beta1);
  s.beta2 = static_cast<float>(hyper.beta2);
  s.one_minus_beta1 = static_cast<float>(1.0 - hyper.beta1);
  s.one_minus_beta2 = static_cast<float>(1.0 - hyper.beta2);
  return s;
}

}  // namespace forebay::cpu_adam
