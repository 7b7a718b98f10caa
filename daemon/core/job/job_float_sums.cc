// SPDX-License-Identifier: Apache-2.0
// Gradient sums in float32, which a job allocates when a step has several backward passes.

#include <utility>
#include <vector>

#include "daemon/core/job/job.h"

namespace forebay::daemon {

bool Job::WantsFloatSums() const {
  return float_sums_ == FloatSums::kNone && step_.needs_float_sums();
}

void Job::MakeFloatSums() {
  float_sums_ = FloatSums::kMaking;
  spec_.plan.fixed_bytes += spec_.plan.float_sums_bytes;
  io_.Start(TaskKind::kFloatSums, 0,
            PopulateStepArena{.offset_bytes = spec_.plan.float_sums_offset,
                              .bytes = spec_.plan.float_sums_bytes});
}

void Job::OnFloatSumsMade(const TaskDone& done) {
  if (done.status.ok()) {
    float_sums_ = FloatSums::kMade;
    return;
  }
  float_sums_ = FloatSums::kNone;
  spec_.plan.fixed_bytes -= spec_.plan.float_sums_bytes;
  RefuseFloatSums(done.status);
}

void Job::TryUseFloatSums() {
  if (float_sums_ != FloatSums::kMade || !step_.MayUseFloatSums()) return;
  float_sums_ = FloatSums::kInUse;
  std::vector<uint64_t> narrow_offsets = spec_.plan.accumulator_offsets;
  spec_.plan.UseFloatSums(*spec_.layout);
  step_.OnFloatSums(std::move(narrow_offsets));
}

}  // namespace forebay::daemon
