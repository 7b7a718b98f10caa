// SPDX-License-Identifier: Apache-2.0
// Steps of a job over several nodes: a step is prepared here, and decided by the summary of all nodes that the ranks bring.

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/core/step/step.h"
#include "protocol/error.h"
#include "protocol/layout.h"

namespace forebay::daemon {

using protocol::Command;
using protocol::ErrorId;
using protocol::MakeError;
using protocol::StepDecision;
using protocol::StepSummary;

StepSummary Step::SummaryOfNode() const {
  const protocol::Layout& layout = *spec_.layout;
  const uint64_t words = protocol::PresenceWords(layout.params().size());
  StepSummary summary{.head = {.step = committed_step_ + 1,
                               .params = static_cast<uint32_t>(layout.params().size()),
                               .scalars = nodes_.ScalarsOf(barrier_.by_rank().begin()->second),
                               .overflowed = answers_.unreported_overflow(),
                               .squares = gradients_.turns().Squares().Digits()},
                      .present = std::vector<uint64_t>(words, 0),
                      .lacking = std::vector<uint64_t>(words, 0)};
  for (const auto& [rank, call] : barrier_.by_rank()) {
    for (uint64_t word = 0; word < words; ++word) summary.present[word] |= call.presence[word];
  }
  for (const protocol::BoxPlace& place : layout.boxes()) {
    if (!layout.params()[place.box.param].trainable) continue;
    const uint32_t owner = layout.partitions()[place.partition].owner;
    if (protocol::IsPresent(barrier_.by_rank().at(owner).presence, place.box.param)) continue;
    protocol::SetPresent(summary.lacking, place.box.param);
  }
  return summary;
}

// Prepares the step. The loss of a rank no longer undoes the step: the ranks that attach next bring the decision of the nodes.
void Step::Prepare() {
  phase_ = Phase::kPrepared;
  nodes_.Prepare(SummaryOfNode(), digests_.all());
  if (spec_.options.keeps_jobs) RecordPreparedStep();
  for (auto& [rank, call] : barrier_.by_rank()) {
    call.is_answered = true;
    const Session* const session = members_.Find(call.command.session);
    if (session == nullptr || session->state != Session::State::kAttached) continue;
    AnswerPrepared(*session, call.command);
  }
}

void Step::AnswerPrepared(const Session& session, const CommandId& command) {
  io_.actions().Emit(WriteSummary{.session = session.id,
                                  .arena_offset_bytes = spec_.plan.summary_offset(*spec_.layout),
                                  .bytes = nodes_.prepared_summary()});
  protocol::Completion completion{};
  completion.flags = protocol::kStepPrepared;
  io_.Answer(command, completion);
}

// Records the prepared step. The places of its sums are recorded first, so that the record is complete once the step is
// recorded as prepared.
void Step::RecordPreparedStep() {
  const StepCall& call = barrier_.by_rank().begin()->second;
  pipeline_.sums().BeginPrepared(committed_step_ + 1);
  RecordPrepared record{.job = spec_.id,
                        .step = committed_step_ + 1,
                        .attempt = attempts_.newest(),
                        .request = call.request,
                        .hyper_params = {call.hyper_params, io_.memory()},
                        .extra_states = extra_.NextParts(barrier_.by_rank()),
                        .summary = nodes_.prepared_summary()};
  if (spec_.plan.uses_float_sums) record.float_sums = spec_.plan.float_sums_part();
  io_.actions().Emit(std::move(record));
}

// Resumes a prepared step. Its sums and extra_state are in the step arena. The summary says which parameters have a gradient.
void Step::ResumePrepared(const KeptUpdate& update) {
  const KeptPrepared& prepared = *update.prepared;
  phase_ = Phase::kPrepared;
  nodes_.PrepareBefore(prepared.summary);
  for (uint32_t rank = 0; rank < spec_.world_size(); ++rank) {
    StepCall call{.request = prepared.request,
                  .hyper_params = {update.order.hyper_params, io_.memory()},
                  .is_answered = true};
    call.request.extra_state_bytes = static_cast<uint32_t>((*prepared.extra_states)[rank].size());
    barrier_.Add(rank, std::move(call));
    gradients_.CloseRank(rank);
  }
  pipeline_.sums().BeginPrepared(committed_step_ + 1);
}

void Step::HandleDecision(Session& session, const Command& command) {
  const CommandId id = session.IdOf(command);
  if (!spec_.is_over_nodes()) {
    io_.Answer(id, MakeError(ErrorId::kUnsupported,
                             absl::StrCat("a decision of several nodes on step ", command.step,
                                          " of job ", spec_.name, ", which is on one")));
    return;
  }
  if (command.step != 0 && command.step == committed_step_) return HandleRepeated(command, id);
  if (command.step != committed_step_ + 1 || session.step_being_copied) {
    io_.Answer(id, StepNumberError(command.step));
    return;
  }
  session.step_being_copied = command;
  io_.actions().Emit(
      CopySummary{.session = session.id,
                  .tag = command.tag,
                  .arena_offset_bytes = spec_.plan.summary_offset(*spec_.layout),
                  .bytes = protocol::StepSummaryBytes(spec_.layout->params().size())});
}

void Step::OnSummary(Session& session, const SummaryCopied& copied) {
  if (!session.step_being_copied || session.step_being_copied->tag != copied.tag) return;
  const Command command = *std::exchange(session.step_being_copied, std::nullopt);
  const CommandId id = session.IdOf(command);
  absl::StatusOr<StepSummary> summary =
      protocol::DecodeStepSummary(copied.bytes, spec_.layout->params().size());
  absl::Status status = summary.status();
  if (status.ok()) {
    const auto& calls = barrier_.by_rank();
    status = nodes_.Check(
        command, *summary,
        phase_ == Phase::kPrepared ? NodesDecision::Prepared::kYes : NodesDecision::Prepared::kNo,
        calls.empty() ? nullptr : &calls.begin()->second);
  }
  if (!status.ok()) {
    io_.Answer(id, status);
    return;
  }
  if (summary->head.decision == StepDecision::kCommit) {
    answers_.AddDeciding(id, static_cast<protocol::StepAnswer>(command.kind));
    if (nodes_.decision()) return;
    nodes_.Set(*std::move(summary));
    phase_ = Phase::kReducing;
    return;
  }
  if (phase_ == Phase::kPrepared && command.attempt == attempts_.newest()) {
    GiveUpPrepared(summary->head.decision);
  } else if (phase_ == Phase::kOpen && summary->head.decision == StepDecision::kWithdraw) {
    RefuseCalls(MakeError(ErrorId::kStep,
                          absl::StrCat("rank ", spec_.layout->WorldRank(session.rank),
                                       " of this node met an error and does not call step ",
                                       command.step, " of job ", spec_.name, " now"),
                          "see what that rank says; call step again: the gradients are kept"),
                protocol::kStepWithdrawn);
  }
  io_.Answer(id, absl::OkStatus());
}

void Step::GiveUpPrepared(StepDecision decision) {
  phase_ = Phase::kOpen;
  trace_.OnRefused();
  if (spec_.options.keeps_jobs) {
    io_.actions().Emit(RecordPrepared{.job = spec_.id});
    pipeline_.sums().EndPrepared();
  }
  if (decision == StepDecision::kDrop || nodes_.DrainPreparedBefore()) {
    BeginAttempt(attempts_.newest() + 1, absl::OkStatus());
  } else {
    RefuseCalls(absl::OkStatus());
  }
}

}  // namespace forebay::daemon
