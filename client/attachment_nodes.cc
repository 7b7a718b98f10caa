// SPDX-License-Identifier: Apache-2.0
// A job over several nodes: its ranks tell each other what their nodes have prepared, and bring every daemon what they
// conclude.

#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
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
using internal::Deadline;
using internal::DecideStep;
using internal::MakeCommand;
using internal::NodeMessage;
using internal::ReplicaDigestsOf;
using internal::WaitLimits;
using protocol::Command;
using protocol::ErrorId;
using protocol::MakeError;
using protocol::Op;
using protocol::StepDecision;
using protocol::StepSummary;

namespace {

constexpr int kAttachRoundsMax = 5;  // one more round than the nodes need to agree on a step

// Returns whether an error means that the session has ended. The rank then takes no part in the other ranks' decision.
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

// Bytes of the step region where the daemon writes its node's summary, and this rank writes the world's.
std::span<std::byte> Attachment::State::summary_bytes() {
  const uint64_t offset = protocol::StepSummaryOffset(
      {.offset_bytes = parts.step_region_offset, .size_bytes = parts.step_region_bytes},
      *parts.layout);
  return parts.grad->bytes().subspan(offset, protocol::NodeSummaryBytes(*parts.layout));
}

// Sends the decision on a step to the daemon. `summary` has as many parameters as the layout.
absl::StatusOr<std::shared_ptr<Attachment::State::Answer>> Attachment::State::SendDecision(
    const StepSummary& summary, const WaitLimits& limits) {
  protocol::EncodeStepSummary(summary, summary_bytes());
  Command command = MakeCommand(Op::kDecide);
  command.kind = static_cast<uint16_t>(parts.step_answered_when);
  command.step = summary.head.step;
  command.attempt = attempt;
  return Start(command, limits);
}

// Returns this rank's message about the step, after the daemon has answered the step's call. If the daemon refused the call for
// a reason of this rank, the step is withdrawn on the node.
absl::StatusOr<NodeMessage> Attachment::State::MessageOfStep(const WaitLimits& limits) {
  const Answer& answer = *step->answer;
  NodeMessage message{.first_rank = parts.layout->spec().first_rank};
  if (answer.status.ok()) {
    message.kind = NodeMessage::Kind::kPrepared;
    const std::span<const std::byte> bytes = summary_bytes();
    const uint64_t size = protocol::StepSummaryBytes(parts.layout->params().size());
    message.summary.assign(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(size));
    if (parts.rank == 0) message.digests = ReplicaDigestsOf(*parts.layout, bytes.subspan(size));
    return message;
  }
  message.kind =
      answer.completion.attempt > attempt ? NodeMessage::Kind::kLost : NodeMessage::Kind::kRefused;
  message.error = answer.status;
  if ((answer.completion.flags & protocol::kStepWithdrawn) != 0) {
    message.kind = NodeMessage::Kind::kWithdrawn;
    return message;
  }
  RETURN_IF_ERROR(Withdraw(step->t, limits));
  return message;
}

// Tells the other ranks that this rank does not call the step, and why. The other ranks raise `error`.
absl::Status Attachment::State::RefuseOverNodes(uint64_t t, const absl::Status& error,
                                                const WaitLimits& limits) {
  const NodeMessage message{.kind = NodeMessage::Kind::kRefused,
                            .first_rank = parts.layout->spec().first_rank,
                            .error = error};
  RETURN_IF_ERROR(Withdraw(t, limits));
  return GatherFrom(parts.nodes, message).status();
}

absl::Status Attachment::State::Withdraw(uint64_t t, const WaitLimits& limits) {
  const uint64_t params = parts.layout->params().size();
  ASSIGN_OR_RETURN(const std::shared_ptr<Answer> answer,
                   SendDecision(EmptySummary(t, params, StepDecision::kWithdraw), limits));
  return WaitFor(*answer, limits);
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

// Does this rank's part of the outcome that all ranks have agreed on.
absl::Status Attachment::State::Follow(const AttachOutcome& outcome) {
  const WaitLimits limits = parts.Limits(parts.timeout);
  if (outcome.todo == AttachOutcome::Todo::kGoBack) {
    Command command = MakeCommand(Op::kGoBack);
    command.step = outcome.step;
    const absl::Status asked = Call(command, nullptr, limits).status();
    // Another rank of the node may have asked before, which has ended this session.
    return IsOver(asked) ? absl::OkStatus() : asked;
  }
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

// Attaches again after the job went back to a durable step. Tries until the daemon no longer refuses with E_BUSY.
absl::StatusOr<std::unique_ptr<Attachment>> Attachment::AttachWhenBack(
    const AttachOptions& options) {
  constexpr std::chrono::milliseconds kPause(20);
  for (const Deadline until = Deadline::After(options.timeout);;) {
    absl::StatusOr<std::unique_ptr<Attachment>> attached = AttachHere(options);
    if (protocol::IdOf(attached.status()) != ErrorId::kBusy || until.Expired()) return attached;
    if (options.interrupt_check && options.interrupt_check()) {
      return MakeError(ErrorId::kInterrupted, "attach was interrupted while the job went back");
    }
    std::this_thread::sleep_for(kPause);
  }
}

NodeMessage Attachment::State::MessageOfAttach() const {
  return {.kind = NodeMessage::Kind::kAttached,
          .first_rank = parts.layout->spec().first_rank,
          .state = {.committed_step = parts.committed_step(),
                    .prepared_step = parts.prepared_step,
                    .durable_step = parts.durable_step,
                    .durable_before = parts.durable_before,
                    .is_new = parts.writes_initial},
          .summary = parts.summary};
}

absl::StatusOr<std::unique_ptr<Attachment>> Attachment::AttachOverNodes(
    const AttachOptions& options) {
  absl::StatusOr<std::unique_ptr<Attachment>> attached = AttachHere(options);
  uint64_t went_back_from = 0;
  for (int round = 0; round < kAttachRoundsMax; ++round) {
    NodeMessage message{.kind = NodeMessage::Kind::kRefused,
                        .first_rank = options.layout.first_rank,
                        .error = attached.status()};
    if (attached.ok()) message = (*attached)->state_->MessageOfAttach();
    ASSIGN_OR_RETURN(const std::vector<std::string> all, GatherFrom(options.nodes, message));
    if (!attached.ok()) return attached;
    absl::StatusOr<AttachOutcome> outcome = AgreeOnStep(all, options.job);
    if (!outcome.ok()) {
      (*attached)->Detach().IgnoreError();
      return outcome.status();
    }
    State& state = *(*attached)->state_;
    if (outcome->todo == AttachOutcome::Todo::kNothing) {
      state.parts.went_back_from = went_back_from;
      return attached;
    }
    const bool goes_back = outcome->todo == AttachOutcome::Todo::kGoBack;
    if (goes_back) went_back_from = outcome->from_step;
    const bool is_elsewhere =
        state.parts.committed_step() != outcome->step || state.parts.prepared_step > 0;
    if (goes_back && !is_elsewhere) continue;
    const absl::Status followed = state.Follow(*outcome);
    if (!followed.ok()) {
      (*attached)->Detach().IgnoreError();
      attached = followed;
    } else if (goes_back) {
      (*attached)->Detach().IgnoreError();
      attached->reset();
      attached = AttachWhenBack(options);
    } else if (outcome->todo == AttachOutcome::Todo::kCommit && is_elsewhere) {
      // A new session brings the weights and extra state that the ranks have committed with the step.
      (*attached)->Detach().IgnoreError();
      attached = AttachHere(options);
    }
  }
  return MakeError(ErrorId::kStep,
                   absl::StrCat("the nodes of job ", options.job, " come to no common step"),
                   "end all its processes, on every node, and start them again");
}

}  // namespace forebay::client
