// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/step/step_gathering.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/os/check.h"

namespace forebay::daemon {

using protocol::Command;
using protocol::ErrorId;
using protocol::MakeError;

StepGathering::StepGathering(StepParts& step) : step_(step) {
  if (const KeptMemory* const kept = step_.spec.kept()) Set(kept->attempt);
}

// ---------------------------------------------------------------------------------------- attempts

absl::Status StepGathering::CheckAttempt(const Session& session, const Command& command) const {
  if (command.attempt <= attempt_ + 1) return absl::OkStatus();
  return MakeError(
      ErrorId::kProtocol,
      absl::StrCat("rank ", step_.spec.layout->WorldRank(session.rank), " is at attempt ",
                   command.attempt, " of step ", command.step, "; the newest one is ", attempt_));
}

absl::Status StepGathering::DroppedError(uint64_t attempt) const {
  if (!fault_.ok() && attempt == faulty_) return fault_;
  return MakeError(
      ErrorId::kGradDropped,
      absl::StrCat("the gradients of attempt ", attempt, " at step ", step_.next_step(), " of job ",
                   step_.spec.name, " were dropped: attempt ", attempt_,
                   " has begun, since a rank began the step anew or was lost, or the "
                   "daemon was started again"));
}

void StepGathering::FollowAttempt(const Session& session, const Command& command) {
  if (command.attempt <= attempt_) return;
  BeginAttempt(
      MakeError(ErrorId::kGradDropped,
                absl::StrCat("rank ", step_.spec.layout->WorldRank(session.rank), " of job ",
                             step_.spec.name, " has begun step ", step_.next_step(),
                             " anew: the gradients of all ranks were dropped")));
}

void StepGathering::BeginAttempt(const absl::Status& status) {
  Set(attempt_ + 1);
  RecordOpen(attempt_);
  RefuseCalls(status);
  step_.io.NewEpoch();
  Drop(absl::OkStatus());
}

void StepGathering::Set(uint64_t attempt) {
  attempt_ = attempt;
  step_.io.set_attempt(attempt);
}

// Emits RecordAttempt, unless the record has this attempt.
void StepGathering::RecordOpen(uint64_t attempt) {
  if (!step_.spec.options.keeps_jobs || attempt == recorded_) return;
  recorded_ = attempt;
  step_.io.actions().Emit(
      RecordAttempt{.job = step_.spec.id, .step = step_.next_step(), .attempt = attempt});
}

void StepGathering::RecordNext() {
  if (step_.gradients.empty()) RecordOpen(attempt_ + 1);
}

uint64_t StepGathering::Record() {
  return recorded_ = step_.gradients.empty() ? attempt_ : attempt_ + 1;
}

// Begins attempt 0.
void StepGathering::Restart() {
  Set(0);
  fault_ = absl::OkStatus();
}

void StepGathering::DropFaulty() {
  const absl::Status fault = step_.gradients.fault();
  if (fault.ok()) return;
  fault_ = fault;
  faulty_ = attempt_;
  BeginAttempt(fault);
}

// Drops the gradients of every rank, and the announcement of scalars. Waiting commands get `status`.
void StepGathering::Drop(const absl::Status& status) {
  step_.gradients.Drop(status);
  step_.pipeline.early().ForgetSums();
  step_.announcement.Reset();
}

void StepGathering::Commit() {
  Drop(absl::OkStatus());
  Restart();
  recorded_ = 0;
}

void StepGathering::RefuseCalls(const absl::Status& status, uint16_t flags) {
  protocol::Completion completion{};
  completion.flags = flags;
  for (const auto& [rank, call] : step_.barrier.Drain()) {
    if (!call.is_answered) step_.io.Answer(call.command, completion, status);
  }
  step_.gradients.ReopenRanks();
}

// ----------------------------------------------------------------------------- sums, early updates

void StepGathering::Announce(uint32_t rank, StepCall call) {
  step_.gradients.BeginLastPass(rank);
  if (step_.announcement.Add(std::move(call))) return;
  step_.pipeline.early().Drop(Transition::kAnnouncementsDiffer);
}

void StepGathering::DropEarlyUpdates() {
  step_.pipeline.early().Drop(Transition::kStatesWritten);
  step_.announcement.Reset();
}

void StepGathering::Advance(bool may_update_early) {
  if (const absl::Status lost = step_.pipeline.sums().DrainError(); !lost.ok()) {
    step_.gradients.Fail(lost);
  }
  if (step_.phase == StepPhase::kOpen) DropFaulty();
  PumpSums();
  Pump();
  FollowSums();
  if (may_update_early) UpdateEarly();
}

void StepGathering::Pump() {
  const bool adds = step_.phase == StepPhase::kOpen || step_.phase == StepPhase::kReducing;
  if (adds) step_.gradients.Pump();
}

void StepGathering::PumpSums() {
  EarlyUpdater& early = step_.pipeline.early();
  step_.pipeline.sums().Pump(early.has_work() && step_.gradients.norms().empty());
}

void StepGathering::FollowSums() {
  for (const auto& [range, is_last] : step_.gradients.DrainSumChanges()) {
    step_.pipeline.early().CountSums(range.partition, range.begin, range.end, is_last);
  }
}

void StepGathering::UpdateEarly() {
  const Announcement& announced = step_.announcement;
  if (step_.phase != StepPhase::kOpen || !announced.is_trusted()) return;
  if (!step_.gradients.fault().ok() || step_.gradients.needs_float_sums()) return;
  EarlyUpdater& early = step_.pipeline.early();
  if (!early.is_on()) {
    early.Begin(step_.OrderOf(announced.call(), step_.ScaleOf(announced.call())));
  }
  early.Pump();
}

void StepGathering::OnRankDetached(uint32_t rank) {
  step_.gradients.OnRankDetached(step_.DetachedError(rank));
  RefuseCalls(step_.DetachedError(rank));
}

void StepGathering::OnRankFailed(const Session* lost, const absl::Status& status) {
  if (step_.phase != StepPhase::kOpen) return;
  if (lost != nullptr) step_.gradients.AnswerSession(lost->id, lost->fence);
  for (const auto& [rank, call] : step_.barrier.Drain()) {
    const bool is_of_lost = lost != nullptr && call.command.session == lost->id;
    step_.io.Answer(call.command, is_of_lost ? lost->fence : status);
  }
  step_.io.NewEpoch();
  Drop(status);
  Restart();
  RecordOpen(attempt_);
  step_.trace.OnDropped();
}

void StepGathering::GiveUp() {
  if (step_.phase != StepPhase::kOpen || step_.gradients.empty()) return;
  BeginAttempt(MakeError(
      ErrorId::kGradDropped,
      absl::StrCat("the gradients of step ", step_.next_step(), " of job ", step_.spec.name,
                   " were dropped: the daemon is being restarted, and a rank is not there")));
}

void StepGathering::DropForNewWorld() {
  if (step_.gradients.empty()) return;
  step_.io.NewEpoch();
  Drop(absl::OkStatus());
}

void StepGathering::OnWorldChanged() {
  FOREBAY_CHECK(step_.phase == StepPhase::kOpen && step_.gradients.empty() &&
                step_.barrier.by_rank().empty());
  Drop(absl::OkStatus());
  step_.extra.OnWorldChanged();
  Restart();
}

}  // namespace forebay::daemon
