// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/step/step_attempts.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"

namespace forebay::daemon {

using protocol::ErrorId;
using protocol::MakeError;

uint64_t StepAttempts::open() const {
  return fault_.ok() ? newest_ : std::max(newest_, faulty_ + 1);
}

void StepAttempts::Set(uint64_t attempt) {
  newest_ = attempt;
  io_.set_attempt(attempt);
}

void StepAttempts::Begin(uint64_t attempt, uint64_t step) {
  Set(attempt);
  RecordOpen(attempt, step);
}

void StepAttempts::EndWithFault(const absl::Status& fault) {
  fault_ = fault;
  faulty_ = newest_;
}

void StepAttempts::BeginStep() {
  BeginWorld();
  recorded_ = 0;
}

void StepAttempts::BeginGeneration(uint64_t step) {
  BeginWorld();
  RecordOpen(newest_, step);
}

void StepAttempts::BeginWorld() {
  Set(0);
  fault_ = absl::OkStatus();
}

void StepAttempts::Recover(uint64_t attempt) { Set(attempt); }

void StepAttempts::RecordOpen(uint64_t attempt, uint64_t step) {
  if (!spec_.options.keeps_jobs || attempt == recorded_) return;
  recorded_ = attempt;
  io_.actions().Emit(RecordAttempt{.job = spec_.id, .step = step, .attempt = attempt});
}

uint64_t StepAttempts::Record(Gradients gradients) {
  recorded_ = gradients == Gradients::kNone ? open() : std::max(open(), newest_ + 1);
  return recorded_;
}

absl::Status StepAttempts::Check(uint32_t rank, const protocol::Command& command) const {
  if (command.attempt <= newest_ + 1) return absl::OkStatus();
  return MakeError(ErrorId::kProtocol, absl::StrCat("rank ", spec_.layout->WorldRank(rank),
                                                    " is at attempt ", command.attempt, " of step ",
                                                    command.step, "; the newest one is ", newest_));
}

absl::Status StepAttempts::DroppedError(uint64_t attempt, uint64_t step) const {
  if (!fault_.ok() && attempt == faulty_) return fault_;
  return MakeError(ErrorId::kGradDropped,
                   absl::StrCat("the gradients of attempt ", attempt, " at step ", step, " of job ",
                                spec_.name, " were dropped: attempt ", newest_,
                                " has begun, since a rank began the step anew or was lost, or the "
                                "daemon was started again"));
}

}  // namespace forebay::daemon
