// SPDX-License-Identifier: Apache-2.0
// Records a step, so that the next daemon can continue the step if this daemon is killed, and recovers a step from such a
// record.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/core/step/step.h"
#include "daemon/core/update/step_pipeline.h"
#include "protocol/error.h"
#include "protocol/os/check.h"

namespace forebay::daemon {

void Step::Resume(const KeptUpdate& update) {
  if (update.prepared) {
    ResumePrepared(update);
    return;
  }
  pipeline_.Resume(update);
  is_to_be_resumed_ = false;
  answers_.OnResumed();
}

void Step::Record(KeptMemory& kept, bool is_last) {
  kept.attempt = attempts_.Record(gradients_.empty() ? StepAttempts::Gradients::kNone
                                                     : StepAttempts::Gradients::kDelivered);
  kept.norm = answers_.norm();
  kept.clipped = answers_.clipped();
  // The next daemon reports an overflow. Only the last record knows whether this daemon has reported it.
  if (!is_last || !answers_.unreported().ok()) kept.overflowed = answers_.overflowed();
  kept.summary = nodes_.EncodeLast();
}

RecordDecision Step::DecisionOf(const StepOrder& order) const {
  RecordDecision record{.job = spec_.id,
                        .step = order.step,
                        .order = order.CopyIn(io_.memory()),
                        .param_updates = std::pmr::vector<uint64_t>(io_.memory()),
                        .trace = std::pmr::vector<uint32_t>(io_.memory()),
                        .extra_states = extra_.NextParts(barrier_.by_rank()),
                        .norm = answers_.norm(),
                        .clipped = answers_.clipped(),
                        .overflowed = answers_.overflow_to_report()};
  if (spec_.plan.uses_float_sums) record.float_sums = spec_.plan.float_sums_part();
  if (nodes_.decision()) record.summary = protocol::EncodeStepSummary(*nodes_.decision());
  const auto copy = [](const auto& from, auto& to) { to.assign(from.begin(), from.end()); };
  copy(pipeline_.terms().updates(), record.param_updates);
  for (uint32_t param = 0; param < order.params.size(); ++param) {
    if (order.params[param]) ++record.param_updates[param];
  }
  copy(trace_.committed(), record.trace);
  return record;
}

}  // namespace forebay::daemon
