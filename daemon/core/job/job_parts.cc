// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/job/job_parts.h"

#include <utility>

namespace forebay::daemon {

JobParts::JobParts(JobSpec job_spec, ActionSink& actions, StagingPool& pool, nvme::SlotMap& swap,
                   PathTable& path_table)
    : spec(std::move(job_spec)),
      io(actions, spec.id),
      members(spec, io),
      initial(spec, io),
      leases(actions, spec.id),
      pipeline(io, spec.layout, spec.plan, leases,
               {.swap_slots = spec.swap_slots,
                .sum_slots = spec.sum_slots,
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
      fetches(spec, io, step, access, weights, leases) {
  const KeptMemory* const kept = KeptOf(spec.recovered.get());
  if (kept == nullptr) return;
  if (kept->update != nullptr) pipeline.store().KeepStaged(*kept->update);
  for (const KeptLease& lease : kept->leases) {
    if (weights.Adopt(lease)) {
      leases.Adopt(lease);
    } else {
      io.actions().Emit(RecordLeaseEnd{.job = spec.id, .lease = lease.lease});
    }
  }
}

}  // namespace forebay::daemon
