// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/job/job_stop.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "daemon/core/base/activity.h"
#include "daemon/core/blocks/block_ledger.h"
#include "daemon/core/blocks/durable_content.h"
#include "protocol/os/check.h"

namespace forebay::daemon {

bool JobStop::MayStop() const {
  if (job_.failed() || life_.is_ending() || !world_.has_step_arena()) return false;
  // If the job is being restored from the disk, the next daemon restores it from the disk again. If the job is not ready, its
  // ranks write the initial parameters again.
  const bool is_continued = life_.is_unrestored() ? job_.spec.kept() != nullptr : job_.is_ready();
  return is_continued && !loses_slots();
}

// True if the job is quiescent. Clients send commands that arrive now, or that wait for other ranks, to the next daemon again.
bool JobStop::IsQuiet() const {
  const bool holds_copies =
      job_.spec.plan.has_weights_on_swap() && job_.leases.count_of_sessions() > 0;
  return MayStop() && MayBegin(Activity::kStop, world_.UnderWay()) && !world_.has_next_plan() &&
         job_.io.idle() && job_.step.is_quiet() && !holds_copies;
}

bool JobStop::MayServeFetches() const {
  if (state_ == State::kNone || !job_.spec.plan.has_weights_on_swap()) return true;
  return is_stopping() && (job_.leases.count_of_sessions() > 0 || !job_.step.is_quiet());
}

// True if the step waits for a rank that has detached or is disconnected. During a stop ranks may return, but none attaches
// from scratch.
bool JobStop::MissesRank() const {
  const Membership& members = job_.members;
  const bool waits_in_vain =
      members.has_begun_anew() && members.live_ranks() < members.world_size();
  const auto is_away = [](const auto& entry) { return entry.second.is_away; };
  return waits_in_vain || members.FirstDetached().has_value() ||
         std::ranges::any_of(members.all(), is_away);
}

void JobStop::TryStop() {
  if (is_stopping() && MissesRank()) job_.step.gathering().GiveUp();
  if (is_stopping() && IsQuiet()) {
    state_ = State::kSaving;
    if (job_.spec.plan.has_durable_steps()) {
      job_.durable.Begin(job_.step.PublishedNow());
      job_.durable.Pump();
    }
  }
  if (state_ != State::kSaving || job_.failed() || job_.durable.in_progress()) return;
  FOREBAY_CHECK(!job_.spec.plan.has_durable_steps() ||
                job_.durable.durable_step() == job_.step.published_step());
  if (job_.spec.options.keeps_jobs) Record();
  state_ = State::kDone;
}

void JobStop::TryRecord() {
  if (has_record() || !job_.spec.options.keeps_jobs || !job_.is_ready() || job_.failed()) return;
  if (life_.is_ending() || !world_.has_step_arena() || loses_slots()) return;
  if (MayBegin(Activity::kRecord, world_.UnderWay())) Record();
}

void JobStop::Record() {
  DurableSteps::Published published = job_.step.PublishedNow();
  std::vector<StatePart> extra_states = std::move(published.extra_states);
  DurableJob job = job_.durable.ValuesOf(std::move(published));
  const MemoryPlan& plan = job_.spec.plan;
  KeptMemory kept{.resident = {},
                  .written_steps = {},
                  .weights_bytes = plan.weights_bytes,
                  .step_bytes = plan.step_bytes,
                  .dram_bytes = world_.dram_bytes() - world_.unused_sums_bytes(),
                  .session = plan.session,
                  .early_weights_slots = plan.early_weights_slots,
                  .sum_frames = plan.sum_frames,
                  .spare_slots = {world_.swap_slots().begin(), world_.swap_slots().end()},
                  .sum_slots = {world_.sum_slots().begin(), world_.sum_slots().end()},
                  .leases = job_.leases.recorded()};
  for (uint32_t block = 0; block < job_.pipeline.store().map().blocks(); ++block) {
    const auto& current = job_.pipeline.store().ledger().current(block);
    job.blocks.push_back(BytesOf(current));
    kept.resident.push_back(job_.pipeline.store().is_resident(block));
    kept.written_steps.push_back(current.written_step);
  }
  job_.step.Record(kept, /*is_last=*/is_quiescent());
  job.RemoveOwn(kept.spare_slots);
  job.kept = std::move(kept);
  job_.io.actions().Emit(RecordJob{.job = std::make_shared<const DurableJob>(std::move(job)),
                                   .extra_states = std::move(extra_states),
                                   .sum_pages = plan.sum_pages,
                                   .has_record = has_record()});
  is_recorded_ = true;
  recorded_run_ = job_.members.run();
}

void JobStop::EndRecord() {
  is_recorded_ = false;
  if (job_.spec.options.keeps_jobs) job_.io.actions().Emit(DropRecord{.job = job_.spec.id});
}

std::vector<SessionId> JobStop::StoppedSessions() const {
  std::vector<SessionId> sessions;
  for (const auto& [id, session] : job_.members.all()) {
    if (!session.reader && session.is_current() && session.mapped) sessions.push_back(id);
  }
  return sessions;
}

}  // namespace forebay::daemon
