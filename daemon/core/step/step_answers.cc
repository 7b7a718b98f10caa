// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/step/step_answers.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"

namespace forebay::daemon {

using protocol::StepAnswer;

absl::Status StepAnswers::OverflowError(uint64_t overflowed, uint64_t step) const {
  return protocol::MakeError(
      protocol::ErrorId::kOverflow,
      absl::StrCat(overflowed, " parameters of job ", spec_.name, " became non-finite in step ",
                   step, ", which is committed"),
      "go back to a checkpoint, or lower the learning rate");
}

StepAnswers::StepAnswers(const JobSpec& spec, JobTasks& io)
    : spec_(spec), io_(io), waiting_(io.memory()), deciding_(io.memory()) {
  const KeptMemory* const kept = spec.kept();
  if (kept == nullptr) return;
  norm_ = kept->norm;
  clipped_ = kept->clipped;
  overflowed_ = kept->overflowed;
  const uint64_t published = spec.recovered->published_step();
  if (overflowed_ > 0) status_ = OverflowError(overflowed_, published);
  if (published == spec.recovered->step) unreported_ = status_;
}

void StepAnswers::OnDecided(const Decided& decided, uint64_t published_step) {
  norm_ = decided.norm;
  clipped_ = decided.clipped;
  has_answered_early_ = false;
  status_ = std::exchange(unreported_, absl::OkStatus());
  if (decided.overflowed > 0) status_ = OverflowError(decided.overflowed, published_step);
}

void StepAnswers::OnPublished(uint64_t overflowed, uint64_t step) {
  overflowed_ = overflowed;
  if (overflowed == 0) return;
  const absl::Status error = OverflowError(overflowed, step);
  if (!spec_.is_over_nodes()) status_ = error;
  if (spec_.is_over_nodes() || has_answered_early_) unreported_ = error;
}

void StepAnswers::AnswerDeciding() {
  for (const Deciding& call : std::exchange(deciding_, {})) {
    AnswerCommitted(call.command, call.when);
  }
}

void StepAnswers::AnswerCommitted(const CommandId& command, StepAnswer when) {
  if (when == StepAnswer::kPublished || is_durable_first()) {
    Wait({.command = command});
    return;
  }
  has_answered_early_ = true;
  Answer({.command = command});
}

void StepAnswers::Answer(const Call& call) const {
  protocol::Completion completion{};
  completion.norm = norm_;
  if (call.repeated) completion.flags |= protocol::kStepRepeated;
  if (clipped_) completion.flags |= protocol::kStepClipped;
  io_.Answer(call.command, completion, status_);
}

void StepAnswers::AnswerWaiting() {
  for (const Call& call : std::exchange(waiting_, {})) Answer(call);
}

void StepAnswers::Fail(const absl::Status& status) {
  for (const Deciding& call : std::exchange(deciding_, {})) io_.Answer(call.command, status);
  for (const Call& call : std::exchange(waiting_, {})) io_.Answer(call.command, status);
}

uint64_t StepAnswers::unanswered(SessionId session) const {
  uint64_t count = 0;
  for (const Deciding& call : deciding_) count += call.command.session == session ? 1 : 0;
  for (const Call& call : waiting_) count += call.command.session == session ? 1 : 0;
  return count;
}

}  // namespace forebay::daemon
