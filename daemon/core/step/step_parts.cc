// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/step/step_parts.h"

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/layout.h"

namespace forebay::daemon {

StepParts::StepParts(const JobSpec& job_spec, JobTasks& job_io, Membership& job_members,
                     StepPipeline& job_pipeline, DurableSteps& job_durable)
    : spec(job_spec),
      io(job_io),
      members(job_members),
      pipeline(job_pipeline),
      durable(job_durable),
      gradients(io, spec.layout, spec.plan, members, pipeline),
      announcement(spec.layout->spec().optimizer),
      digests(spec, io, pipeline),
      barrier(io.memory()),
      trace(spec.layout->partitions().size(),
            spec.recovered == nullptr ? std::vector<uint32_t>() : spec.recovered->trace),
      extra(spec, io),
      answers(spec, io) {
  if (spec.recovered == nullptr) return;
  committed_step = spec.recovered->step;
  published_step = spec.recovered->published_step();
  io.set_committed_step(committed_step);
  pipeline.FollowTrace(trace.committed());
}

std::pmr::vector<uint64_t> StepParts::Presence() const {
  std::pmr::vector<uint64_t> present(protocol::PresenceWords(spec.layout->params().size()), 0,
                                     io.memory());
  for (const auto& [rank, call] : barrier.by_rank()) {
    for (size_t word = 0; word < present.size(); ++word) present[word] |= call.presence[word];
  }
  return present;
}

StepOrder StepParts::OrderOf(const StepCall& call, double scale) const {
  return {.step = next_step(),
          .grad_scale = static_cast<float>(scale),
          .grad_min = static_cast<float>(call.request.grad_min),
          .grad_max = static_cast<float>(call.request.grad_max),
          .hyper_params = {call.hyper_params, io.memory()},
          .params = std::pmr::vector<bool>(io.memory())};
}

absl::Status StepParts::DetachedError(uint32_t rank) const {
  return protocol::MakeError(
      protocol::ErrorId::kRankLost,
      absl::StrCat("rank ", spec.layout->WorldRank(rank), " of job ", spec.name,
                   " has detached; the committed step is ", committed_step),
      "attach that rank again, then call step again");
}

}  // namespace forebay::daemon
