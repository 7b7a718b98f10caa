// SPDX-License-Identifier: Apache-2.0
// Views and invariants of a job.

#include <algorithm>
#include <vector>

#include "daemon/core/base/limits.h"
#include "daemon/core/job/job.h"
#include "daemon/core/plan/job_plan.h"
#include "protocol/os/check.h"

namespace forebay::daemon {

namespace {

// Returns the bytes of the weights and states of all parameters, without padding.
uint64_t StateBytesOf(const protocol::Layout& layout) {
  const protocol::LayoutSpec& spec = layout.spec();
  return layout.total_elems() * protocol::SizeBytes(spec.dtype) +
         protocol::StateBytes(spec.optimizer, spec.format, spec.dtype, layout.trainable_elems());
}

}  // namespace

JobView Job::View() const {
  const protocol::Layout& layout = *spec_.layout;
  JobView view{.name = spec_.name,
               .id = spec_.id,
               .uid = spec_.uid,
               .layout = spec_.layout,
               .sessions = {},
               .generation = members_.generation(),
               .detached_rank = members_.FirstDetached(),
               .committed_step = step_.committed_step(),
               .published_step = step_.published_step(),
               .durability = spec_.plan.session.durability,
               .durable_step = durable_.durable_step(),
               .world_size = spec_.plan.session.world_size,
               .params = layout.total_elems(),
               .trainable_params = layout.trainable_elems(),
               .state_bytes = StateBytesOf(layout),
               .blocks = pipeline_.map().blocks(),
               .resident_blocks = placement().resident_blocks(),
               .resident_bytes = has_begun_ ? placement().state_bytes() : 0,
               .weights_on_swap_bytes = spec_.plan.weights_on_swap_bytes,
               .weights_cache_bytes = spec_.plan.weights_cache_bytes,
               .weights = weights_.counters(),
               .moves = residency_.counters(),
               .leases = leases_.count(),
               .update_reads = pipeline_.counters().update_reads,
               .update_reads_prefetched = pipeline_.counters().update_reads_prefetched,
               .reclaimed_reads = pipeline_.staged().reclaimed(),
               .state_read_bytes = pipeline_.counters().read_bytes,
               .state_written_bytes = pipeline_.counters().written_bytes,
               .last_step_reads = pipeline_.last_step().update_reads,
               .last_step_reads_prefetched = pipeline_.last_step().update_reads_prefetched,
               .last_step_read_bytes = pipeline_.last_step().read_bytes,
               .last_step_written_bytes = pipeline_.last_step().written_bytes,
               .last_update_bytes = pipeline_.last_update_bytes(),
               .early_updates = pipeline_.counters().early_updates,
               .dropped_updates = pipeline_.counters().dropped_updates,
               .last_step_early_updates = pipeline_.last_step().early_updates,
               .restored_bytes = durable_.restored_bytes(),
               .to_restore_bytes = durable_.to_restore_bytes(),
               .ready = is_ready(),
               .failed = failed_,
               .dram_bytes = dram_bytes(),
               .swap_bytes = swap_bytes(),
               .sum_frames_bytes = spec_.plan.sum_frames * spec_.plan.sum_page_bytes,
               .sums_on_swap_bytes = spec_.plan.sums_on_swap_bytes(),
               .sums = pipeline_.sums().swap().counters(),
               .step_traffic = StepTrafficOf(layout, spec_.plan, placement()),
               .new_weights_bytes = spec_.plan.early_weights_bytes,
               .swap_wait = pipeline_.swap_wait().ok() ? durable_.wait() : pipeline_.swap_wait(),
               .trace = TracedGroups()};
  for (const auto& [id, session] : members_.all()) {
    view.sessions.push_back({.id = id,
                             .uid = session.uid,
                             .reader = session.reader,
                             .rank = session.rank,
                             .attached = session.state == Session::State::kAttached,
                             .fenced = !session.fence.ok(),
                             .leases = leases_.count_of(id),
                             .commands_in_flight = io_.commands_of(id)});
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

void Job::CheckInvariants() const {
  const Activities under_way = UnderWay();
  for (const Activity a : kLastingActivities) {
    for (const Activity b : kLastingActivities) {
      FOREBAY_CHECK(a == b || !under_way.has(a) || !under_way.has(b) || !AreNeverTogether(a, b));
    }
  }
  step_.CheckInvariants();
  members_.CheckInvariants();
  uint64_t leases = leases_.count_of_nobody();
  for (const auto& [id, session] : members_.all()) {
    leases += leases_.count_of(id);
    FOREBAY_CHECK(leases_.count_of(id) <= kLeasesPerSessionMax);
    if (session.state == Session::State::kEnded) {
      FOREBAY_CHECK(leases_.count_of(id) == 0);
      continue;
    }
    // Checks that each unanswered command waits in exactly one place.
    uint64_t waiting = step_.unanswered(session) + access_.unanswered(id) + fetches_.unanswered(id);
    waiting += initial_.unanswered(id);
    FOREBAY_CHECK(waiting == io_.commands_of(id));
  }
  FOREBAY_CHECK(leases == leases_.count());
  weights_.CheckInvariants();
}

}  // namespace forebay::daemon
