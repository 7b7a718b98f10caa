// SPDX-License-Identifier: Apache-2.0
// Small jobs with known gradients, and a reference optimizer that computes the expected bytes from the scalar kernels, without
// blocks, workers or daemon.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "protocol/layout.h"
#include "protocol/wire.h"

namespace forebay::testing {

struct JobShape {
  uint32_t world_size = 2;  // not part of the layout
  uint32_t groups = 3;
  // Elements of each group: three parameters in two parameter groups.
  uint64_t group_elems = 10'000;
  protocol::DType dtype = protocol::DType::kFloat32;
  protocol::Format format = protocol::Format::kFp32;
  protocol::Optimizer optimizer = protocol::Optimizer::kAdamW;
};

protocol::LayoutSpec MakeLayoutSpec(const JobShape& shape);

// Hyper-parameters of two parameter groups, which differ in every value.
std::vector<protocol::HyperParams> MakeHyperParams(double lr = 1e-2);

// Values of a group in the job's dtype, without padding. Each pair (seed, group) gives other values.
std::vector<std::byte> MakeValues(const protocol::Layout& layout, uint32_t group, uint64_t seed);

// Gradient of rank `rank` in step `t`.
std::vector<std::byte> MakeGradient(const protocol::Layout& layout, uint32_t group, uint32_t rank,
                                    uint64_t t);

// Trains the whole model in one process, as a reference.
class ReferenceTrainer {
 public:
  ReferenceTrainer(const protocol::Layout& layout, uint32_t world_size, uint64_t seed);

  // Applies step t. Every rank has delivered MakeGradient(group, rank, t) to the groups in `delivered`. Returns the norm before
  // clipping, or 0 if max_grad_norm is 0.
  double Step(uint64_t t, std::span<const protocol::HyperParams> hyper, double max_grad_norm,
              std::span<const uint32_t> delivered);

  // Weights of a group in the daemon's format.
  std::span<const std::byte> Weights(uint32_t group) const;

  // Values of a parameter's state as the daemon decodes them. `state` is an index into protocol::StateNames.
  std::vector<float> State(uint32_t param, size_t state) const;
  uint64_t updates(uint32_t param) const;

 private:
  struct Group {
    std::vector<std::byte> weights;
    std::vector<int16_t> remainder;
    std::vector<std::vector<float>> moments;
    uint64_t updates = 0;
  };

  const protocol::Layout& layout_;
  uint32_t world_size_;
  std::vector<Group> groups_;
};

}  // namespace forebay::testing
