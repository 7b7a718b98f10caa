// SPDX-License-Identifier: Apache-2.0
#include "tools/forebay/bench_adam_blocks.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <random>
#include <utility>

#include "cpu_adam/lamb.h"
#include "cpu_adam/step_scalars.h"
#include "protocol/os/check.h"
#include "protocol/units.h"
#include "tools/forebay/bench_adam_limits.h"
#include "tools/forebay/bench_workers.h"

namespace forebay::tools {
namespace {

using daemon::kPartElems;
using daemon::UpdatePass;
using protocol::DType;
using protocol::RoundUp;

constexpr uint64_t kBlockElems = uint64_t{1} << 20;  // the daemon's block size
constexpr uint64_t kPatternElemsMax = uint64_t{1} << 20;
constexpr size_t kDenormalEvery = 97;
constexpr uint32_t kSeed = 20251121;
constexpr uint64_t kStep = 10;
// Parameters for all optimizers. Each optimizer reads the ones that it has.
constexpr protocol::HyperParams kHyper = {
    .lr = 1e-4, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 1e-2, .momentum = 0.9};

// Elements of one parameter. Each parameter begins at a whole group of scales.
uint64_t ParameterElems(const AdamPass& pass, uint64_t params) { return params / pass.parameters; }

// Weights and gradients of plausible sizes; with denormal data one element of 97 has no gradient.
struct Pattern {
  Pattern(const AdamPass& pass, uint64_t elems) {
    std::mt19937 random(kSeed);
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < std::min(elems, kPatternElemsMax); ++i) {
      const float w = 0.02f * normal(random);
      const bool none = pass.data == AdamPass::Data::kDenormal && i % kDenormalEvery == 0;
      Append(pass.format.weights, w, weights);
      Append(pass.format.weights, none ? 0.0f : std::copysign(1e-3f, w) + 0.1f * w, gradient);
    }
  }

  static void Append(DType dtype, float value, std::vector<std::byte>& to) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    if (dtype == DType::kBFloat16) bits >>= 16;
    // binary16 of a normal number lacks three bits of the exponent and thirteen of the fraction
    if (dtype == DType::kFloat16) {
      const uint32_t magnitude = bits & 0x7FFFFFFF;
      const uint32_t half = magnitude < 0x38800000 ? 0 : (magnitude - 0x38000000) >> 13;
      bits = (bits >> 16 & 0x8000) | half;
    }
    const auto* const begin = reinterpret_cast<const std::byte*>(&bits);
    to.insert(to.end(), begin, begin + protocol::SizeBytes(dtype));
  }

  static void Repeat(const std::vector<std::byte>& pattern, std::span<std::byte> array) {
    for (size_t begin = 0; begin < array.size(); begin += pattern.size()) {
      std::memcpy(array.data() + begin, pattern.data(),
                  std::min(pattern.size(), array.size() - begin));
    }
  }

  std::vector<std::byte> weights, gradient;
};

}  // namespace

std::span<const protocol::Plane> PlanesOf(const AdamPass& pass) {
  return protocol::StatePlanes(pass.optimizer, pass.format.format, pass.format.weights);
}

uint64_t ElemsOf(const AdamPass& pass, uint64_t params) {
  const uint64_t one = RoundUp(ParameterElems(pass, params), protocol::kScaleElems);
  return RoundUp(one * pass.parameters, kLoopElems);
}

uint64_t StateBytesOf(const AdamPass& pass, uint64_t params) {
  const uint64_t elems = ElemsOf(pass, params);
  return elems / kBlockElems * daemon::BlockBytes(PlanesOf(pass), kBlockElems) +
         daemon::BlockBytes(PlanesOf(pass), elems % kBlockElems);
}

AdamBlocks::AdamBlocks(const AdamPass& pass, uint64_t params, cpu_adam::WorkerPool& pool,
                       const AdamMemory& memory)
    : pass_(pass), params_(params), pool_(pool), memory_(memory) {
  MakeBlocks(memory.states);
  FillData();
  if (pass_.task == AdamPass::Task::kWeights) SetNewWeights();
}

void AdamBlocks::SetNewWeights() {
  for (Block& block : blocks_) {
    for (daemon::UpdateSegment& segment : block.action.segments) {
      segment.weights.new_offset_bytes =
          memory_.new_weights_offset_bytes + segment.weights.offset_bytes;
    }
  }
}

void AdamBlocks::Run(AdamPass::Hash hash) {
  if (pass_.task == AdamPass::Task::kWeights) {
    UpdateBlocks(UpdatePass::kWeights, AdamPass::Hash::kOff);
  } else {
    Update(hash);
  }
}

void AdamBlocks::MakeBlocks(std::span<std::byte> states) {
  const uint64_t elems = ElemsOf(pass_, params_);
  for (uint64_t begin = 0; begin < elems; begin += kBlockElems) {
    const uint64_t n = std::min(kBlockElems, elems - begin);
    const uint64_t bytes = daemon::BlockBytes(PlanesOf(pass_), n);
    Block block;
    block.action.block_elems = n;
    block.action.bytes = bytes;
    block.action.sum_dtype = pass_.format.weights;
    block.action.identity_after = {.job = 1, .block = blocks_.size(), .written_step = kStep};
    block.memory = {.states = {.weights = memory_.weights,
                               .block = states.first(bytes),
                               .optimizer = pass_.optimizer,
                               .format = pass_.format.format,
                               .dtype = pass_.format.weights},
                    .accumulators = memory_.gradient};
    block.found.resize((n + kPartElems - 1) / kPartElems);
    AddSegments(begin, block.action);
    blocks_.push_back(std::move(block));
    states = states.subspan(bytes);
  }
}

// Adds one segment for each parameter that has elements in the block, like in a job in which each parameter has its own scale
// or key.
void AdamBlocks::AddSegments(uint64_t block_begin, daemon::UpdateBlock& action) const {
  const uint64_t size = ParameterElems(pass_, params_);
  const uint64_t stride = RoundUp(size, protocol::kScaleElems);
  const uint64_t width = protocol::SizeBytes(pass_.format.weights);
  const cpu_adam::StepScalars scalars =
      cpu_adam::MakeStepScalars(pass_.optimizer, kHyper, kStep, /*grad_scale=*/1.0f);
  const uint64_t block_end = block_begin + action.block_elems;
  for (uint64_t param = block_begin / stride; param < pass_.parameters; ++param) {
    const uint64_t begin = std::max(block_begin, param * stride);
    const uint64_t end = std::min(block_end, param * stride + size);
    if (param * stride >= block_end) break;
    if (begin >= end) continue;
    action.segments.push_back({.weights = {.offset_bytes = begin * width},
                               .accumulator_offset_bytes = begin * width,
                               .block_elem = begin - block_begin,
                               .elems = end - begin,
                               .scalars = scalars,
                               .param_elem = begin - param * stride,
                               .param = static_cast<uint32_t>(param)});
  }
}

void AdamBlocks::Update(AdamPass::Hash hash) {
  if (protocol::Info(pass_.optimizer).passes == 2) {
    UpdateBlocks(UpdatePass::kNorms, hash);
    SetTrustRatios();
  }
  UpdateBlocks(UpdatePass::kWhole, hash);
}

// Schedules the work like the daemon's workers: a free thread takes the next part of a resident block, or the next block that
// goes to disk.
void AdamBlocks::UpdateBlocks(UpdatePass update_pass, AdamPass::Hash hash) {
  struct Task {
    Block* block;
    size_t part;
  };
  std::vector<Task> tasks;
  for (Block& block : blocks_) {
    block.action.pass = update_pass;
    const size_t parts = hash == AdamPass::Hash::kOn ? 1 : block.found.size();
    for (size_t part = 0; part < parts; ++part) tasks.push_back({&block, part});
  }
  std::atomic<size_t> next = 0;
  RunOnAll(pool_, [&](int) {
    for (size_t i = next++; i < tasks.size(); i = next++) {
      auto& [block, part] = tasks[i];
      if (hash == AdamPass::Hash::kOn) {
        block->done = daemon::RunUpdateForSwap(block->action, block->memory, /*nonce=*/1);
        continue;
      }
      const uint64_t begin = part * kPartElems;
      const uint64_t end = std::min(begin + kPartElems, block->action.block_elems);
      block->found[part] = daemon::RunUpdate(block->action, {begin, end}, block->memory);
    }
  });
  for (Block& block : blocks_) {
    if (hash == AdamPass::Hash::kOff) block.done = daemon::JoinUpdate(block.found);
    FOREBAY_CHECK(block.done.count == 0);
  }
}

void AdamBlocks::SetTrustRatios() {
  std::vector<daemon::SegmentNorms> sums(pass_.parameters);
  for (const Block& block : blocks_) {
    for (size_t i = 0; i < block.done.norms.size(); ++i) {
      daemon::SegmentNorms& sum = sums[block.action.segments[i].param];
      sum.weight_squares += block.done.norms[i].weight_squares;
      sum.update_squares += block.done.norms[i].update_squares;
    }
  }
  for (Block& block : blocks_) {
    for (daemon::UpdateSegment& segment : block.action.segments) {
      const daemon::SegmentNorms& sum = sums[segment.param];
      segment.trust = cpu_adam::TrustRatio(sum.weight_squares, sum.update_squares);
    }
  }
}

// Fills weights, gradients and states. One update of states that are zero computes the moments, in each format.
void AdamBlocks::FillData() {
  const Pattern pattern(pass_, params_);
  Pattern::Repeat(pattern.weights, memory_.weights);
  Pattern::Repeat(pattern.gradient, memory_.gradient);
  for (Block& block : blocks_) {
    std::memset(block.memory.states.block.data(), 0, block.memory.states.block.size());
  }
  UpdateBlocks(UpdatePass::kMasters, AdamPass::Hash::kOff);
  Update(AdamPass::Hash::kOff);
  if (pass_.data == AdamPass::Data::kDenormal) MakeDenormal(pattern.weights.size());
}

// Sets every kDenormalEvery-th second moment to a denormal number, the value that it decays to without a gradient.
void AdamBlocks::MakeDenormal(uint64_t pattern_bytes) {
  const uint64_t pattern_elems = pattern_bytes / protocol::SizeBytes(pass_.format.weights);
  const auto planes = PlanesOf(pass_);
  const size_t moment = planes.size() - 1;
  FOREBAY_CHECK(planes[moment].name == "exp_avg_sq");
  for (size_t b = 0; b < blocks_.size(); ++b) {
    const daemon::UpdateBlock& action = blocks_[b].action;
    auto* const v =
        reinterpret_cast<float*>(blocks_[b].memory.states.block.data() +
                                 daemon::PlaneOffsetBytes(planes, moment, action.block_elems));
    for (uint64_t i = 0; i < action.block_elems; ++i) {
      const uint64_t elem = b * kBlockElems + i;
      if (elem % pattern_elems % kDenormalEvery == 0) v[i] = 1e-39f;
    }
  }
}

}  // namespace forebay::tools
