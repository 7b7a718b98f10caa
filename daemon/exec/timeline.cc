// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/timeline.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace forebay::daemon {

const char* Name(Lane lane) {
  switch (lane) {
    case Lane::kGradient:
      return "gradient";
    case Lane::kSwapRead:
      return "swap read";
    case Lane::kUpdate:
      return "update";
    case Lane::kSwapWrite:
      return "swap write";
    case Lane::kStep:
      return "step";
  }
  return "unknown";
}

std::string NameOf(const TimedEvent& event, const protocol::Layout& layout) {
  switch (event.subject) {
    case TimedSubject::kPartition:
      return layout.PartitionName(static_cast<uint32_t>(event.index));
    case TimedSubject::kBlock:
      return absl::StrCat("block ", event.index);
    case TimedSubject::kWeightsOfBlock:
      return absl::StrCat("weights of block ", event.index);
    case TimedSubject::kWeightsPart:
      return absl::StrCat("weights, part ", event.index);
    case TimedSubject::kGradientPage:
      return absl::StrCat("gradients ", event.index);
    case TimedSubject::kStep:
      return absl::StrCat("step ", event.index);
  }
  return "unknown";
}

void Timeline::Add(const TimedEvent& event) {
  if (current_.size() < kEventsMax) current_.push_back(event);
}

void Timeline::StepCommitted(uint64_t now_ns) {
  committed_step_called_ns_ = std::exchange(step_called_ns_, 0);
  decision_seconds_ = static_cast<double>(now_ns - committed_step_called_ns_) * 1e-9;
}

void Timeline::StepPublished(uint64_t step, uint64_t now_ns) {
  const uint64_t called_ns = std::exchange(committed_step_called_ns_, 0);
  // 0 if masters were set without a call of step.
  const uint64_t start_ns = called_ns == 0 ? now_ns : called_ns;
  newest_seconds_ = static_cast<double>(now_ns - start_ns) * 1e-9;
  newest_decision_seconds_ = std::exchange(decision_seconds_, 0);
  current_.push_back({.lane = Lane::kStep,
                      .subject = TimedSubject::kStep,
                      .index = step,
                      .start_ns = start_ns,
                      .end_ns = now_ns});
  newest_.swap(current_);
  current_.clear();
  newest_step_ = step;
}

}  // namespace forebay::daemon
