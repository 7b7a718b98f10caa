// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/job/job_parts.h"

#include <span>
#include <utility>
#include <vector>

namespace forebay::daemon {

JobParts::JobParts(JobSpec job_spec, ActionSink& actions, StagingPool& pool, nvme::SlotMap& swap,
                   PathTable& path_table)
    : spec(std::move(job_spec)),
      io(actions, spec.id),
      members(spec, io),
      initial(spec, io),
      leases(actions, spec.id,
             spec.kept() == nullptr ? std::vector<KeptLease>() : spec.kept()->leases),
      pipeline(io, spec.layout, spec.plan, leases,
               {.swap_slots = spec.swap_slots,
                .sum_slots = spec.sum_slots,
                .recorded_sums = spec.kept_update() == nullptr ? std::span<const KeptUpdate::Sums>()
                                                               : spec.kept_update()->sums,
                .swap = swap,
                .path_table = path_table,
                .pool = pool,
                .workers = spec.options.workers,
                .keeps_jobs = spec.options.keeps_jobs}),
      weights(io, spec.layout, spec.plan, pipeline, leases),
      access(io, spec.layout, pipeline, weights, leases),
      residency(io, pipeline, weights, swap, spec.plan.swap_slot_bytes),
      durable(spec, io, pipeline),
      step(spec, io, members, pipeline, durable, access, weights, leases),
      fetches(step.parts(), access, weights, leases) {
  if (spec.kept_update() != nullptr) pipeline.store().KeepStaged(*spec.kept_update());
  for (const KeptLease& lease : leases.recorded()) {
    if (!weights.Adopt(lease)) (void)leases.Release(/*session=*/0, lease.lease);
  }
}

}  // namespace forebay::daemon
