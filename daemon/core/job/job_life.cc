// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/job/job_life.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/os/check.h"

namespace forebay::daemon {

void JobLife::Enter(State next) {
  static constexpr auto kEnterable = std::to_array<std::pair<State, State>>({
      {kQueued, kCreating},      // enough DRAM is free
      {kQueued, kDiscarded},     // not enough DRAM becomes free, or the sessions have ended
      {kQueued, kDeleted},       // a client deletes a job that was recovered in an update
      {kCreating, kRestoring},   // the arenas of a recovered job are created
      {kCreating, kActive},      // the arenas of a new job are created
      {kCreating, kDiscarded},   // the memory could not be created, or the sessions have ended
      {kCreating, kDeleted},     // a client deletes the job
      {kRestoring, kActive},     // everything is restored
      {kRestoring, kDiscarded},  // the bytes could not be restored
      {kRestoring, kDeleted},    // a client deletes the job
      {kActive, kDiscarded},     // the sessions have ended before all parameters were written
      {kActive, kDeleted},       // a client deletes the job
      {kActive, kGoingBack},     // the nodes of the job return to a durable step
      {kDiscarded, kDeleted},    // a client deletes a job that a reader or a task still uses
      {kGoingBack, kDeleted},    // a client deletes the job before its memory is free
  });
  FOREBAY_CHECK(std::ranges::find(kEnterable, std::pair{state_, next}) != kEnterable.end());
  state_ = next;
}

void JobLife::Begin() {
  Enter(kCreating);
  has_begun_ = true;
  ++tasks_;
  const JobSpec& spec = job_.spec;
  const MemoryPlan& plan = spec.plan;
  job_.io.Start(
      TaskKind::kJobMemory, 0,
      CreateJobMemory{.is_kept = spec.kept() != nullptr,
                      .keeps_gradients = spec.keeps_gradients,
                      .keeps_step = is_resumed(),
                      .weights_bytes = plan.weights_bytes,
                      .state_bytes = plan.placement.arena_bytes(),
                      .resident = plan.placement.ResidentParts(),
                      .block_bytes = plan.block_bytes,
                      .step_bytes = plan.step_bytes,
                      .step_capacity_bytes = plan.step_capacity_bytes(),
                      .float_sums = plan.uses_float_sums ? plan.float_sums_part() : StatePart{}});
  CreateJobSwap swap{.slots = spec.swap_slots};
  swap.slots.insert(swap.slots.end(), spec.sum_slots.begin(), spec.sum_slots.end());
  if (spec.recovered != nullptr) spec.recovered->RemoveOwn(swap.slots);
  if (swap.slots.empty()) return;
  ++tasks_;
  job_.io.Start(TaskKind::kJobSwap, 0, std::move(swap));
}

void JobLife::Refuse(const absl::Status& reason) {
  error_ = reason;
  if (!is_ending()) Enter(kDiscarded);
  job_.step.Fail(error_);
}

void JobLife::OnMemoryMade(const TaskDone& done) {
  AddError(done.status);
  if (--tasks_ > 0) return;
  if (!error_.ok()) {
    Refuse(error_);
  } else if (state_ == kCreating && job_.spec.recovered != nullptr) {
    StartRestore();
  } else if (state_ == kCreating) {
    Enter(kActive);
  }
}

void JobLife::StartRestore() {
  Enter(kRestoring);
  const DurableJob& recovered = *job_.spec.recovered;
  const auto restore = [this](const ExtraStates& states, uint32_t slot) {
    RestoreExtraStates extra{.extra_states = states};
    const size_t ranks = std::min<size_t>(job_.spec.world_size(), states->size());
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      extra.offsets_bytes.push_back(job_.spec.plan.extra_state_slot(rank, slot));
    }
    ++tasks_;
    job_.io.Start(TaskKind::kRestoreExtraStates, 0, std::move(extra));
  };
  const uint32_t slot = job_.step.parts().extra.slot();
  restore(recovered.extra_states, slot);
  // The extra states of a step that the previous daemon prepared become the job's when that step is decided.
  if (is_resumed() && job_.spec.kept_update()->prepared) {
    restore(job_.spec.kept_update()->prepared->extra_states, 1 - slot);
  }
  job_.durable.StartRestore();
}

void JobLife::OnRestored(const TaskDone& done) {
  AddError(job_.durable.OnRestored(done));
  TryEndRestore();
}

void JobLife::OnExtraStatesRestored(const TaskDone& done) {
  --tasks_;
  AddError(done.status);
  TryEndRestore();
}

void JobLife::TryEndRestore() {
  if (tasks_ > 0 || job_.durable.is_restoring()) return;
  if (!error_.ok()) {
    Refuse(error_);
    return;
  }
  Enter(kActive);
  if (is_resumed()) {
    job_.step.Resume(*job_.spec.kept_update());
    return;
  }
  const uint64_t step = job_.step.published_step();
  const bool is_due = job_.durable.IsDue(step) && job_.durable.durable_step() < step;
  if (job_.spec.kept() != nullptr && is_due) {
    job_.durable.Begin(job_.step.PublishedNow());
  }
}

void JobLife::GoBackTo(std::shared_ptr<const DurableJob> step) {
  Enter(kGoingBack);
  goes_back_to_ = std::move(step);
}

void JobLife::Delete() {
  if (state_ != kDeleted) Enter(kDeleted);
}

void JobLife::FreeWhenUnused() {
  // Discards a job that has neither parameters nor sessions, unless it is a recovered job that is being restored, which needs no
  // session.
  const bool is_needed = is_unrestored() ? has_begun_ || is_resumed() : job_.initial.ready();
  if (!is_ending() && !is_needed && job_.members.empty()) Enter(kDiscarded);
  if (!is_ending() || is_freed_ || !job_.members.empty() || !job_.io.idle()) return;
  is_freed_ = true;
  job_.io.actions().Emit(
      FreeJob{.job = job_.spec.id,
              .keeps_arenas = is_unrestored() && job_.spec.kept() != nullptr && !is_resumed()});
}

absl::Status JobLife::FailedStatus() const {
  const bool is_on_disk = job_.durable.durable() != nullptr;
  return protocol::MakeError(
      protocol::ErrorId::kJobFailed,
      absl::StrCat("job ", job_.spec.name, " failed after step ", job_.step.published_step(), ": ",
                   std::string(error_.message())),
      is_on_disk ? absl::StrCat("restart forebayd: the job comes back at its durable step ",
                                job_.durable.durable_step(), ", which deleting it would give up")
                 : "delete the job and start it again from a checkpoint");
}

std::shared_ptr<const DurableJob> JobLife::unrestored() const {
  if (goes_back()) return goes_back_to_;
  return is_unrestored() ? job_.spec.recovered : nullptr;
}

bool JobLife::is_resumed() const { return job_.spec.kept_update() != nullptr && !goes_back(); }

std::shared_ptr<const DurableJob> JobLife::ForLedger() const {
  if (unrestored() != nullptr) return InLedger(unrestored());
  return is_ending() ? nullptr : job_.durable.ForLedger();
}

std::shared_ptr<const DurableJob> JobLife::durable() const {
  if (unrestored() != nullptr) return InLedger(unrestored());
  return is_ending() ? nullptr : job_.durable.durable();
}

}  // namespace forebay::daemon
