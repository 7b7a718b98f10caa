// SPDX-License-Identifier: Apache-2.0
// Step: at most one is in flight; a repeated call waits for the same one.

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/internal/attachment_state.h"
#include "client/internal/stopwatch.h"
#include "gpu/nvtx_range.h"
#include "protocol/copy_changed.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"

namespace forebay::client {

using internal::MakeCommand;
using internal::Stopwatch;
using internal::WaitLimits;
using protocol::Command;
using protocol::ErrorId;
using protocol::MakeError;
using protocol::Op;

absl::StatusOr<std::pmr::vector<std::byte>> Attachment::State::EncodeStep(
    const protocol::StepRequest& scalars, std::span<const protocol::HyperParams> hyper_params,
    uint64_t extra_state_bytes, std::span<const uint64_t> present) {
  if (extra_state_bytes > parts.extra_state_bytes) {
    return MakeError(ErrorId::kExtraState,
                     absl::StrCat("extra_state has ", extra_state_bytes, " bytes; ",
                                  parts.extra_state_bytes, " were reserved at attach"),
                     "attach with a larger extra_state_bytes");
  }
  if (hyper_params.empty() || hyper_params.size() > protocol::kParamGroupsMax) {
    return MakeError(ErrorId::kOption,
                     absl::StrCat("step got hyper-parameters of ", hyper_params.size(),
                                  " parameter groups, not 1 to ", protocol::kParamGroupsMax));
  }
  // Groups that no parameter of the layout is in may have no room.
  hyper_params =
      hyper_params.first(std::min<size_t>(hyper_params.size(), parts.layout->param_group_rows()));
  protocol::StepRequest header = scalars;
  header.param_groups = static_cast<uint32_t>(hyper_params.size());
  header.extra_state_bytes = static_cast<uint32_t>(extra_state_bytes);
  std::pmr::vector<std::byte> request(&memory);
  request.reserve(sizeof(header) + hyper_params.size_bytes() + present.size_bytes());
  const auto append = [&request](std::span<const std::byte> bytes) {
    request.insert(request.end(), bytes.begin(), bytes.end());
  };
  append(std::as_bytes(std::span(&header, 1)));
  append(std::as_bytes(hyper_params));
  append(std::as_bytes(present));
  const uint64_t room_bytes =
      parts.step_region_bytes -
      protocol::StepRegionTailBytes(*parts.layout, parts.nodes.world_ranks > 0);
  if (request.size() + extra_state_bytes > room_bytes) {
    return MakeError(
        ErrorId::kRange,
        absl::StrCat("hyper-parameters and extra_state of the step take ",
                     request.size() + extra_state_bytes, " bytes; there is room for ", room_bytes),
        "attach with a larger extra_state_bytes");
  }
  return request;
}

namespace {

protocol::StepRequest ScalarsOf(uint64_t t, double max_grad_norm, const GradientEdit& edit) {
  return {.step = t,
          .param_groups = 0,
          .extra_state_bytes = 0,
          .max_grad_norm = max_grad_norm,
          .grad_scale = edit.scale,
          .grad_min = edit.is_bounded() ? edit.min : 0,
          .grad_max = edit.is_bounded() ? edit.max : 0};
}

bool IsSame(std::span<const std::byte> one, std::span<const std::byte> other) {
  return one.size() == other.size() &&
         (one.empty() || std::memcmp(one.data(), other.data(), one.size()) == 0);
}

}  // namespace

absl::Status Attachment::AnnounceStep(uint64_t t,
                                      std::span<const protocol::HyperParams> hyper_params,
                                      Timeout timeout, const GradientEdit& edit) {
  State& s = *state_;
  const CallLock lock(s);
  RETURN_IF_ERROR(lock.status());
  RETURN_IF_ERROR(s.parts.CheckHasRank());
  const WaitLimits limits = s.parts.Limits(timeout);
  RETURN_IF_ERROR(s.KeptErrors(limits));
  if (s.step.has_value()) {
    return MakeError(ErrorId::kStep, absl::StrCat("step ", s.step->t, " is still under way"),
                     "repeat its call first");
  }
  const std::pmr::vector<uint64_t> none(s.presence.size(), 0, &s.memory);
  ASSIGN_OR_RETURN(const std::pmr::vector<std::byte> request,
                   s.EncodeStep(ScalarsOf(t, 0, edit), hyper_params, 0, none));
  s.parts.CopyToArena(s.parts.step_region_offset, request);
  Command command = MakeCommand(Op::kAnnounceStep);
  command.step = t;
  command.attempt = s.attempt;
  command.arena_offset_bytes = s.parts.step_region_offset;
  command.length_bytes = request.size();
  return s.Call(command, nullptr, limits).status();
}

absl::StatusOr<StepResult> Attachment::Step(uint64_t t,
                                            std::span<const protocol::HyperParams> hyper_params,
                                            double max_grad_norm, const ExtraState& extra_state,
                                            Timeout timeout, const GradientEdit& edit) {
  State& s = *state_;
  const CallLock lock(s);
  RETURN_IF_ERROR(lock.status());
  const Stopwatch stopwatch(s.gauge.wait_ns_step);
  const gpu::NvtxRange range("forebay.step");
  RETURN_IF_ERROR(s.parts.CheckHasRank());
  const WaitLimits limits = s.parts.Limits(timeout);
  const absl::Status kept = s.KeptErrors(limits);
  // The daemon knows of non-finite gradients too; its answer lets every rank repeat the step.
  if (!kept.ok() && protocol::IdOf(kept) != ErrorId::kNonfinite) return kept;
  if (!s.step.has_value() && kept.ok()) RETURN_IF_ERROR(s.DeliverAllPieces(limits));
  absl::StatusOr<std::pmr::vector<std::byte>> encoded =
      s.EncodeStep(ScalarsOf(t, max_grad_norm, edit), hyper_params, extra_state.size(),
                   s.step.has_value() ? std::span<const uint64_t>(s.step->presence)
                                      : std::span<const uint64_t>(s.presence));
  if (!encoded.ok()) {
    const bool others_wait = s.parts.nodes.world_ranks > 0 && !s.step.has_value();
    if (others_wait) RETURN_IF_ERROR(s.RefuseOverNodes(t, encoded.status(), limits));
    return encoded.status();
  }
  std::pmr::vector<std::byte> request = *std::move(encoded);
  if (s.step.has_value() && !s.IsInFlight(t, request, extra_state)) {
    if (!s.step->answer->arrived || (s.step->outcome && s.step->decided != nullptr)) {
      return MakeError(ErrorId::kStep,
                       absl::StrCat("step ", s.step->t, " is still under way; step ", t,
                                    " or other scalars cannot begin before it ends"),
                       "repeat the call with the arguments of the step that is under way");
    }
    const absl::Status forgotten = s.step->answer->status;
    s.step.reset();
    RETURN_IF_ERROR(forgotten);
  }
  if (!s.step.has_value()) RETURN_IF_ERROR(s.BeginStep(t, std::move(request), extra_state, limits));
  const absl::Status waited = s.waiter.Wait([&] { return s.step->answer->arrived; }, limits);
  s.gauge.sleeps = s.port.sleeps();
  RETURN_IF_ERROR(waited);
  if (s.parts.nodes.world_ranks > 0) RETURN_IF_ERROR(s.DecideOverNodes(limits));
  absl::StatusOr<StepResult> result = s.EndStep();
  if (!result.ok() || !s.trace.has_value()) return result;
  s.trace->LeaveOut(
      s.device_trace->Take([&](const protocol::ClientEvent& event) { s.trace->Add(event); }));
  s.Note({.lane = protocol::ClientLane::kStep,
          .name = absl::StrCat("step ", t),
          .start_ns = stopwatch.begin_ns()});
  s.trace->Committed(t);
  return result;
}

bool Attachment::State::IsInFlight(uint64_t t, std::span<const std::byte> request,
                                   const ExtraState& extra_state) const {
  std::span<const std::byte> sent(sent_extra_state);
  if (step->t != t || !IsSame(step->request, request)) return false;
  if (sent.size() != extra_state.size()) return false;
  for (const ExtraState::Bytes part : extra_state.front) {
    if (!IsSame(sent.first(part.size()), part)) return false;
    sent = sent.subspan(part.size());
  }
  return IsSame(sent, extra_state.own);
}

absl::Status Attachment::State::BeginStep(uint64_t t, std::pmr::vector<std::byte> request,
                                          const ExtraState& extra_state, const WaitLimits& limits) {
  ForgetLocatedAhead();  // places in the committed step
  // A step with leases is refused.
  RETURN_IF_ERROR(EndWeightCopies(limits));
  sent_extra_state.resize(extra_state.size());
  std::span<std::byte> sent(sent_extra_state);
  for (const ExtraState::Bytes part : extra_state.front) {
    protocol::CopyChanged(part, sent);
    sent = sent.subspan(part.size());
  }
  protocol::CopyChanged(extra_state.own, sent);
  parts.CopyToArena(parts.step_region_offset, request);
  protocol::CopyChanged(sent_extra_state,
                        parts.grad->bytes().subspan(parts.step_region_offset + request.size()));
  Command command = MakeCommand(Op::kStep);
  command.kind = static_cast<uint16_t>(parts.step_answered_when);
  command.step = t;
  command.attempt = attempt;
  command.arena_offset_bytes = parts.step_region_offset;
  command.length_bytes = request.size() + sent_extra_state.size();
  ASSIGN_OR_RETURN(std::shared_ptr<Answer> answer, Start(command, limits));
  step = StepInFlight{.t = t,
                      .request = std::move(request),
                      .presence = {presence.begin(), presence.end(), &memory},
                      .answer = std::move(answer)};
  return absl::OkStatus();
}

absl::StatusOr<StepResult> Attachment::State::EndStep() {
  const Answer answer = *step->answer;
  const bool drops = step->drops;
  step.reset();
  const bool anew = !answer.status.ok() && answer.completion.attempt > attempt;
  absl::Status kept = kept_grad_error;
  if (anew || protocol::IdOf(kept) == ErrorId::kNonfinite) kept_grad_error = absl::OkStatus();
  if (anew) BeginAttempt(answer.completion.attempt);
  if (drops && !anew) {
    DropOpen();
    BeginAttempt(has_delivered ? attempt + 1 : attempt);
  }
  RETURN_IF_ERROR(answer.status);
  RETURN_IF_ERROR(kept);
  return StepResult{.committed_step = answer.completion.committed_step,
                    .norm = answer.completion.norm,
                    .clipped = (answer.completion.flags & protocol::kStepClipped) != 0,
                    .repeated = (answer.completion.flags & protocol::kStepRepeated) != 0};
}

}  // namespace forebay::client
