// SPDX-License-Identifier: Apache-2.0
// Small jobs with known gradients, and what the optimizer must make of them: computed here from the
// scalar kernels, without blocks, workers or daemon.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "protocol/layout.h"
#include "protocol/wire.h"

namespace forebay::testing {

struct JobShape {
  uint32_t world_size = 2;  // not a part of the layout
  uint32_t groups = 3;
  uint64_t group_elems = 10'000;  // of each group, in three parameters, two parameter groups
  protocol::DType dtype = protocol::DType::kFloat32;
  protocol::Format format = protocol::Format::kFp32;
  protocol::Optimizer optimizer = protocol::Optimizer::kAdamW;
};

protocol::LayoutSpec MakeLayoutSpec(const JobShape& shape);

// Two parameter groups, lr and decay of their own.
std::vector<protocol::HyperParams> MakeHyperParams(double lr = 1e-2);

// Values of a group in the job's dtype, without padding; every (seed, group) gives others.
std::vector<std::byte> MakeValues(const protocol::Layout& layout, uint32_t group, uint64_t seed);

// A gradient of rank `rank` in step `t`.
std::vector<std::byte> MakeGradient(const protocol::Layout& layout, uint32_t group, uint32_t rank,
                                    uint64_t t);

// The whole model in one process.
class ReferenceTrainer {
 public:
  ReferenceTrainer(const protocol::Layout& layout, uint32_t world_size, uint64_t seed);

  // Applies step t: every rank has delivered MakeGradient(group, rank, t) to the groups in
  // `delivered`. Returns the norm before clipping; 0 where max_grad_norm is 0.
  double Step(uint64_t t, std::span<const protocol::HyperParams> hyper, double max_grad_norm,
              std::span<const uint32_t> delivered);

  // The group as the daemon serves it.
  std::span<const std::byte> Weights(uint32_t group) const;

  // A state of a parameter as the daemon decodes it; `state` is an index into
  // protocol::StateNames.
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
