// SPDX-License-Identifier: Apache-2.0
// Restores a job from a durable ledger, and returns a job to a durable step.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/core/base/job_name.h"
#include "daemon/core/job/job.h"
#include "protocol/error.h"

namespace forebay::daemon {

using protocol::Command;
using protocol::ErrorId;
using protocol::MakeError;

// Restores the bytes of a recovered job. Called once the arenas are created.
void Job::Restore() {
  is_restoring_ = true;
  step_.Recover(*spec_.recovered);
  ++making_tasks_;
  RestoreExtraStates extra{.extra_states = spec_.recovered->extra_states};
  const size_t ranks = std::min<size_t>(spec_.world_size(), extra.extra_states->size());
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    extra.offsets_bytes.push_back(step_.extra().Part(rank).offset_bytes);
  }
  io_.Start(TaskKind::kRestoreExtraStates, 0, std::move(extra));
  RestorePreparedStates();
  durable_.StartRestore();
}

// Restores the extra states of a step that the previous daemon prepared. They become the job's extra states when that step is
// decided.
void Job::RestorePreparedStates() {
  if (!is_resumed() || !spec_.recovered->kept->update->prepared) return;
  RestoreExtraStates extra{.extra_states = spec_.recovered->kept->update->prepared->extra_states};
  for (uint32_t rank = 0; rank < extra.extra_states->size(); ++rank) {
    extra.offsets_bytes.push_back(spec_.plan.extra_state_slot(rank, 1 - step_.extra().slot()));
  }
  ++making_tasks_;
  io_.Start(TaskKind::kRestoreExtraStates, 0, std::move(extra));
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
  if (kept != nullptr && is_due) durable_.Begin(step_.PublishedNow());
}

void Job::HandleGoBack(Session& session, const Command& command) {
  const CommandId id = session.IdOf(command);
  const uint64_t step = command.step;
  if (!spec_.is_over_nodes()) {
    io_.Answer(id, MakeError(ErrorId::kUnsupported,
                             absl::StrCat("job ", spec_.name, " is on one node, and is to go back ",
                                          "to step ", step)));
    return;
  }
  if (step == step_.committed_step() && step_.prepared_step() == 0) {
    io_.Answer(id, absl::OkStatus());
    return;
  }
  const std::shared_ptr<const DurableJob> to = OfStep(durable_.durable(), step);
  if (to == nullptr) {
    io_.Answer(id, MakeError(ErrorId::kStep,
                             absl::StrCat("job ", spec_.name, " is to go back to step ", step,
                                          ", which is not durable here; its durable step is ",
                                          durable_.durable_step())));
    return;
  }
  io_.Answer(id, absl::OkStatus());
  io_.actions().Emit(
      JobWentBack{.job = JobNameFor(/*uid=*/0, {.uid = spec_.uid, .name = spec_.name}),
                  .from_step = step_.committed_step(),
                  .to_step = step});
  goes_back_to_ = to;
  EndAll(MakeError(ErrorId::kFenced,
                   absl::StrCat("job ", spec_.name, " goes back from step ", step_.committed_step(),
                                " to step ", step, ", the newest that all its nodes have"),
                   "attach again"));
}

void Job::OnLedger(const absl::Status& status) {
  durable_.OnCommitted(status);
  if (!durable_.in_progress()) step_.OnDurable();
}

}  // namespace forebay::daemon
