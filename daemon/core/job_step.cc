// Gradients and steps of a job: from the first kGradReady to the commit.

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/core/job.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/os/status_macros.h"

namespace forebay::daemon {
namespace {

using protocol::Command;
using protocol::ErrorId;
using protocol::MakeError;

constexpr double kClipEps = 1e-6;  // as torch.nn.utils.clip_grad_norm_ has it

// The request's header and hyper-parameters, without its extra_state.
constexpr uint64_t kStepHeadBytesMax =
    sizeof(protocol::StepRequest) + protocol::kParamGroupsMax * sizeof(protocol::HyperParams);

}  // namespace

void Job::HandleGradient(Session& session, const Command& command) {
  const CommandId id = session.IdOf(command);
  if (command.step != committed_step_ + 1) {
    io_.Answer(
        id, MakeError(ErrorId::kStep,
                      absl::StrCat("a gradient for step ", command.step, "; the committed step is ",
                                   committed_step_, ", the next one ", committed_step_ + 1)));
    return;
  }
  if (phase_ != Phase::kOpen || barrier_.has(session.rank) || session.step_being_copied) {
    io_.Answer(id, MakeError(ErrorId::kStep,
                             absl::StrCat("rank ", session.rank, " has called step ", command.step,
                                          " already; its gradient for group ", command.group,
                                          " comes too late"),
                             "deliver every gradient of a step before calling step"));
    return;
  }
  if (session.awaits_repetition) {
    session.parked.push_back(command);
    return;
  }
  accumulator_.Deliver(io_, command.step,
                       {.rank = session.rank,
                        .group = command.group,
                        .arena_offset_bytes = command.arena_offset_bytes,
                        .grad_arena_bytes = session.request.grad_arena_bytes,
                        .command = id});
}

void Job::HandleStep(Session& session, const Command& command) {
  const CommandId id = session.IdOf(command);
  if (command.step != 0 && command.step == committed_step_) {
    protocol::Completion completion{};
    completion.flags = protocol::kStepRepeated;
    if (last_step_.clipped) completion.flags |= protocol::kStepClipped;
    completion.norm = last_step_.norm;
    io_.Answer(id, completion, last_step_.status);
    return;
  }
  if (command.step != committed_step_ + 1) {
    io_.Answer(id,
               MakeError(ErrorId::kStep,
                         absl::StrCat("step ", command.step, "; the committed step is ",
                                      committed_step_, ", the next one ", committed_step_ + 1),
                         "steps are numbered from 1 without a gap: go on after the committed one, "
                         "and take up its extra_state"));
    return;
  }
  if (phase_ != Phase::kOpen || barrier_.has(session.rank) || session.step_being_copied) {
    io_.Answer(id, MakeError(ErrorId::kStep,
                             absl::StrCat("rank ", session.rank, " waits in step ", command.step),
                             "wait for the answer to the first call"));
    return;
  }
  if (session.awaits_repetition) {
    session.parked.push_back(command);
    return;
  }
  session.step_being_copied = command;
  io_.actions().Emit(
      CopyStepRequest{.session = session.id,
                      .tag = command.tag,
                      .arena_offset_bytes = command.arena_offset_bytes,
                      .length_bytes = std::min(command.length_bytes, kStepHeadBytesMax)});
}

absl::Status Job::CheckStepCall(const Session& session, const Command& command,
                                const StepRequestCopied& copied) const {
  RETURN_IF_ERROR(CheckStepRequest(command, copied.request, copied.hyper_params, *spec_.layout,
                                   LimitsOf(session)));
  const auto left = std::find(detached_.begin(), detached_.end(), true);
  if (left == detached_.end()) return absl::OkStatus();
  return MakeError(ErrorId::kRankLost,
                   absl::StrCat("rank ", left - detached_.begin(), " of job ", spec_.name,
                                " has detached; the committed step is ", committed_step_),
                   "attach that rank again, then call step again");
}

void Job::OnStepRequest(const StepRequestCopied& copied) {
  Session* session = Find(copied.session);
  if (session == nullptr || !session->step_being_copied ||
      session->step_being_copied->tag != copied.tag) {
    return;  // ended or fenced meanwhile, and answered
  }
  const Command command = *std::exchange(session->step_being_copied, std::nullopt);
  const absl::Status status = CheckStepCall(*session, command, copied);
  if (!status.ok()) {
    io_.Answer(session->IdOf(command), status);
    return;
  }
  if (!accumulator_.fault().ok()) {
    AnswerInvalidated(*session, session->IdOf(command));
    return;
  }
  const auto hyper_end = copied.hyper_params.begin() + copied.request.param_groups;
  AddStepCall(*session,
              {.command = session->IdOf(command),
               .request = copied.request,
               .hyper_params = {copied.hyper_params.begin(), hyper_end},
               .extra_state_offset_bytes = command.arena_offset_bytes + command.length_bytes -
                                           copied.request.extra_state_bytes});
}

void Job::AddStepCall(Session& session, StepCall call) {
  const absl::Status status = barrier_.Compare(session.rank, call);
  if (!status.ok()) {
    io_.Answer(call.command, status);
    RefuseStepCalls(status);
    return;
  }
  barrier_.Add(session.rank, std::move(call));
  if (barrier_.by_rank().size() == detached_.size()) BeginReducing();
  accumulator_.CloseRank(io_, session.rank);
}

// No call stands any more; the gradients are kept.
void Job::RefuseStepCalls(const absl::Status& status) {
  for (const auto& [rank, call] : barrier_.Drain()) io_.Answer(call.command, status);
  accumulator_.ReopenRanks();
}

void Job::AnswerInvalidated(Session& session, const CommandId& command) {
  session.awaits_repetition = true;
  io_.Answer(command, accumulator_.fault());
}

// A gradient that is not finite has invalidated the step: whoever waits in step is told.
void Job::ReportInvalidated() {
  if (accumulator_.fault().ok()) return;
  for (const auto& [rank, call] : barrier_.Drain()) {
    AnswerInvalidated(sessions_.at(call.command.session), call.command);
  }
}

// All ranks know that the step was invalidated: it starts again, with what they have sent since.
void Job::RepeatWhenAllHaveSeen() {
  if (accumulator_.fault().ok() || !accumulator_.idle()) return;
  std::map<uint32_t, Session*> by_rank;
  for (auto& [id, session] : sessions_) {
    if (!session.is_current()) continue;
    if (!session.awaits_repetition) return;
    by_rank.emplace(session.rank, &session);
  }
  accumulator_.Clear(io_, accumulator_.fault());
  for (const auto& [rank, session] : by_rank) session->awaits_repetition = false;
  for (const auto& [rank, session] : by_rank) {
    for (const Command& command : std::exchange(session->parked, {})) Dispatch(*session, command);
  }
}

void Job::BeginReducing() {
  phase_ = Phase::kReducing;
  io_.actions().Emit(StepCalled{.job = spec_.id, .step = committed_step_ + 1});
  for (const auto& [rank, call] : barrier_.by_rank()) {
    if (call.request.extra_state_bytes == 0) continue;
    ++extra_copies_;
    io_.Start(
        TaskKind::kCopyExtraState, call.command.session,
        CopyToStepArena{.session = call.command.session,
                        .grad_offset_bytes = call.extra_state_offset_bytes,
                        .step_offset_bytes = spec_.plan.extra_state_slot(rank, 1 - extra_slot_),
                        .bytes = call.request.extra_state_bytes});
  }
}

// The verdict: norm, clipping, or that the step is invalidated.
void Job::DecideWhenReduced() {
  if (!accumulator_.reduced() || extra_copies_ > 0 || reads_.in_progress()) return;
  if (!accumulator_.fault().ok()) {
    const absl::Status fault = accumulator_.fault();
    phase_ = Phase::kOpen;
    for (const auto& [rank, call] : barrier_.Drain()) io_.Answer(call.command, fault);
    accumulator_.Clear(io_, fault);
    fetched_next_.clear();
    return;
  }
  const StepCall& call = barrier_.by_rank().begin()->second;
  const auto world_size = static_cast<double>(detached_.size());
  double scale = 1.0 / world_size;
  next_step_ = {};
  if (call.request.max_grad_norm > 0) {
    next_step_.norm = std::sqrt(accumulator_.SumSquares()) / world_size;
    const double clip = call.request.max_grad_norm / (next_step_.norm + kClipEps);
    next_step_.clipped = clip < 1.0;
    if (next_step_.clipped) scale *= clip;
  }
  phase_ = Phase::kUpdating;
  pipeline_.Begin(io_, {.step = committed_step_ + 1,
                        .grad_scale = static_cast<float>(scale),
                        .hyper_params = call.hyper_params,
                        .groups = accumulator_.delivered_groups()});
}

void Job::Commit() {
  const uint64_t overflowed = pipeline_.Finish();
  last_step_ = std::exchange(next_step_, {});
  ++committed_step_;
  io_.set_committed_step(committed_step_);
  phase_ = Phase::kOpen;
  extra_slot_ = 1 - extra_slot_;
  if (!fetched_.empty()) trace_ = std::move(fetched_);
  fetched_ = std::exchange(fetched_next_, {});
  if (overflowed > 0) {
    last_step_.status = MakeError(
        ErrorId::kOverflow,
        absl::StrCat(overflowed, " parameters of job ", spec_.name, " became non-finite in step ",
                     committed_step_, ", which is committed"),
        "go back to a checkpoint, or lower the learning rate");
  }
  accumulator_.Clear(io_, absl::OkStatus());
  io_.actions().Emit(StepCommitted{.job = spec_.id, .step = committed_step_});
  for (const auto& [rank, call] : barrier_.Drain()) {
    extra_bytes_[rank] = call.request.extra_state_bytes;
    protocol::Completion completion{};
    completion.norm = last_step_.norm;
    if (last_step_.clipped) completion.flags = protocol::kStepClipped;
    io_.Answer(call.command, completion, last_step_.status);
  }
}

}  // namespace forebay::daemon
