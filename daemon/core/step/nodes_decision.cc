// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/step/nodes_decision.h"

#include <array>
#include <bit>
#include <span>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/layout.h"
#include "protocol/optimizer.h"

namespace forebay::daemon {

using protocol::ErrorId;
using protocol::MakeError;
using protocol::StepDecision;
using protocol::StepSummary;

NodesDecision::NodesDecision(StepParts& step, StepGathering& gathering)
    : step_(step), gathering_(gathering) {
  const KeptMemory* const kept = step_.spec.kept();
  if (kept == nullptr) return;
  auto last = protocol::DecodeStepSummary(kept->summary, step_.spec.layout->params().size());
  if (last.ok()) last_ = *std::move(last);
}

StepSummary NodesDecision::SummaryOfNode() const {
  const protocol::Layout& layout = *step_.spec.layout;
  const StepBarrier::Calls& calls = step_.barrier.by_rank();
  const std::pmr::vector<uint64_t> present = step_.Presence();
  StepSummary summary{.head = {.step = step_.next_step(),
                               .params = static_cast<uint32_t>(layout.params().size()),
                               .scalars = ScalarsOf(calls.begin()->second),
                               .overflowed = step_.answers.unreported_overflow(),
                               .squares = step_.gradients.turns().Squares().Digits()},
                      .present = {present.begin(), present.end()},
                      .lacking = std::vector<uint64_t>(present.size(), 0)};
  for (const protocol::BoxPlace& place : layout.boxes()) {
    if (!layout.params()[place.box.param].trainable) continue;
    const uint32_t owner = layout.partitions()[place.partition].owner;
    if (protocol::IsPresent(calls.at(owner).presence, place.box.param)) continue;
    protocol::SetPresent(summary.lacking, place.box.param);
  }
  return summary;
}

// Returns a hash of all scalars of a call that determine the update, bit by bit.
uint64_t NodesDecision::ScalarsOf(const StepCall& call) const {
  std::string bytes;
  const auto add = [&bytes](double value) {
    const auto bits = std::bit_cast<std::array<char, sizeof(value)>>(value);
    bytes.append(bits.data(), bits.size());
  };
  for (const double value : {call.request.grad_scale, call.request.grad_min, call.request.grad_max,
                             call.request.max_grad_norm}) {
    add(value);
  }
  for (const protocol::HyperParams& group : call.hyper_params) {
    for (const auto& info : protocol::Info(step_.spec.layout->spec().optimizer).hyper_params) {
      add(group.*info.field);
    }
  }
  return protocol::NameHash(bytes);
}

void NodesDecision::Prepare() {
  step_.phase = StepPhase::kPrepared;
  prepared_ = protocol::EncodeStepSummary(SummaryOfNode());
  const auto digests = std::as_bytes(step_.digests.all());
  prepared_.insert(prepared_.end(), digests.begin(), digests.end());
  if (step_.spec.options.keeps_jobs) Record();
  for (auto& [rank, call] : step_.barrier.by_rank()) {
    call.is_answered = true;
    const Session* const session = step_.members.Find(call.command.session);
    if (session == nullptr || session->state != Session::State::kAttached) continue;
    AnswerPrepared(*session, call.command);
  }
}

void NodesDecision::AnswerPrepared(const Session& session, const CommandId& command) {
  step_.io.actions().Emit(
      WriteSummary{.session = session.id,
                   .arena_offset_bytes = step_.spec.plan.summary_offset(*step_.spec.layout),
                   .bytes = prepared_});
  protocol::Completion completion{};
  completion.flags = protocol::kStepPrepared;
  step_.io.Answer(command, completion);
}

// Records the prepared step. The places of its sums are recorded first, so that the record is complete once the step is
// recorded as prepared.
void NodesDecision::Record() {
  const StepCall& call = step_.barrier.by_rank().begin()->second;
  step_.pipeline.sums().BeginPrepared(step_.next_step());
  RecordPrepared record{.job = step_.spec.id,
                        .step = step_.next_step(),
                        .attempt = gathering_.attempt(),
                        .request = call.request,
                        .hyper_params = {call.hyper_params, step_.io.memory()},
                        .extra_states = step_.extra.NextParts(step_.barrier.by_rank()),
                        .summary = prepared_};
  if (step_.spec.plan.uses_float_sums) record.float_sums = step_.spec.plan.float_sums_part();
  step_.io.actions().Emit(std::move(record));
}

// The summary says which parameters have a gradient.
void NodesDecision::Resume(const KeptUpdate& update) {
  const KeptPrepared& prepared = *update.prepared;
  step_.phase = StepPhase::kPrepared;
  prepared_ = prepared.summary;
  is_prepared_before_ = true;
  for (uint32_t rank = 0; rank < step_.spec.world_size(); ++rank) {
    StepCall call{.request = prepared.request,
                  .hyper_params = {update.order.hyper_params, step_.io.memory()},
                  .is_answered = true};
    call.request.extra_state_bytes = static_cast<uint32_t>((*prepared.extra_states)[rank].size());
    step_.barrier.Add(rank, std::move(call));
    step_.gradients.CloseRank(rank);
  }
  step_.pipeline.sums().BeginPrepared(step_.next_step());
}

absl::Status NodesDecision::Check(const protocol::Command& command,
                                  const StepSummary& summary) const {
  if (summary.head.step != command.step || summary.head.decision == StepDecision::kNone) {
    return MakeError(ErrorId::kProtocol,
                     absl::StrCat("a decision on step ", command.step, " that is of step ",
                                  summary.head.step, ", or decides nothing"));
  }
  if (summary.head.decision != StepDecision::kCommit) return absl::OkStatus();
  if (step_.phase != StepPhase::kPrepared && !decision_) {
    return MakeError(ErrorId::kStep,
                     absl::StrCat("step ", command.step, " of job ", step_.spec.name,
                                  " is to be committed, and is not prepared"));
  }
  if (summary.head.scalars == ScalarsOf(step_.barrier.by_rank().begin()->second)) {
    return absl::OkStatus();
  }
  return MakeError(ErrorId::kStep,
                   absl::StrCat("step ", command.step, " of job ", step_.spec.name,
                                " is to be committed with other scalars than its ranks have "
                                "called it with"));
}

void NodesDecision::Decide(StepSummary decision) {
  if (decision_) return;
  decision_ = std::move(decision);
  step_.phase = StepPhase::kReducing;
}

void NodesDecision::GiveUp(StepDecision decision) {
  step_.phase = StepPhase::kOpen;
  step_.trace.OnRefused();
  if (step_.spec.options.keeps_jobs) {
    step_.io.actions().Emit(RecordPrepared{.job = step_.spec.id});
    step_.pipeline.sums().EndPrepared();
  }
  if (std::exchange(is_prepared_before_, false) || decision == StepDecision::kDrop) {
    gathering_.BeginAttempt(absl::OkStatus());
  } else {
    gathering_.RefuseCalls(absl::OkStatus());
  }
}

void NodesDecision::Commit() {
  if (decision_) last_ = std::exchange(decision_, std::nullopt);
  is_prepared_before_ = false;
}

std::vector<std::byte> NodesDecision::EncodeLast() const {
  return last_ ? protocol::EncodeStepSummary(*last_) : std::vector<std::byte>();
}

}  // namespace forebay::daemon
