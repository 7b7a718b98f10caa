// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/node_snapshot.h"

#include <optional>
#include <utility>
#include <vector>

#include "cpu_adam/targets.h"
#include "daemon/exec/clock.h"

namespace forebay::daemon {

NodeSnapshot MakeSnapshot(const SnapshotSources& from) {
  NodeSnapshot snapshot;
  snapshot.uptime_seconds = static_cast<double>(MonotonicNs() - from.start_ns) * 1e-9;
  snapshot.node = from.state.Node();
  snapshot.memory = from.registry.Totals();
  snapshot.arenas = from.registry.Lines();
  if (from.swap != nullptr) {
    const nvme::VolumeStats stats = from.swap->stats();
    const std::vector<PathWear> wear = from.swap->wear();
    for (size_t i = 0; i < stats.paths.size(); ++i) {
      const LatePath& late = from.swap->late()[i];
      snapshot.swap.push_back({.path = from.swap->paths()[i].path,
                               .stats = stats.paths[i],
                               .view = snapshot.node.swap_paths[i],
                               .wear = wear[i],
                               .rates = from.swap->rates(i),
                               .late_requests = late.requests,
                               .late_seconds = static_cast<double>(late.oldest_ns) * 1e-9});
    }
  }
  for (JobView& view : from.state.Jobs()) {
    const JobMemory* memory = from.jobs.Find(view.id);
    JobSnapshot& job = snapshot.jobs.emplace_back(JobSnapshot{.view = std::move(view)});
    if (memory == nullptr) continue;
    job.last_step_seconds = memory->timeline.newest_seconds();
    job.last_decision_seconds = memory->timeline.newest_decision_seconds();
    job.rpc_calls = *memory->rpc_calls;
    const auto zeroing = from.swap == nullptr ? std::nullopt : from.swap->Zeroing(job.view.id);
    const bool is_restoring = job.view.restored_bytes < job.view.to_restore_bytes;
    if (!memory->is_making && !zeroing && !is_restoring) continue;
    const ZeroingProgress swap = zeroing.value_or(ZeroingProgress{});
    job.made_bytes = *memory->made_bytes + swap.zeroed_bytes + job.view.restored_bytes;
    job.making_bytes = memory->making_bytes + swap.total_bytes + job.view.to_restore_bytes;
  }
  snapshot.io_engine = from.engine.name();
  snapshot.io_engine_reason = from.io_engine_reason;
  snapshot.adam_target = cpu_adam::ChosenTarget();
  snapshot.workers = from.runner.workers();
  snapshot.scrub = from.scrub;
  snapshot.loop_events = from.events;
  snapshot.loop_cpu_seconds = OwnCpuSeconds();
  return snapshot;
}

}  // namespace forebay::daemon
