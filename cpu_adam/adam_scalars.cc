#include <cmath>

#include "cpu_adam/adam_kernel.h"

namespace forebay::cpu_adam {

AdamScalars MakeAdamScalars(const AdamHyper& hyper, uint64_t t, float grad_scale) {
  const auto steps = static_cast<double>(t);
  // 1 - βᵗ by expm1: right for β near 1 and small t, where the difference would cancel.
  const double bias1 = hyper.beta1 == 0 ? 1.0 : -std::expm1(steps * std::log(hyper.beta1));
  const double bias2 = hyper.beta2 == 0 ? 1.0 : -std::expm1(steps * std::log(hyper.beta2));
  return {
      .lr = static_cast<float>(hyper.lr),
      .beta1 = static_cast<float>(hyper.beta1),
      .beta2 = static_cast<float>(hyper.beta2),
      .eps = static_cast<float>(hyper.eps),
      .weight_decay = static_cast<float>(hyper.weight_decay),
      .inv_bias1 = static_cast<float>(1.0 / bias1),
      .inv_sqrt_bias2 = static_cast<float>(1.0 / std::sqrt(bias2)),
      .one_minus_beta1 = static_cast<float>(1.0 - hyper.beta1),
      .one_minus_beta2 = static_cast<float>(1.0 - hyper.beta2),
      .grad_scale = grad_scale,
  };
}

}  // namespace forebay::cpu_adam
