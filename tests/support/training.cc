// SPDX-License-Identifier: Apache-2.0
#include "tests/support/training.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <string>

#include "cpu_adam/square_sum.h"
#include "cpu_adam/step_scalars.h"
#include "cpu_adam/stream_kernel.h"
#include "cpu_adam/targets.h"
#include "cpu_adam/update_kernel.h"
#include "protocol/os/check.h"

namespace forebay::testing {
namespace {

using protocol::DType;
using protocol::Format;

// splitmix64 of a position as a float in [-1, 1).
float Value(uint64_t seed, uint64_t position) {
  uint64_t mixed = (seed << 32) + position + 0x9E3779B97F4A7C15U;
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9U;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBU;
  mixed ^= mixed >> 31;
  return static_cast<float>(static_cast<int32_t>(mixed >> 32)) * 0x1p-31F;
}

std::vector<std::byte> Values(DType dtype, uint64_t elems, uint64_t seed) {
  std::vector<std::byte> bytes(elems * protocol::SizeBytes(dtype));
  for (uint64_t i = 0; i < elems; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(Value(seed, i));
    if (dtype == DType::kFloat32) {
      std::memcpy(bytes.data() + i * 4, &bits, 4);
    } else {
      const auto upper = static_cast<uint16_t>(bits >> 16);
      std::memcpy(bytes.data() + i * 2, &upper, 2);
    }
  }
  return bytes;
}

cpu_adam::Gradient GradientOf(DType dtype, std::span<const std::byte> bytes) {
  return {bytes.data(), dtype};
}

}  // namespace

protocol::LayoutSpec MakeLayoutSpec(const JobShape& shape) {
  protocol::LayoutSpec spec;
  spec.dtype = shape.dtype;
  spec.optimizer = shape.optimizer;
  spec.format = shape.format;
  const uint64_t first = shape.group_elems / 2 + 1;
  const uint64_t second = shape.group_elems / 3;
  for (uint32_t group = 0; group < shape.groups; ++group) {
    const std::string prefix = "layer" + std::to_string(group) + ".";
    spec.params.push_back({prefix + "weight", {first}, group, 0});
    spec.params.push_back({prefix + "bias", {second}, group, 1});
    spec.params.push_back({prefix + "scale", {shape.group_elems - first - second}, group, 0});
    spec.group_names.push_back("layer" + std::to_string(group));
  }
  return spec;
}

std::vector<protocol::HyperParams> MakeHyperParams(double lr) {
  return {{.lr = lr, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1},
          {.lr = lr / 2, .beta1 = 0.8, .beta2 = 0.99, .eps = 1e-6, .weight_decay = 0}};
}

std::vector<std::byte> MakeValues(const protocol::Layout& layout, uint32_t group, uint64_t seed) {
  return Values(layout.spec().dtype, layout.groups()[group].elems, seed * 1000 + group);
}

std::vector<std::byte> MakeGradient(const protocol::Layout& layout, uint32_t group, uint32_t rank,
                                    uint64_t t) {
  return Values(layout.spec().dtype, layout.groups()[group].elems,
                (t * 64 + rank + 1) * 1000 + group);
}

ReferenceTrainer::ReferenceTrainer(const protocol::Layout& layout, uint32_t world_size,
                                   uint64_t seed)
    : layout_(layout), world_size_(world_size) {
  for (uint32_t g = 0; g < layout.groups().size(); ++g) {
    const uint64_t elems = layout.groups()[g].elems;
    Group group{.weights = MakeValues(layout, g, seed),
                .remainder = std::vector<int16_t>(elems),
                .moments = {protocol::Info(layout.spec().optimizer).moments.size(),
                            std::vector<float>(elems)}};
    groups_.push_back(std::move(group));
  }
}

double ReferenceTrainer::Step(uint64_t t, std::span<const protocol::HyperParams> hyper,
                              double max_grad_norm, std::span<const uint32_t> delivered) {
  const std::string target = cpu_adam::ChosenTarget();
  FOREBAY_CHECK(cpu_adam::ForceTarget("scalar").ok());
  const DType dtype = layout_.spec().dtype;
  const uint32_t world = world_size_;
  std::vector<std::vector<float>> sums(groups_.size());
  double squares = 0;
  for (const uint32_t g : delivered) {  // ascending
    sums[g].resize(layout_.groups()[g].elems);
    for (uint32_t rank = 0; rank < world; ++rank) {
      const std::vector<std::byte> gradient = MakeGradient(layout_, g, rank, t);
      cpu_adam::AddGradient(sums[g].size(), GradientOf(dtype, gradient),
                            rank == 0 ? cpu_adam::AddMode::kSet : cpu_adam::AddMode::kAdd,
                            sums[g].data());
    }
    squares +=
        cpu_adam::SumSquaresAndFinite(sums[g].size(), {sums[g].data(), DType::kFloat32}).ToDouble();
  }
  double scale = 1.0 / world;
  double norm = 0;
  if (max_grad_norm > 0) {
    norm = std::sqrt(squares) / world;
    const double clip = max_grad_norm / (norm + 1e-6);
    if (clip < 1) scale *= clip;
  }
  for (const uint32_t g : delivered) {
    Group& group = groups_[g];
    ++group.updates;
    for (uint32_t p = layout_.groups()[g].param_begin; p < layout_.groups()[g].param_end; ++p) {
      const protocol::ParamPlace& place = layout_.params()[p];
      const protocol::Optimizer optimizer = layout_.spec().optimizer;
      const auto scalars = cpu_adam::MakeStepScalars(optimizer, hyper[place.param_group],
                                                     group.updates, static_cast<float>(scale));
      const uint64_t at = place.offset_elems;
      const cpu_adam::Gradient gradient{sums[g].data() + at, DType::kFloat32};
      const bool exact = layout_.spec().format == Format::kExact;
      cpu_adam::StatePlanes state{.weights = group.weights.data() + at * protocol::SizeBytes(dtype),
                                  .remainder = group.remainder.data() + at,
                                  .moments = {}};
      for (size_t i = 0; i < group.moments.size(); ++i) {
        state.moments[i] = group.moments[i].data() + at;
      }
      cpu_adam::Update(optimizer,
                       exact ? protocol::StateFormat::kExact : protocol::StateFormat::kFp32,
                       scalars, place.elems, gradient, state);
    }
  }
  FOREBAY_CHECK(cpu_adam::ForceTarget(target).ok());
  return norm;
}

std::span<const std::byte> ReferenceTrainer::Weights(uint32_t group) const {
  return groups_[group].weights;
}

std::vector<float> ReferenceTrainer::State(uint32_t param, size_t state) const {
  const protocol::ParamPlace& place = layout_.params()[param];
  const Group& group = groups_[place.group];
  std::vector<float> values;
  for (uint64_t elem = place.offset_elems; elem < place.offset_elems + place.elems; ++elem) {
    if (state > 0) {
      values.push_back(group.moments[state - 1][elem]);
    } else if (layout_.spec().format == Format::kExact) {
      uint16_t weights = 0;
      std::memcpy(&weights, group.weights.data() + elem * 2, 2);
      const auto remainder = static_cast<uint32_t>(int32_t{group.remainder[elem]});
      values.push_back(std::bit_cast<float>((uint32_t{weights} << 16) + remainder));
    } else {
      values.emplace_back();
      std::memcpy(&values.back(), group.weights.data() + elem * 4, 4);
    }
  }
  return values;
}

uint64_t ReferenceTrainer::updates(uint32_t param) const {
  return groups_[layout_.params()[param].group].updates;
}

}  // namespace forebay::testing
