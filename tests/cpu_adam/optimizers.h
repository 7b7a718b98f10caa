// SPDX-License-Identifier: Apache-2.0
// What the parameterized tests of the kernels run over.
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

// For names of tests, which take letters, digits and underscores alone.
inline std::string NameOf(protocol::Optimizer optimizer) {
  return std::string(protocol::Name(optimizer));
}

inline std::string NameOf(protocol::StateFormat format) {
  return std::string(protocol::Name(format.format)) + "_" + std::string(Name(format.weights));
}

inline size_t MomentCount(protocol::Optimizer optimizer) {
  return protocol::Info(optimizer).moments.size();
}

// Of all optimizers alike: what an optimizer does not have, it does not read.
inline constexpr protocol::HyperParams kHyper = {
    .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 1e-2};

}  // namespace forebay::testing
