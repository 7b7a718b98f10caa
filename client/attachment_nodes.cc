// A job over several nodes: its ranks tell each other what their nodes have prepared, and bring every daemon what they
// conclude.

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/internal/attachment_state.h"
#include "client/internal/node_agreement.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "protocol/step_summary.h"

namespace forebay::client {

using internal::AgreeOnStep;
using internal::AttachOutcome;
using internal::DecideStep;
using internal::MakeCommand;
using internal::NodeMessage;
using internal::WaitLimits;
using protocol::Command;
using protocol::ErrorId;
using protocol::MakeError;
using protocol::Op;
using protocol::StepDecision;
using protocol::StepSummary;

namespace {

constexpr int kAttachRoundsMax = 4;  // one more than the longest way to one step takes

// A session with these has ended: the rank has no part in what the others decide.
bool IsOver(const absl::Status& status) {
  const ErrorId id = protocol::IdOf(status);
  return id == ErrorId::kRankLost || id == ErrorId::kFenced || id == ErrorId::kDaemonGone ||
         id == ErrorId::kForked || id == ErrorId::kJobFailed || id == ErrorId::kDevice;
}

StepSummary EmptySummary(uint64_t step, uint64_t params, StepDecision decision) {
  const uint64_t words = protocol::PresenceWords(params);
  return {.head = {.step = step, .decision = decision, .params = static_cast<uint32_t>(params)},
          .present = std::vector<uint64_t>(words, 0),
          .lacking = std::vector<uint64_t>(words, 0)};
}

absl::StatusOr<std::vector<std::string>> GatherFrom(const Nodes& nodes, const NodeMessage& own) {
  absl::StatusOr<std::vector<std::string>> all = nodes.all_gather(EncodeNodeMessage(own));
  if (protocol::IdOf(all.status()) == ErrorId::kInterrupted) return all;
  if (!all.ok()) {
    return MakeError(ErrorId::kRankLost,
                     absl::StrCat("the ranks of the job's nodes did not reach each other: ",
                                  std::string(all.status().message())),
                     "start the trainer again on every node: it goes on from the newest step that "
                     "all of them have");
  }
  if (all->size() == nodes.world_ranks) return all;
  return MakeError(ErrorId::kRank, absl::StrCat("all_gather gave what ", all->size(),
                                                " ranks sent; the job has ", nodes.world_ranks));
}

}  // namespace

// Where the daemon writes a node's summary, and this rank the world's.
std::span<std::byte> Attachment::State::summary_bytes() {
  const uint64_t params = parts.layout->params().size();
  const uint64_t offset = protocol::StepSummaryOffset(
      {.offset_bytes = parts.step_region_offset, .size_bytes = parts.step_region_bytes}, params);
  return parts.grad->bytes().subspan(offset, protocol::StepSummaryBytes(params));
}

// `summary`: of as many parameters as the layout has.
absl::StatusOr<std::shared_ptr<Attachment::State::Answer>> Attachment::State::SendDecision(
    const StepSummary& summary, const WaitLimits& limits) {
  protocol::EncodeStepSummary(summary, summary_bytes());
  Command command = MakeCommand(Op::kDecide);
  command.kind = static_cast<uint16_t>(parts.step_answered_when);
  command.step = summary.head.step;
  command.attempt = attempt;
  return Start(command, limits);
}

// What this rank says of the step whose call is answered.
absl::StatusOr<NodeMessage> Attachment::State::MessageOfStep(const WaitLimits& limits) {
  const Answer& answer = *step->answer;
  const uint64_t params = parts.layout->params().size();
  NodeMessage message{.first_rank = parts.layout->spec().first_rank};
  if (answer.status.ok()) {
    message.kind = NodeMessage::Kind::kPrepared;
    const std::span<const std::byte> bytes = summary_bytes();
    message.summary.assign(bytes.begin(), bytes.end());
    return message;
  }
  message.kind =
      answer.completion.attempt > attempt ? NodeMessage::Kind::kLost : NodeMessage::Kind::kRefused;
  message.error = answer.status;
  if ((answer.completion.flags & protocol::kStepWithdrawn) != 0) {
    message.kind = NodeMessage::Kind::kWithdrawn;
    return message;
  }
  ASSIGN_OR_RETURN(const auto withdrawn,
                   SendDecision(EmptySummary(step->t, params, StepDecision::kWithdraw), limits));
  RETURN_IF_ERROR(WaitFor(*withdrawn, limits));
  return message;
}

absl::Status Attachment::State::DecideOverNodes(const WaitLimits& limits) {
  const absl::Status own = step->answer->status;
  const bool is_prepared =
      own.ok() && (step->answer->completion.flags & protocol::kStepPrepared) != 0;
  if (IsOver(own) || (own.ok() && !is_prepared && !step->outcome)) return absl::OkStatus();
  if (!step->outcome) {
    ASSIGN_OR_RETURN(const NodeMessage message, MessageOfStep(limits));
    ASSIGN_OR_RETURN(const std::vector<std::string> all, GatherFrom(parts.nodes, message));
    ASSIGN_OR_RETURN(step->outcome, DecideStep(all, *parts.layout, step->t));
  }
  const StepDecision decision = step->outcome->summary.head.decision;
  if (!is_prepared) {
    step->drops = decision == StepDecision::kDrop;
    const bool is_withdrawn = (step->answer->completion.flags & protocol::kStepWithdrawn) != 0;
    if (is_withdrawn) step->answer->status = step->outcome->error;
    return absl::OkStatus();
  }
  if (step->decided == nullptr) {
    StepSummary summary = step->outcome->summary;
    if (decision != StepDecision::kCommit) {
      summary = EmptySummary(step->t, parts.layout->params().size(), decision);
    }
    ASSIGN_OR_RETURN(step->decided, SendDecision(summary, limits));
  }
  RETURN_IF_ERROR(waiter.Wait([&] { return step->decided->arrived; }, limits));
  step->answer = step->decided;
  step->answer->completion.flags &= static_cast<uint16_t>(~protocol::kStepRepeated);
  if (step->answer->status.ok()) step->answer->status = step->outcome->error;
  return absl::OkStatus();
}

// ------------------------------------------------------------------------------------------- attach

// Does its part of what all ranks have concluded.
absl::Status Attachment::State::Follow(const AttachOutcome& outcome) {
  const WaitLimits limits = Limits(parts.timeout);
  const bool is_prepared = parts.prepared_step == outcome.step;
  if (outcome.todo == AttachOutcome::Todo::kNothing || !is_prepared) return absl::OkStatus();
  const uint64_t params = parts.layout->params().size();
  StepSummary summary = EmptySummary(outcome.step, params, StepDecision::kDrop);
  if (outcome.todo == AttachOutcome::Todo::kCommit) {
    ASSIGN_OR_RETURN(summary, protocol::DecodeStepSummary(outcome.summary, params));
  }
  ASSIGN_OR_RETURN(const std::shared_ptr<Answer> answer, SendDecision(summary, limits));
  RETURN_IF_ERROR(WaitFor(*answer, limits));
  if (!answer->status.ok()) return answer->status;
  parts.prepared_step = 0;
  BeginAttempt(answer->completion.attempt);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Attachment>> Attachment::AttachOverNodes(
    const AttachOptions& options) {
  absl::StatusOr<std::unique_ptr<Attachment>> attached = AttachHere(options);
  for (int round = 0; round < kAttachRoundsMax; ++round) {
    NodeMessage message{.kind = NodeMessage::Kind::kAttached,
                        .first_rank = options.layout.first_rank};
    if (attached.ok()) {
      const internal::SessionParts& parts = (*attached)->state_->parts;
      message.state = {.committed_step = (*attached)->committed_step(),
                       .prepared_step = parts.prepared_step,
                       .durable_step = parts.durable_step,
                       .is_new = parts.writes_initial};
      message.summary = parts.summary;
    } else {
      message.kind = NodeMessage::Kind::kRefused;
      message.error = attached.status();
    }
    ASSIGN_OR_RETURN(const std::vector<std::string> all, GatherFrom(options.nodes, message));
    if (!attached.ok()) return attached;
    absl::StatusOr<AttachOutcome> outcome = AgreeOnStep(all, options.job);
    if (!outcome.ok()) {
      (*attached)->Detach().IgnoreError();
      return outcome.status();
    }
    if (outcome->todo == AttachOutcome::Todo::kNothing) return attached;
    const bool is_behind = (*attached)->committed_step() < outcome->step &&
                           outcome->todo == AttachOutcome::Todo::kCommit;
    const absl::Status followed = (*attached)->state_->Follow(*outcome);
    if (!followed.ok()) {
      (*attached)->Detach().IgnoreError();
      attached = followed;
    } else if (is_behind) {  // what the ranks have committed with the step comes with a new session
      (*attached)->Detach().IgnoreError();
      attached = AttachHere(options);
    }
  }
  return MakeError(ErrorId::kStep,
                   absl::StrCat("the nodes of job ", options.job, " come to no common step"),
                   "end all its processes, on every node, and start them again");
}

}  // namespace forebay::client
