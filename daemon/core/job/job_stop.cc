// SPDX-License-Identifier: Apache-2.0
// Planned stop and record of a job. A job that stops becomes quiescent between two steps, and is then recorded. Its arenas are
// retained, so that the next daemon can continue the job. The ranks attach again, and repeat commands that were not answered.

#include <algorithm>
#include <memory>
#include <utility>

#include "daemon/core/blocks/block_ledger.h"
#include "daemon/core/blocks/durable_content.h"
#include "daemon/core/job/job.h"
#include "protocol/os/check.h"

namespace forebay::daemon {

void Job::RequestStop() {
  if (stop_ == Stop::kNone) stop_ = Stop::kWanted;
}

bool Job::MayStop() const {
  if (failed() || deleting_ || !has_step_arena_) return false;
  // The next daemon restores a job that was being restored from the disk. The ranks of a job that is not ready write the
  // initial parameters again.
  const bool comes_from_disk = is_unrestored_ && !spec_.recovered->kept;
  const bool comes_back = is_unrestored_ && spec_.recovered->kept.has_value();
  return !comes_from_disk && (is_ready() || comes_back) &&
         !(spec_.options.loses_swap && swap_bytes() > 0);
}

// True if the job is quiescent. Clients send commands that arrive now, or that wait for other ranks, to the next daemon again.
bool Job::IsQuiet() const {
  const bool holds_copies = spec_.plan.has_weights_on_swap() && leases_.count_of_sessions() > 0;
  return MayStop() && MayBegin(Activity::kStop, UnderWay()) && !next_plan_ && io_.idle() &&
         step_.is_quiet() && !holds_copies;
}

// True if fetches may be answered. During a stop, a rank with a lease on weights of the cache may wait for another rank
// that has no lease yet. Once no session has a lease and no gradient has arrived, no more leases are granted.
bool Job::MayServeFetches() const {
  if (stop_ == Stop::kNone || !spec_.plan.has_weights_on_swap()) return true;
  return stop_ == Stop::kWanted && (leases_.count_of_sessions() > 0 || !step_.is_quiet());
}

// Handles the end of a rank that was attached to the previous daemon, like the end of a session of this daemon. The rank is
// refused if it returns later.
void Job::OnRankEnded(const RankEnded& event) {
  if (members_.has_begun_anew() || members_.OfRank(event.rank) != nullptr) return;
  if (members_.Current().empty() || !initial_.ready() || failed() || is_at_rest()) return;
  if (!event.has_detached) return OnRankFailed(event.rank, nullptr);
  if (members_.is_detached(event.rank)) return;
  members_.SetDetached(event.rank);
  step_.OnRankDetached(event.rank);
}

absl::Status Job::CheckReattach(const AttachRequested& request) const {
  const bool may_go_on = !request.is_left_behind && !members_.has_begun_anew() &&
                         !(request.rank < spec_.world_size() && members_.is_detached(request.rank));
  if (may_go_on) return absl::OkStatus();
  return LeftBehindError(spec_.name, step_.committed_step());
}

// True if the step waits for a rank that has detached or is disconnected. During a stop ranks may return, but none attaches
// from scratch.
bool Job::MissesRank() const {
  const bool waits_in_vain =
      members_.has_begun_anew() && members_.live_ranks() < members_.world_size();
  const auto is_away = [](const auto& entry) { return entry.second.is_away; };
  return waits_in_vain || members_.FirstDetached().has_value() ||
         std::ranges::any_of(members_.all(), is_away);
}

void Job::TryStop() {
  if (stop_ == Stop::kWanted && MissesRank()) step_.GiveUpAttempt();
  if (stop_ == Stop::kWanted && IsQuiet()) {
    stop_ = Stop::kSaving;
    if (spec_.plan.has_durable_steps()) {
      durable_.Begin(step_.PublishedNow());
      durable_.Pump();
    }
  }
  if (stop_ != Stop::kSaving || failed() || durable_.in_progress()) return;
  FOREBAY_CHECK(!spec_.plan.has_durable_steps() ||
                durable_.durable_step() == step_.published_step());
  if (spec_.options.keeps_jobs) Record();
  stop_ = Stop::kDone;
}

KeptMemory Job::Kept() const {
  KeptMemory kept{.resident = {},
                  .written_steps = {},
                  .weights_bytes = spec_.plan.weights_bytes,
                  .step_bytes = spec_.plan.step_bytes,
                  .dram_bytes = dram_bytes(),
                  .session = spec_.plan.session,
                  .early_weights_slots = spec_.plan.early_weights_slots,
                  .sum_frames = spec_.plan.sum_frames,
                  .spare_slots = {swap_slots().begin(), swap_slots().end()},
                  .sum_slots = {sum_slots().begin(), sum_slots().end()},
                  .leases = leases_.recorded()};
  // The record does not include float32 sums that are not used yet.
  if (float_sums_ == FloatSums::kMade) kept.dram_bytes -= spec_.plan.float_sums_bytes;
  for (uint32_t block = 0; block < pipeline_.map().blocks(); ++block) {
    kept.resident.push_back(pipeline_.is_resident(block));
    kept.written_steps.push_back(pipeline_.ledger().current(block).written_step);
  }
  return kept;
}

// Creates a new record of the job if it has none or an outdated one, as soon as no task changes the job.
void Job::TryRecord() {
  if (has_record() || !spec_.options.keeps_jobs || !is_ready() || failed() || deleting_) return;
  if (!has_step_arena_ || !MayBegin(Activity::kRecord, UnderWay())) return;
  if (spec_.options.loses_swap && swap_bytes() > 0) return;
  Record();
}

void Job::Record() {
  DurableSteps::Published published = step_.PublishedNow();
  std::vector<StatePart> extra_states = std::move(published.extra_states);
  DurableJob job = durable_.ValuesOf(std::move(published));
  for (uint32_t block = 0; block < pipeline_.map().blocks(); ++block) {
    job.blocks.push_back(BytesOf(pipeline_.ledger().current(block)));
  }
  KeptMemory kept = Kept();
  step_.Record(kept, /*is_last=*/is_at_rest());
  job.RemoveOwn(kept.spare_slots);
  job.kept = std::move(kept);
  io_.actions().Emit(RecordJob{.job = std::make_shared<const DurableJob>(std::move(job)),
                               .extra_states = std::move(extra_states),
                               .sum_pages = spec_.plan.sum_pages,
                               .has_record = has_record()});
  is_recorded_ = true;
  recorded_run_ = members_.run();
}

std::vector<SessionId> Job::StoppedSessions() const {
  std::vector<SessionId> sessions;
  for (const auto& [id, session] : members_.all()) {
    if (!session.reader && session.is_current() && session.mapped) sessions.push_back(id);
  }
  return sessions;
}

}  // namespace forebay::daemon
