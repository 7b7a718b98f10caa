// SPDX-License-Identifier: Apache-2.0
// Types, optimizers and formats, for kernels at compile time. This file has numbers and no functions: it is the one header of
// Forebay that a kernel's contract includes (optimizer.h has the rest of the table).
#pragma once

#include <cstddef>
#include <cstdint>

namespace forebay::protocol {

// Element types of parameters, gradients and states.
enum class DType : uint8_t {
  kFloat32 = 1,
  kBFloat16 = 2,
  kFloat16 = 3,
  kInt16 = 4,
  kInt8 = 5,
  kUInt8 = 6,
};

// Sources  kAdamW           Loshchilov & Hutter, arXiv:1711.05101, algorithm 2, λ scaled by η
//          kAdam            Kingma & Ba, arXiv:1412.6980, algorithm 1, λ added to the gradient
//          k…Amsgrad        Reddi et al., arXiv:1904.09237, algorithm 2
//          kAdagrad         Duchi et al., JMLR 12 (2011), with the decay of torch.optim.Adagrad
//          kLion            Chen et al., arXiv:2302.06675, algorithm 2
//          kSgd…            torch.optim.SGD with momentum; a momentum of 0 is plain descent
//          kLamb            You et al., arXiv:1904.00962, algorithm 2, with bias correction and φ
//                           the identity: two passes, see cpu_adam/lamb.h
enum class Optimizer : uint8_t {
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
inline constexpr size_t kOptimizerCount = 9;

// Number of moments that an optimizer has per element. If bit i of `squares` is set, moment i is a mean or sum of squares,
// which is never negative.
struct MomentShape {
  uint8_t count;
  uint8_t squares;
};
// Moments of each optimizer, at the index of its number less 1.
inline constexpr MomentShape kMomentShapes[kOptimizerCount] = {
    {2, 0b010}, {2, 0b010}, {3, 0b110}, {3, 0b110}, {1, 0b001}, {1, 0}, {1, 0}, {1, 0}, {2, 0b010},
};
inline constexpr size_t kMomentsMax = 3;

// Storage of masters and moments: docs/reference/formats.md.
enum class Format : uint8_t { kFp32 = 1, kExact = 2, kBf16 = 3, kInt8 = 4 };

// A format and the type of the weights. These two and the optimizer determine the planes of a state.
struct StateFormat {
  Format format;
  DType weights;

  static const StateFormat kFp32;      // with float32 weights, which are the master
  static const StateFormat kExact;     // with bfloat16 weights
  static const StateFormat kBf16;      // with bfloat16 weights
  static const StateFormat kInt8;      // with bfloat16 weights
  static const StateFormat kFp32Bf16;  // kFp32 with bfloat16 weights
  static const StateFormat kFp32Fp16;  // kFp32 with float16 weights
};
inline constexpr StateFormat StateFormat::kFp32 = {Format::kFp32, DType::kFloat32};
inline constexpr StateFormat StateFormat::kExact = {Format::kExact, DType::kBFloat16};
inline constexpr StateFormat StateFormat::kBf16 = {Format::kBf16, DType::kBFloat16};
inline constexpr StateFormat StateFormat::kInt8 = {Format::kInt8, DType::kBFloat16};
inline constexpr StateFormat StateFormat::kFp32Bf16 = {Format::kFp32, DType::kBFloat16};
inline constexpr StateFormat StateFormat::kFp32Fp16 = {Format::kFp32, DType::kFloat16};

inline constexpr size_t kStateFormatCount = 6;
inline constexpr StateFormat kStateFormats[kStateFormatCount] = {
    StateFormat::kFp32, StateFormat::kExact,    StateFormat::kBf16,
    StateFormat::kInt8, StateFormat::kFp32Bf16, StateFormat::kFp32Fp16,
};

// Elements that share a scale in format int8. In this format each parameter and each partition starts on a
// multiple of it, so that no scale is shared between two.
inline constexpr uint64_t kScaleElems = 128;

}  // namespace forebay::protocol
