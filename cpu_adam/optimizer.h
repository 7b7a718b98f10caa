// The update rules: what each keeps per element, and the scalars of one of its steps.
#pragma once

#include <cstddef>
#include <cstdint>

namespace forebay::cpu_adam {

// Sources  kAdamW           Loshchilov & Hutter, arXiv:1711.05101, algorithm 2, λ scaled by η
//          kAdam            Kingma & Ba, arXiv:1412.6980, algorithm 1, λ added to the gradient
//          k…Amsgrad        Reddi et al., arXiv:1904.09237, algorithm 2
//          kAdagrad         Duchi et al., JMLR 12 (2011), with the decay of torch.optim.Adagrad
//          kLion            Chen et al., arXiv:2302.06675, algorithm 2
//          kSgd…            torch.optim.SGD with momentum; a momentum of 0 is plain descent
//          kLamb            You et al., arXiv:1904.00962, algorithm 2, with bias correction and φ
//                           the identity: two passes, see lamb.h
enum class Rule : uint8_t {
  kAdamW = 1,
  kAdam,
  kAdamWAmsgrad,
  kAdamAmsgrad,
  kAdagrad,
  kLion,
  kSgd,
  kSgdNesterov,
  kLamb,
};

inline constexpr size_t kMomentsMax = 3;

// Moments of one element: m and v (Adam, LAMB); the largest v too (Amsgrad); v alone (Adagrad); m
// alone (Lion, SGD).
size_t MomentCount(Rule rule);

// What a person sets, per parameter group; defaults as torch.optim.AdamW's. A rule reads the fields
// that it has.
struct Hyper {
  double lr = 1e-3;
  double beta1 = 0.9, beta2 = 0.999;  // in [0, 1)
  double eps = 1e-8;                  // > 0
  double weight_decay = 1e-2;
  double momentum = 0, dampening = 0;            // SGD
  double lr_decay = 0, initial_accumulator = 0;  // Adagrad
};

// Scalars of step t >= 1, computed once per step in double and then rounded to float32.
struct StepScalars {
  float grad_scale;  // multiplied into the gradient first: world mean, clip; 1 changes no bit
  float l2;          // λ of a decay that is added to the gradient
  float decay;       // what a weight keeps: fma(-η, λ, 1); LAMB: λ
  float beta1, one_minus_beta1;  // SGD: momentum, 1 - dampening (1 at t = 1 or momentum 0)
  float beta2, one_minus_beta2;  // 1 - β from double, which 1.0f - β is not (0.999: 5e-5 off)
  float eps;
  float inv_sqrt_bias2;  // 1 / sqrt(1 - β₂ᵗ)
  float step;       // η, times 1 / (1 - β₁ᵗ) (Adam), over 1 + (t - 1)·lr_decay (Adagrad)
  float first;      // Adagrad: the initial accumulator, in the first step
  float inv_bias1;  // LAMB: 1 / (1 - β₁ᵗ)
  uint32_t rounding_key[2];  // of the random draws of a rounding: see RoundingKey
};

// What the random draws of one parameter in one step depend on, besides the element: the key of
// StepScalars for formats that round stochastically.
//
// Source  The finalizer of SplitMix64: Steele, Lea & Flood, OOPSLA 2014.
struct RoundingKey {
  uint64_t seed = 0;
  uint64_t parameter = 0;
  uint64_t t = 0;
};
void SetRoundingKey(const RoundingKey& key, StepScalars& scalars);

// The rounding_bits key is that of RoundingKey{}.
StepScalars MakeStepScalars(Rule rule, const Hyper& hyper, uint64_t t, float grad_scale);

}  // namespace forebay::cpu_adam
