// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/step/step_extra_states.h"

namespace forebay::daemon {

StepExtraStates::StepExtraStates(const JobSpec& spec, JobTasks& io)
    : spec_(spec), io_(io), bytes_(spec.world_size(), 0) {
  if (spec.recovered == nullptr) return;
  const auto& recovered = *spec.recovered->extra_states;
  const size_t ranks = std::min(bytes_.size(), recovered.size());
  for (size_t rank = 0; rank < ranks; ++rank) bytes_[rank] = recovered[rank].size();
}

void StepExtraStates::Copy(const StepBarrier::Calls& calls) {
  for (const auto& [rank, call] : calls) {
    if (call.request.extra_state_bytes == 0) continue;
    ++copies_;
    io_.Start(TaskKind::kCopyExtraState, call.command.session,
              CopyToStepArena{.session = call.command.session,
                              .grad_offset_bytes = call.extra_state_offset_bytes,
                              .step_offset_bytes = spec_.plan.extra_state_slot(rank, 1 - slot_),
                              .bytes = call.request.extra_state_bytes});
  }
}

void StepExtraStates::Commit(const StepBarrier::Calls& calls) {
  slot_ = 1 - slot_;
  for (const auto& [rank, call] : calls) bytes_[rank] = call.request.extra_state_bytes;
}

std::vector<StatePart> StepExtraStates::Parts() const {
  std::vector<StatePart> parts;
  for (uint32_t rank = 0; rank < spec_.world_size(); ++rank) parts.push_back(Part(rank));
  return parts;
}

std::pmr::vector<StatePart> StepExtraStates::NextParts(const StepBarrier::Calls& calls) const {
  std::pmr::vector<StatePart> parts(io_.memory());
  for (uint32_t rank = 0; rank < spec_.world_size(); ++rank) {
    parts.push_back({.offset_bytes = spec_.plan.extra_state_slot(rank, 1 - slot_)});
  }
  for (const auto& [rank, call] : calls) parts[rank].bytes = call.request.extra_state_bytes;
  return parts;
}

}  // namespace forebay::daemon
