// SPDX-License-Identifier: Apache-2.0
#include "client/internal/step_caller.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gpu/nvtx_range.h"
#include "protocol/copy_changed.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"

namespace forebay::client::internal {

using protocol::Command;
using protocol::ErrorId;
using protocol::MakeError;
using protocol::Op;
using protocol::StepDecision;
using protocol::StepSummary;

namespace {

bool IsSame(std::span<const std::byte> one, std::span<const std::byte> other) {
  return one.size() == other.size() &&
         (one.empty() || std::memcmp(one.data(), other.data(), one.size()) == 0);
}

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

}  // namespace

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

protocol::StepRequest ScalarsOf(uint64_t t, double max_grad_norm, const GradientEdit& edit) {
  return {.step = t,
          .param_groups = 0,
          .extra_state_bytes = 0,
          .max_grad_norm = max_grad_norm,
          .grad_scale = edit.scale,
          .grad_min = edit.is_bounded() ? edit.min : 0,
          .grad_max = edit.is_bounded() ? edit.max : 0};
}

absl::StatusOr<std::pmr::vector<std::byte>> StepCaller::Encode(
    const protocol::StepRequest& scalars, std::span<const protocol::HyperParams> hyper_params,
    uint64_t extra_state_bytes, std::span<const uint64_t> present) {
  if (extra_state_bytes > parts_.extra_state_bytes) {
    return MakeError(ErrorId::kExtraState,
                     absl::StrCat("extra_state has ", extra_state_bytes, " bytes; ",
                                  parts_.extra_state_bytes, " were reserved at attach"),
                     "attach with a larger extra_state_bytes");
  }
  if (hyper_params.empty() || hyper_params.size() > protocol::kParamGroupsMax) {
    return MakeError(ErrorId::kOption,
                     absl::StrCat("step got hyper-parameters of ", hyper_params.size(),
                                  " parameter groups, not 1 to ", protocol::kParamGroupsMax));
  }
  // Groups that no parameter of the layout is in may have no room.
  hyper_params =
      hyper_params.first(std::min<size_t>(hyper_params.size(), parts_.layout->param_group_rows()));
  protocol::StepRequest header = scalars;
  header.param_groups = static_cast<uint32_t>(hyper_params.size());
  header.extra_state_bytes = static_cast<uint32_t>(extra_state_bytes);
  std::pmr::vector<std::byte> request(link_.memory());
  request.reserve(sizeof(header) + hyper_params.size_bytes() + present.size_bytes());
  const auto append = [&request](std::span<const std::byte> bytes) {
    request.insert(request.end(), bytes.begin(), bytes.end());
  };
  append(std::as_bytes(std::span(&header, 1)));
  append(std::as_bytes(hyper_params));
  append(std::as_bytes(present));
  const uint64_t room_bytes =
      parts_.step_region_bytes -
      protocol::StepRegionTailBytes(*parts_.layout, parts_.nodes.world_ranks > 0);
  if (request.size() + extra_state_bytes > room_bytes) {
    return MakeError(
        ErrorId::kRange,
        absl::StrCat("hyper-parameters and extra_state of the step take ",
                     request.size() + extra_state_bytes, " bytes; there is room for ", room_bytes),
        "attach with a larger extra_state_bytes");
  }
  return request;
}

absl::Status StepCaller::Announce(const protocol::StepRequest& scalars,
                                  std::span<const protocol::HyperParams> hyper_params,
                                  const WaitLimits& limits) {
  RETURN_IF_ERROR(parts_.CheckHasRank());
  RETURN_IF_ERROR(link_.CheckStored(limits));
  if (step_.has_value()) {
    return MakeError(ErrorId::kStep, absl::StrCat("step ", step_->t, " is still under way"),
                     "repeat its call first");
  }
  const std::pmr::vector<uint64_t> none(gradients_.presence().size(), 0, link_.memory());
  ASSIGN_OR_RETURN(const std::pmr::vector<std::byte> request,
                   Encode(scalars, hyper_params, 0, none));
  parts_.CopyToArena(parts_.step_region_offset, request);
  Command command = MakeCommand(Op::kAnnounceStep);
  command.step = scalars.step;
  command.attempt = gradients_.attempt();
  command.arena_offset_bytes = parts_.step_region_offset;
  command.length_bytes = request.size();
  return link_.Call(command, nullptr, limits).status();
}

absl::StatusOr<StepResult> StepCaller::Step(const protocol::StepRequest& scalars,
                                            std::span<const protocol::HyperParams> hyper_params,
                                            const ExtraState& extra_state,
                                            const WaitLimits& limits) {
  const uint64_t start_ns = protocol::MonotonicNs();
  const uint64_t t = scalars.step;
  const gpu::NvtxRange range("forebay.step");
  RETURN_IF_ERROR(parts_.CheckHasRank());
  const absl::Status stored = link_.CheckStored(limits);
  // The daemon knows of non-finite gradients too; its answer lets every rank repeat the step.
  if (!stored.ok() && protocol::IdOf(stored) != ErrorId::kNonfinite) return stored;
  if (!step_.has_value() && stored.ok()) RETURN_IF_ERROR(gradients_.DeliverAll(limits));
  absl::StatusOr<std::pmr::vector<std::byte>> encoded = Encode(
      scalars, hyper_params, extra_state.size(),
      step_.has_value() ? std::span<const uint64_t>(step_->presence) : gradients_.presence());
  if (!encoded.ok()) {
    const bool others_wait = parts_.nodes.world_ranks > 0 && !step_.has_value();
    if (others_wait) RETURN_IF_ERROR(RefuseOverNodes(t, encoded.status(), limits));
    return encoded.status();
  }
  std::pmr::vector<std::byte> request = *std::move(encoded);
  if (step_.has_value() && !IsInFlight(t, request, extra_state)) {
    if (!step_->answer->arrived || (step_->outcome && step_->decided != nullptr)) {
      return MakeError(ErrorId::kStep,
                       absl::StrCat("step ", step_->t, " is still under way; step ", t,
                                    " or other scalars cannot begin before it ends"),
                       "repeat the call with the arguments of the step that is under way");
    }
    const absl::Status forgotten = step_->answer->status;
    step_.reset();
    RETURN_IF_ERROR(forgotten);
  }
  if (!step_.has_value()) RETURN_IF_ERROR(Begin(t, std::move(request), extra_state, limits));
  RETURN_IF_ERROR(link_.WaitFor(*step_->answer, limits));
  if (parts_.nodes.world_ranks > 0) RETURN_IF_ERROR(DecideOverNodes(limits));
  absl::StatusOr<StepResult> result = End();
  if (result.ok()) trace_.NoteStep(t, start_ns);
  return result;
}

bool StepCaller::IsInFlight(uint64_t t, std::span<const std::byte> request,
                            const ExtraState& extra_state) const {
  std::span<const std::byte> sent(sent_extra_state_);
  if (step_->t != t || !IsSame(step_->request, request)) return false;
  if (sent.size() != extra_state.size()) return false;
  for (const ExtraState::Bytes part : extra_state.front) {
    if (!IsSame(sent.first(part.size()), part)) return false;
    sent = sent.subspan(part.size());
  }
  return IsSame(sent, extra_state.own);
}

absl::Status StepCaller::Begin(uint64_t t, std::pmr::vector<std::byte> request,
                               const ExtraState& extra_state, const WaitLimits& limits) {
  RETURN_IF_ERROR(weights_.EndReads(limits));  // a step with leases is refused
  sent_extra_state_.resize(extra_state.size());
  std::span<std::byte> sent(sent_extra_state_);
  for (const ExtraState::Bytes part : extra_state.front) {
    protocol::CopyChanged(part, sent);
    sent = sent.subspan(part.size());
  }
  protocol::CopyChanged(extra_state.own, sent);
  parts_.CopyToArena(parts_.step_region_offset, request);
  protocol::CopyChanged(sent_extra_state_,
                        parts_.grad->bytes().subspan(parts_.step_region_offset + request.size()));
  Command command = MakeCommand(Op::kStep);
  command.kind = static_cast<uint16_t>(parts_.step_answered_when);
  command.step = t;
  command.attempt = gradients_.attempt();
  command.arena_offset_bytes = parts_.step_region_offset;
  command.length_bytes = request.size() + sent_extra_state_.size();
  ASSIGN_OR_RETURN(std::shared_ptr<SessionLink::Answer> answer, link_.Start(command, limits));
  step_ = StepInFlight{
      .t = t,
      .request = std::move(request),
      .presence = {gradients_.presence().begin(), gradients_.presence().end(), link_.memory()},
      .answer = std::move(answer)};
  return absl::OkStatus();
}

absl::StatusOr<StepResult> StepCaller::End() {
  const SessionLink::Answer answer = *step_->answer;
  const bool drops = step_->drops;
  step_.reset();
  const bool is_from_scratch =
      !answer.status.ok() && answer.completion.attempt > gradients_.attempt();
  absl::Status& gradient_error = link_.errors().gradient;
  const absl::Status stored = gradient_error;
  if (is_from_scratch || protocol::IdOf(stored) == ErrorId::kNonfinite) gradient_error = {};
  if (is_from_scratch) {
    gradients_.BeginAttempt(answer.completion.attempt);
  } else if (drops) {
    gradients_.DropAll();
  }
  RETURN_IF_ERROR(answer.status);
  RETURN_IF_ERROR(stored);
  return StepResult{.committed_step = answer.completion.committed_step,
                    .norm = answer.completion.norm,
                    .clipped = (answer.completion.flags & protocol::kStepClipped) != 0,
                    .repeated = (answer.completion.flags & protocol::kStepRepeated) != 0};
}

// ---------------------------------------- several nodes

std::span<std::byte> StepCaller::summary_bytes() {
  const uint64_t offset = protocol::StepSummaryOffset(
      {.offset_bytes = parts_.step_region_offset, .size_bytes = parts_.step_region_bytes},
      *parts_.layout);
  return parts_.grad->bytes().subspan(offset, protocol::NodeSummaryBytes(*parts_.layout));
}

absl::StatusOr<std::shared_ptr<StepCaller::Answer>> StepCaller::SendDecision(
    const StepSummary& summary, const WaitLimits& limits) {
  protocol::EncodeStepSummary(summary, summary_bytes());
  Command command = MakeCommand(Op::kDecide);
  command.kind = static_cast<uint16_t>(parts_.step_answered_when);
  command.step = summary.head.step;
  command.attempt = gradients_.attempt();
  return link_.Start(command, limits);
}

absl::StatusOr<NodeMessage> StepCaller::MessageOfStep(const WaitLimits& limits) {
  const Answer& answer = *step_->answer;
  NodeMessage message{.first_rank = parts_.layout->spec().first_rank};
  if (answer.status.ok()) {
    message.kind = NodeMessage::Kind::kPrepared;
    const std::span<const std::byte> bytes = summary_bytes();
    const uint64_t size = protocol::StepSummaryBytes(parts_.layout->params().size());
    message.summary.assign(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(size));
    if (parts_.rank == 0) message.digests = ReplicaDigestsOf(*parts_.layout, bytes.subspan(size));
    return message;
  }
  message.kind = answer.completion.attempt > gradients_.attempt() ? NodeMessage::Kind::kLost
                                                                  : NodeMessage::Kind::kRefused;
  message.error = answer.status;
  if ((answer.completion.flags & protocol::kStepWithdrawn) != 0) {
    message.kind = NodeMessage::Kind::kWithdrawn;
    return message;
  }
  RETURN_IF_ERROR(Withdraw(step_->t, limits));
  return message;
}

absl::Status StepCaller::RefuseOverNodes(uint64_t t, const absl::Status& error,
                                         const WaitLimits& limits) {
  const NodeMessage message{.kind = NodeMessage::Kind::kRefused,
                            .first_rank = parts_.layout->spec().first_rank,
                            .error = error};
  RETURN_IF_ERROR(Withdraw(t, limits));
  return GatherFrom(parts_.nodes, message).status();
}

absl::Status StepCaller::Withdraw(uint64_t t, const WaitLimits& limits) {
  const uint64_t params = parts_.layout->params().size();
  ASSIGN_OR_RETURN(const std::shared_ptr<Answer> answer,
                   SendDecision(EmptySummary(t, params, StepDecision::kWithdraw), limits));
  return link_.WaitFor(*answer, limits);
}

absl::Status StepCaller::DecideOverNodes(const WaitLimits& limits) {
  const absl::Status own = step_->answer->status;
  const bool is_prepared =
      own.ok() && (step_->answer->completion.flags & protocol::kStepPrepared) != 0;
  if (IsOver(own) || (own.ok() && !is_prepared && !step_->outcome)) return absl::OkStatus();
  if (!step_->outcome) {
    ASSIGN_OR_RETURN(const NodeMessage message, MessageOfStep(limits));
    ASSIGN_OR_RETURN(const std::vector<std::string> all, GatherFrom(parts_.nodes, message));
    ASSIGN_OR_RETURN(step_->outcome, DecideStep(all, *parts_.layout, step_->t));
  }
  const StepDecision decision = step_->outcome->summary.head.decision;
  if (!is_prepared) {
    step_->drops = decision == StepDecision::kDrop;
    const bool is_withdrawn = (step_->answer->completion.flags & protocol::kStepWithdrawn) != 0;
    if (is_withdrawn) step_->answer->status = step_->outcome->error;
    return absl::OkStatus();
  }
  if (step_->decided == nullptr) {
    StepSummary summary = step_->outcome->summary;
    if (decision != StepDecision::kCommit) {
      summary = EmptySummary(step_->t, parts_.layout->params().size(), decision);
    }
    ASSIGN_OR_RETURN(step_->decided, SendDecision(summary, limits));
  }
  RETURN_IF_ERROR(link_.WaitFor(*step_->decided, limits));
  step_->answer = step_->decided;
  step_->answer->completion.flags &= static_cast<uint16_t>(~protocol::kStepRepeated);
  if (step_->answer->status.ok()) step_->answer->status = step_->outcome->error;
  return absl::OkStatus();
}

absl::Status StepCaller::Follow(const AttachOutcome& outcome) {
  const WaitLimits limits = parts_.Limits(parts_.timeout);
  if (outcome.todo == AttachOutcome::Todo::kGoBack) {
    Command command = MakeCommand(Op::kGoBack);
    command.step = outcome.step;
    const absl::Status asked = link_.Call(command, nullptr, limits).status();
    // Another rank of the node may have asked before, which has ended this session.
    return IsOver(asked) ? absl::OkStatus() : asked;
  }
  const bool is_prepared = parts_.prepared_step == outcome.step;
  if (outcome.todo == AttachOutcome::Todo::kNothing || !is_prepared) return absl::OkStatus();
  const uint64_t params = parts_.layout->params().size();
  StepSummary summary = EmptySummary(outcome.step, params, StepDecision::kDrop);
  if (outcome.todo == AttachOutcome::Todo::kCommit) {
    ASSIGN_OR_RETURN(summary, protocol::DecodeStepSummary(outcome.summary, params));
  }
  ASSIGN_OR_RETURN(const std::shared_ptr<Answer> answer, SendDecision(summary, limits));
  RETURN_IF_ERROR(link_.WaitFor(*answer, limits));
  if (!answer->status.ok()) return answer->status;
  parts_.prepared_step = 0;
  gradients_.BeginAttempt(answer->completion.attempt);
  return absl::OkStatus();
}

NodeMessage StepCaller::MessageOfAttach() const {
  return {.kind = NodeMessage::Kind::kAttached,
          .first_rank = parts_.layout->spec().first_rank,
          .state = {.committed_step = parts_.committed_step(),
                    .prepared_step = parts_.prepared_step,
                    .durable_step = parts_.durable_step,
                    .durable_before = parts_.durable_before,
                    .is_new = parts_.writes_initial},
          .summary = parts_.summary};
}

}  // namespace forebay::client::internal
