// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/update/step_terms.h"

#include <algorithm>
#include <optional>

#include "cpu_adam/lamb.h"
#include "cpu_adam/step_scalars.h"
#include "protocol/os/check.h"

namespace forebay::daemon {

StepTerms::StepTerms(JobTasks& io, const protocol::Layout& layout, const MemoryPlan& plan,
                     const BlockStore& store, bool keeps_jobs)
    : io_(io),
      layout_(layout),
      plan_(plan),
      store_(store),
      keeps_jobs_(keeps_jobs),
      param_updates_(layout.params().size(), 0),
      scalars_(io.memory()),
      norms_(io.memory()) {}

void StepTerms::Set(StepOrder order, UpdatePass pass) {
  order_ = std::move(order);
  pass_ = pass;
  scalars_.clear();
  norms_.clear();
}

const std::vector<float>& StepTerms::EndNorms() {
  std::pmr::vector<SegmentNorms> sums(layout_.params().size(), io_.memory());
  for (const auto& [block, norms] : norms_) {
    const std::pmr::vector<UpdateSegment> segments = SegmentsOf(block);
    FOREBAY_CHECK(norms.size() == segments.size());
    for (size_t i = 0; i < segments.size(); ++i) {
      SegmentNorms& sum = sums[segments[i].param];
      sum.weight_squares += norms[i].weight_squares;
      sum.update_squares += norms[i].update_squares;
    }
  }
  norms_.clear();
  trust_.clear();
  for (const SegmentNorms& sum : sums) {
    trust_.push_back(cpu_adam::TrustRatio(sum.weight_squares, sum.update_squares));
  }
  pass_ = UpdatePass::kWhole;
  return trust_;
}

const cpu_adam::StepScalars& StepTerms::ScalarsOf(uint32_t param_group, uint64_t t) {
  const auto [entry, is_new] = scalars_.try_emplace({param_group, t});
  if (is_new) {
    entry->second = cpu_adam::MakeStepScalars(
        layout_.spec().optimizer, order_.hyper_params[param_group], t, order_.grad_scale);
    if (order_.grad_min < order_.grad_max) {
      cpu_adam::SetGradientBounds(order_.grad_min, order_.grad_max, entry->second);
    }
  }
  return entry->second;
}

bool StepTerms::IsNeeded(uint32_t block) const {
  if (!store_.map().has_states(block)) return false;
  const std::pmr::vector<BlockRun> runs = store_.map().Runs(block, io_.memory());
  return std::ranges::any_of(runs,
                             [this](const BlockRun& run) { return order_.params[run.param]; });
}

bool StepTerms::IsWhole(uint32_t block) const {
  const std::pmr::vector<BlockRun> runs = store_.map().Runs(block, io_.memory());
  return std::ranges::all_of(runs,
                             [this](const BlockRun& run) { return order_.params[run.param]; });
}

std::pmr::vector<UpdateSegment> StepTerms::SegmentsOf(uint32_t block) {
  const uint64_t sum_width = protocol::SizeBytes(plan_.sum_dtype);
  std::pmr::vector<UpdateSegment> segments(io_.memory());
  for (const BlockRun& run : store_.map().Runs(block, io_.memory())) {
    if (!order_.params[run.param]) continue;
    const protocol::ParamPlace& param = layout_.params()[run.param];
    WeightsPlace weights = store_.PlaceOfWeights(run.partition, run.partition_elem);
    if (const std::optional<uint32_t>& slot = store_.blocks().at(block).weights_slot) {
      weights.new_offset_bytes = store_.NewWeightsOffset(*slot, run.block_elem);
    }
    segments.push_back(
        {.weights = weights,
         .accumulator_offset_bytes =
             plan_.accumulator_offsets[run.partition] + run.partition_elem * sum_width,
         .block_elem = run.block_elem,
         .elems = run.elems,
         .param_elem = run.param_elem,
         .param = run.param,
         .trust = needs_norms() && pass_ == UpdatePass::kWhole ? trust_[run.param] : 1.0F});
    if (pass_ == UpdatePass::kMasters) continue;
    const uint64_t t = param_updates_[run.param] + 1;
    segments.back().scalars = ScalarsOf(param.param_group, t);
    cpu_adam::SetRoundingKey({.seed = layout_.spec().seed, .parameter = param.name_hash, .t = t},
                             segments.back().scalars);
  }
  return segments;
}

void StepTerms::SetUpdates(std::vector<uint64_t> updates) {
  FOREBAY_CHECK(updates.size() == param_updates_.size());
  param_updates_ = std::move(updates);
}

void StepTerms::SetUpdates(uint32_t param, uint64_t updates) {
  param_updates_[param] = updates;
  if (keeps_jobs_) {
    io_.actions().Emit(RecordUpdates{.job = io_.job(), .param = param, .updates = updates});
  }
}

void StepTerms::Publish() {
  for (uint32_t param = 0; param < param_updates_.size(); ++param) {
    if (order_.params[param]) ++param_updates_[param];
  }
}

}  // namespace forebay::daemon
