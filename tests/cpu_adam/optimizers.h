// SPDX-License-Identifier: Apache-2.0
// Optimizers, names of test cases and hyperparameters for the parameterized tests of the kernels.
#pragma once

#include <array>
#include <cstddef>
#include <string>

#include "cpu_adam/step_scalars.h"
#include "protocol/optimizer.h"

namespace forebay::testing {

inline constexpr std::array<protocol::Optimizer, protocol::kOptimizerCount> kAllOptimizers = [] {
  std::array<protocol::Optimizer, protocol::kOptimizerCount> all{};
  for (size_t i = 0; i < all.size(); ++i) all[i] = protocol::kOptimizers[i].optimizer;
  return all;
}();

// Names for tests, which may contain only letters, digits and underscores.
inline std::string NameOf(protocol::Optimizer optimizer) {
  return std::string(protocol::Name(optimizer));
}

inline std::string NameOf(protocol::StateFormat format) {
  return std::string(protocol::Name(format.format)) + "_" + std::string(Name(format.weights));
}

inline size_t MomentCount(protocol::Optimizer optimizer) {
  return protocol::Info(optimizer).moments.size();
}

// Hyperparameters for all optimizers. Each optimizer reads only its own.
inline constexpr protocol::HyperParams kHyper = {
    .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 1e-2};

}  // namespace forebay::testing
