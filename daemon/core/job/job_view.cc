// SPDX-License-Identifier: Apache-2.0
// Views of jobs, as clients see them.

#include <algorithm>
#include <vector>

#include "daemon/core/job/job.h"
#include "daemon/core/plan/job_plan.h"

namespace forebay::daemon {

namespace {

// Returns the bytes of the weights and states of all parameters, without padding.
uint64_t StateBytesOf(const protocol::Layout& layout) {
  const protocol::LayoutSpec& spec = layout.spec();
  return layout.total_elems() * protocol::SizeBytes(spec.dtype) +
         protocol::StateBytes(spec.optimizer, spec.format, spec.dtype, layout.trainable_elems());
}

std::vector<uint32_t> TracedGroups(const JobParts& job) {
  std::vector<uint32_t> groups;
  std::vector<bool> seen(job.spec.layout->groups().size(), false);
  for (const uint32_t partition : job.step.parts().trace.committed()) {
    const uint32_t group = job.spec.layout->partitions()[partition].group;
    if (!seen[group]) groups.push_back(group);
    seen[group] = true;
  }
  return groups;
}

}  // namespace

JobView ViewOf(const Job& job) {
  const JobParts& parts = job.parts();
  const protocol::Layout& layout = *parts.spec.layout;
  const StepPipeline::Statistics work = parts.pipeline.statistics();
  JobView view{.name = parts.spec.name,
               .id = parts.spec.id,
               .uid = parts.spec.uid,
               .layout = parts.spec.layout,
               .sessions = {},
               .generation = parts.members.generation(),
               .detached_rank = parts.members.FirstDetached(),
               .committed_step = parts.step.committed_step(),
               .published_step = parts.step.published_step(),
               .durability = parts.spec.plan.session.durability,
               .durable_step = parts.durable.durable_step(),
               .world_size = parts.spec.plan.session.world_size,
               .params = layout.total_elems(),
               .trainable_params = layout.trainable_elems(),
               .state_bytes = StateBytesOf(layout),
               .blocks = parts.pipeline.store().map().blocks(),
               .resident_blocks = job.placement().resident_blocks(),
               .resident_bytes = job.life().has_begun() ? job.placement().state_bytes() : 0,
               .weights_on_swap_bytes = parts.spec.plan.weights_on_swap_bytes,
               .weights_cache_bytes = parts.spec.plan.weights_cache_bytes,
               .weights = parts.weights.counters(),
               .moves = parts.residency.counters(),
               .leases = parts.leases.count(),
               .update_reads = work.all.update_reads,
               .update_reads_prefetched = work.all.update_reads_prefetched,
               .reclaimed_reads = parts.pipeline.store().blocks().reclaimed(),
               .state_read_bytes = work.all.read_bytes,
               .state_written_bytes = work.all.written_bytes,
               .last_step_reads = work.last_step.update_reads,
               .last_step_reads_prefetched = work.last_step.update_reads_prefetched,
               .last_step_read_bytes = work.last_step.read_bytes,
               .last_step_written_bytes = work.last_step.written_bytes,
               .last_update_bytes = work.last_update_bytes,
               .early_updates = work.all.early_updates,
               .dropped_updates = work.all.dropped_updates,
               .last_step_early_updates = work.last_step.early_updates,
               .restored_bytes = parts.durable.restored_bytes(),
               .to_restore_bytes = parts.durable.to_restore_bytes(),
               .ready = parts.is_ready() && !job.life().is_unrestored(),
               .failed = job.life().error(),
               .dram_bytes = job.world().dram_bytes(),
               .swap_bytes = job.world().swap_bytes(),
               .sum_frames_bytes = parts.spec.plan.sum_frames * parts.spec.plan.sum_page_bytes,
               .sums_on_swap_bytes = parts.spec.plan.sums_on_swap_bytes(),
               .sums = parts.pipeline.sums().swap().counters(),
               .step_traffic = StepTrafficOf(layout, parts.spec.plan, job.placement()),
               .new_weights_bytes = parts.spec.plan.early_weights_bytes,
               .swap_wait = parts.pipeline.swap_wait().ok() ? parts.durable.wait()
                                                            : parts.pipeline.swap_wait(),
               .trace = TracedGroups(parts)};
  for (const auto& [id, session] : parts.members.all()) {
    view.sessions.push_back({.id = id,
                             .uid = session.uid,
                             .reader = session.reader,
                             .rank = session.rank,
                             .attached = session.state == Session::State::kAttached,
                             .fenced = !session.fence.ok(),
                             .leases = parts.leases.count_of(id),
                             .commands_in_flight = parts.io.commands_of(id)});
  }
  std::stable_sort(view.sessions.begin(), view.sessions.end(),
                   [](const SessionView& a, const SessionView& b) { return a.rank < b.rank; });
  return view;
}

JobView ViewOf(const DurableJob& job) {
  const protocol::Layout& layout = *job.layout;
  JobView view;
  view.name = job.name;
  view.id = job.id;
  view.uid = job.uid;
  view.layout = job.layout;
  view.committed_step = view.published_step = job.step;
  if (job.durability.level != protocol::DurabilityLevel::kMemory) {
    const DurableJob* const durable = job.kept ? job.kept->durable.get() : &job;
    if (durable != nullptr) view.durable_step = durable->step;
  }
  view.world_size = job.world_size;
  view.durability = job.durability;
  view.params = layout.total_elems();
  view.trainable_params = layout.trainable_elems();
  view.state_bytes = StateBytesOf(layout);
  view.blocks = static_cast<uint32_t>(job.blocks.size());
  view.ready = true;
  for (const nvme::Slot& slot : job.AllSlots()) view.swap_bytes += slot.size_bytes;
  if (job.kept) {
    view.dram_bytes = job.kept->dram_bytes;
    view.resident_blocks = static_cast<uint32_t>(std::ranges::count(job.kept->resident, true));
  }
  return view;
}

}  // namespace forebay::daemon
