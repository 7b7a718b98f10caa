// SPDX-License-Identifier: Apache-2.0
// The scalars of one step of an optimizer, from hyper-parameters and the number of the step.
#pragma once

#include <cstdint>

#include "cpu_adam/update_kernel.h"
#include "protocol/optimizer.h"

namespace forebay::cpu_adam {

// Computes the scalars of step t >= 1 in double, and rounds them to float32. The rounding key is that of RoundingKey{}.
StepScalars MakeStepScalars(Optimizer optimizer, const protocol::HyperParams& hyper, uint64_t t,
                            float grad_scale);

// Sets the bounds of the scaled gradient: min < 0 < max.
void SetGradientBounds(float min, float max, StepScalars& scalars);

// Inputs of the stochastic rounding of one parameter in one step, besides the element. SetRoundingKey makes the rounding key of
// StepScalars from them.
//
// Source  The finalizer of SplitMix64: Steele, Lea & Flood, OOPSLA 2014.
struct RoundingKey {
  uint64_t seed = 0;
  uint64_t parameter = 0;
  uint64_t t = 0;
};
void SetRoundingKey(const RoundingKey& key, StepScalars& scalars);

}  // namespace forebay::cpu_adam
