// SPDX-License-Identifier: Apache-2.0
// The table of optimizers: names, moments, passes, hyper-parameters and state planes. Daemon,
// clients, kernels and tools take all of these from here.
//
// A new optimizer touches: optimizer_ids.h (number, moments), this file (its entry; fields for new
// hyper-parameters, which raise kProtocolVersion), cpu_adam/step_scalars.cc (scalars of a step),
// cpu_adam/update_kernel.h (definition), cpu_adam/internal/update_scalar.cc and update_simd.inc
// (kernels), client/python/forebay/optimizers.py (its class), and, for new hyper-parameters,
// client/forebay.h.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "protocol/dtype.h"
#include "protocol/optimizer_ids.h"

namespace forebay::protocol {

// ------------------------------------------------------------------------------- hyper-parameters

// Hyper-parameters of one parameter group, named as torch names them. Part of a step request: lies
// in shared memory. An optimizer reads the fields that its entry lists and ignores the others.
struct HyperParams {
  double lr = 0;
  double beta1 = 0;
  double beta2 = 0;
  double eps = 0;
  double weight_decay = 0;
  double momentum = 0;
  double dampening = 0;
  double lr_decay = 0;
  double initial_accumulator_value = 0;
};
static_assert(sizeof(HyperParams) == 72 && std::is_trivially_copyable_v<HyperParams>);

// Values that an optimizer can use. The kernels compute in float32.
enum class HyperRange : uint8_t {
  kFinite,       // finite in float32
  kNotNegative,  // 0 or above
  kPositive,     // above 0: the smallest normal float32 or more
  kFraction,     // in [0, 1)
  kZero,         // 0 alone
};

std::string_view Describe(HyperRange range);  // e.g. "in [0, 1)", for messages
bool Contains(HyperRange range, double value);

struct HyperParamInfo {
  std::string_view name;
  double HyperParams::*field;
  HyperRange range;
  double initial;  // default value
};

// ------------------------------------------------------------------------------------- the table

// Names of a moment's planes, as torch calls the state.
struct MomentInfo {
  std::string_view name;
  std::string_view scale_name;  // name of the scales in format int8
};

struct OptimizerInfo {
  Optimizer optimizer;
  std::string_view name;
  std::span<const MomentInfo> moments;
  std::span<const HyperParamInfo> hyper_params;
  int passes = 1;  // over all blocks; with 2, the second needs the norms of whole parameters
};

namespace optimizer_table {

inline constexpr MomentInfo kExpAvg{"exp_avg", "exp_avg_scale"};
inline constexpr MomentInfo kExpAvgSq{"exp_avg_sq", "exp_avg_sq_scale"};
inline constexpr MomentInfo kMaxExpAvgSq{"max_exp_avg_sq", "max_exp_avg_sq_scale"};
inline constexpr MomentInfo kSum{"sum", "sum_scale"};
inline constexpr MomentInfo kMomentumBuffer{"momentum_buffer", "momentum_buffer_scale"};

inline constexpr std::array kAdamMoments = {kExpAvg, kExpAvgSq};
inline constexpr std::array kAmsgradMoments = {kExpAvg, kExpAvgSq, kMaxExpAvgSq};
inline constexpr std::array kAdagradMoments = {kSum};
inline constexpr std::array kLionMoments = {kExpAvg};
inline constexpr std::array kSgdMoments = {kMomentumBuffer};

constexpr HyperParamInfo Lr(double initial) {
  return {"lr", &HyperParams::lr, HyperRange::kFinite, initial};
}
constexpr HyperParamInfo Beta1(double initial) {
  return {"beta1", &HyperParams::beta1, HyperRange::kFraction, initial};
}
constexpr HyperParamInfo Beta2(double initial) {
  return {"beta2", &HyperParams::beta2, HyperRange::kFraction, initial};
}
// 0 would give 0 / 0 for a parameter whose gradients are 0.
constexpr HyperParamInfo Eps(double initial) {
  return {"eps", &HyperParams::eps, HyperRange::kPositive, initial};
}
constexpr HyperParamInfo WeightDecay(double initial) {
  return {"weight_decay", &HyperParams::weight_decay, HyperRange::kNotNegative, initial};
}
constexpr HyperParamInfo Momentum(double initial) {
  return {"momentum", &HyperParams::momentum, HyperRange::kNotNegative, initial};
}
constexpr HyperParamInfo Dampening(HyperRange range) {
  return {"dampening", &HyperParams::dampening, range, 0};
}

inline constexpr std::array kAdamHyper = {Lr(1e-3), Beta1(0.9), Beta2(0.999), Eps(1e-8),
                                          WeightDecay(0)};
inline constexpr std::array kAdamWHyper = {Lr(1e-3), Beta1(0.9), Beta2(0.999), Eps(1e-8),
                                           WeightDecay(1e-2)};
inline constexpr std::array kAdagradHyper = {
    Lr(1e-2), HyperParamInfo{"lr_decay", &HyperParams::lr_decay, HyperRange::kNotNegative, 0},
    WeightDecay(0),
    HyperParamInfo{"initial_accumulator_value", &HyperParams::initial_accumulator_value,
                   HyperRange::kNotNegative, 0},
    Eps(1e-10)};
inline constexpr std::array kLionHyper = {Lr(1e-4), Beta1(0.9), Beta2(0.99), WeightDecay(0)};
inline constexpr std::array kSgdHyper = {Lr(1e-3), Momentum(0), Dampening(HyperRange::kFinite),
                                         WeightDecay(0)};
// Nesterov's momentum is defined without dampening.
inline constexpr std::array kNesterovHyper = {Lr(1e-3), Momentum(0), Dampening(HyperRange::kZero),
                                              WeightDecay(0)};
inline constexpr std::array kLambHyper = {Lr(1e-3), Beta1(0.9), Beta2(0.999), Eps(1e-6),
                                          WeightDecay(1e-2)};

}  // namespace optimizer_table

// Optimizers in the order of the enum.
inline constexpr std::array<OptimizerInfo, kOptimizerCount> kOptimizers = {{
    {Optimizer::kAdamW, "adamw", optimizer_table::kAdamMoments, optimizer_table::kAdamWHyper},
    {Optimizer::kAdam, "adam", optimizer_table::kAdamMoments, optimizer_table::kAdamHyper},
    {Optimizer::kAdamWAmsgrad, "adamw_amsgrad", optimizer_table::kAmsgradMoments,
     optimizer_table::kAdamWHyper},
    {Optimizer::kAdamAmsgrad, "adam_amsgrad", optimizer_table::kAmsgradMoments,
     optimizer_table::kAdamHyper},
    {Optimizer::kAdagrad, "adagrad", optimizer_table::kAdagradMoments,
     optimizer_table::kAdagradHyper},
    {Optimizer::kLion, "lion", optimizer_table::kLionMoments, optimizer_table::kLionHyper},
    {Optimizer::kSgd, "sgd", optimizer_table::kSgdMoments, optimizer_table::kSgdHyper},
    {Optimizer::kSgdNesterov, "sgd_nesterov", optimizer_table::kSgdMoments,
     optimizer_table::kNesterovHyper},
    {Optimizer::kLamb, "lamb", optimizer_table::kAdamMoments, optimizer_table::kLambHyper,
     /*passes=*/2},
}};

// Returns an optimizer's row of the table. `optimizer` is a value of the enum, because clients name optimizers by text.
constexpr const OptimizerInfo& Info(Optimizer optimizer) {
  return kOptimizers[static_cast<size_t>(optimizer) - 1];
}
constexpr bool IsSquare(Optimizer optimizer, size_t moment) {
  return (kMomentShapes[static_cast<size_t>(optimizer) - 1].squares >> moment & 1) != 0;
}

constexpr std::string_view Name(Optimizer optimizer) {
  const size_t index = static_cast<size_t>(optimizer) - 1;
  return index < kOptimizerCount ? kOptimizers[index].name : "unknown";
}
constexpr bool operator==(const StateFormat& a, const StateFormat& b) {
  return a.format == b.format && a.weights == b.weights;
}
std::string_view Name(Format format);  // "fp32", "exact", "bf16", "int8"

// Errors  E_OPTION  the hint lists the known names.
absl::StatusOr<Optimizer> OptimizerFromName(std::string_view name);
absl::StatusOr<Format> FormatFromName(std::string_view name);
absl::StatusOr<DType> WeightsDTypeFromName(std::string_view name);

// The defaults of the table; 0 for what the optimizer does not have.
HyperParams DefaultHyperParams(Optimizer optimizer);

// Errors  E_OPTION  names the first hyper-parameter outside its range, and the range.
absl::Status CheckHyperParams(Optimizer optimizer, const HyperParams& hyper_params);

// --------------------------------------------------------------------------------- state planes

// A plane of the states of a block, contiguous.
struct Plane {
  // "remainder", "master", or as torch calls the state: "exp_avg", "sum", ...
  std::string_view name;
  DType dtype;
  uint64_t elems_per_value = 1;  // kScaleElems for scales
};

// `elems` of a plane, from element 0 of a block or a multiple of elems_per_value on.
constexpr uint64_t PlaneBytes(const Plane& plane, uint64_t elems) {
  return (elems + plane.elems_per_value - 1) / plane.elems_per_value * SizeBytes(plane.dtype);
}

// The planes of (optimizer, format, type of the weights), in the order in which they lie in a block:
// remainder or master, moments, scales. Empty where the format does not take such weights.
std::span<const Plane> StatePlanes(Optimizer optimizer, Format format, DType weights_dtype);

// Bytes of all planes for `elems` elements; 0 where the format does not take such weights.
uint64_t StateBytes(Optimizer optimizer, Format format, DType weights_dtype, uint64_t elems);

// The states of a parameter as clients read them: float32 in the order of its elements, named as
// torch names them. State 0 is the master; the moments follow.
std::vector<std::string> StateNames(Optimizer optimizer);

// Returns whether a value can be written into the state of index `state`: the value stays finite in the stored type, and a
// second moment is not below 0.
constexpr bool IsStorable(Optimizer optimizer, StateFormat format, size_t state, float value) {
  if (state == 0) return IsFiniteAs(format.weights, value);
  const bool is_bf16 = format.format == Format::kBf16;
  return IsFiniteAs(is_bf16 ? DType::kBFloat16 : DType::kFloat32, value) &&
         !(IsSquare(optimizer, state - 1) && value < 0);
}

}  // namespace forebay::protocol
