// A job's way to a durable ledger, and back from there.

#include <algorithm>
#include <utility>

#include "daemon/core/job.h"

namespace forebay::daemon {

// The arenas of a job that comes back are made: they get their bytes.
void Job::Restore() {
  is_restoring_ = true;
  step_.Recover(*spec_.recovered);
  ++making_tasks_;
  RestoreExtraStates extra{.extra_states = spec_.recovered->extra_states};
  const size_t ranks = std::min<size_t>(spec_.world_size(), extra.extra_states->size());
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    extra.offsets_bytes.push_back(step_.extra_state_offset(rank));
  }
  io_.Start(TaskKind::kRestoreExtraStates, 0, std::move(extra));
  durable_.StartRestore();
}

void Job::OnRestored(const TaskDone& done) {
  const absl::Status status = durable_.OnRestored(done);
  if (!status.ok() && failed_.ok()) failed_ = status;
  TryEndRestore();
}

void Job::TryEndRestore() {
  if (making_tasks_ > 0 || durable_.is_restoring()) return;
  is_restoring_ = false;
  if (!failed_.ok()) {
    Refuse(failed_);
    return;
  }
  is_unrestored_ = false;
  initial_.Recover();
  if (is_resumed()) {
    step_.Resume(*spec_.recovered->kept->update);
    return;
  }
  const KeptMemory* const kept = KeptOf(spec_.recovered.get());
  const bool is_due =
      durable_.IsDue(step_.published_step()) && durable_.durable_step() < step_.published_step();
  if (kept != nullptr && kept->was_killed && is_due) durable_.Begin(step_.PublishedNow());
}

void Job::OnLedger(const absl::Status& status) {
  durable_.OnCommitted(status);
  if (!durable_.in_progress()) step_.OnDurable();
}

}  // namespace forebay::daemon
