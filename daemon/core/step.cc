#include "daemon/core/step.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
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

Step::Step(const JobSpec& spec, JobIo& io, Membership& members, StepPipeline& pipeline,
           const StateReads& reads, const LeaseTable& leases)
    : spec_(spec),
      io_(io),
      members_(members),
      pipeline_(pipeline),
      reads_(reads),
      leases_(leases),
      accumulator_(io, spec.layout, spec.plan, members),
      trace_(spec.layout->groups().size()),
      extra_bytes_(spec.world_size(), 0) {}

CommandLimits LimitsOf(const JobSpec& spec, const Session& session) {
  if (spec.options.disable_range_check_for_test) {
    return {.grad_bytes = UINT64_MAX, .step_region_offset = 0, .step_region_bytes = UINT64_MAX};
  }
  return {.grad_bytes = session.request.grad_arena_bytes,
          .step_region_offset = spec.plan.step_region_offset,
          .step_region_bytes = spec.plan.step_region_bytes,
          .extra_state_bytes = session.request.extra_state_bytes};
}

void Step::HandleGradient(Session& session, const Command& command) {
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
  accumulator_.Deliver(command.step, {.rank = session.rank,
                                      .group = command.group,
                                      .arena_offset_bytes = command.arena_offset_bytes,
                                      .grad_arena_bytes = session.request.grad_arena_bytes,
                                      .command = id});
}

void Step::HandleStep(Session& session, const Command& command) {
  const CommandId id = session.IdOf(command);
  if (command.step != 0 && command.step == committed_step_) {
    protocol::Completion completion{};
    completion.flags = protocol::kStepRepeated;
    if (last_.clipped) completion.flags |= protocol::kStepClipped;
    completion.norm = last_.norm;
    io_.Answer(id, completion, last_.status);
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
  if (leases_.count_of(session.id) > 0) {
    io_.Answer(id, LeasesHeldError(session, command.step));
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

absl::Status Step::CheckCall(const Session& session, const Command& command,
                             const StepRequestCopied& copied) const {
  RETURN_IF_ERROR(CheckStepRequest(command, copied.request, copied.hyper_params, *spec_.layout,
                                   LimitsOf(spec_, session)));
  const std::optional<uint32_t> detached = members_.FirstDetached();
  return detached ? DetachedError(*detached) : absl::OkStatus();
}

absl::Status Step::DetachedError(uint32_t rank) const {
  return MakeError(ErrorId::kRankLost,
                   absl::StrCat("rank ", rank, " of job ", spec_.name,
                                " has detached; the committed step is ", committed_step_),
                   "attach that rank again, then call step again");
}

void Step::OnStepRequest(Session& session, const StepRequestCopied& copied) {
  if (!session.step_being_copied || session.step_being_copied->tag != copied.tag) {
    return;  // fenced meanwhile, and answered
  }
  const Command command = *std::exchange(session.step_being_copied, std::nullopt);
  const absl::Status status = CheckCall(session, command, copied);
  if (!status.ok()) {
    io_.Answer(session.IdOf(command), status);
    return;
  }
  if (!accumulator_.fault().ok()) {
    AnswerInvalidated(session, session.IdOf(command));
    return;
  }
  const auto hyper_end = copied.hyper_params.begin() + copied.request.param_groups;
  AddCall(session, {.command = session.IdOf(command),
                    .request = copied.request,
                    .hyper_params = {copied.hyper_params.begin(), hyper_end},
                    .extra_state_offset_bytes = command.arena_offset_bytes + command.length_bytes -
                                                copied.request.extra_state_bytes});
}

void Step::AddCall(Session& session, StepCall call) {
  const absl::Status status = barrier_.Compare(session.rank, call, spec_.layout->spec().optimizer);
  if (!status.ok()) {
    io_.Answer(call.command, status);
    RefuseCalls(status);
    return;
  }
  barrier_.Add(session.rank, std::move(call));
  if (barrier_.by_rank().size() == members_.world_size()) BeginReducing();
  accumulator_.CloseRank(session.rank);
}

// Every call is refused; the gradients are kept.
void Step::RefuseCalls(const absl::Status& status) {
  for (const auto& [rank, call] : barrier_.Drain()) io_.Answer(call.command, status);
  accumulator_.ReopenRanks();
}

void Step::AnswerInvalidated(Session& session, const CommandId& command) {
  session.awaits_repetition = true;
  io_.Answer(command, accumulator_.fault());
}

// A gradient that is not finite has invalidated the step: whoever waits in step gets the error.
void Step::ReportInvalidated() {
  if (accumulator_.fault().ok()) return;
  for (const auto& [rank, call] : barrier_.Drain()) {
    AnswerInvalidated(*members_.Find(call.command.session), call.command);
  }
}

// All ranks know that the step was invalidated: it starts again, with what they have sent since.
void Step::RepeatWhenAllHaveSeen() {
  if (accumulator_.fault().ok() || !accumulator_.idle()) return;
  std::map<uint32_t, Session*> by_rank;
  for (Session* session : members_.Current()) {
    if (!session->awaits_repetition) return;
    by_rank.emplace(session->rank, session);
  }
  accumulator_.Clear(accumulator_.fault());
  for (const auto& [rank, session] : by_rank) session->awaits_repetition = false;
  for (const auto& [rank, session] : by_rank) {
    for (const Command& command : std::exchange(session->parked, {})) {
      if (static_cast<protocol::Op>(command.op) == protocol::Op::kStep) {
        HandleStep(*session, command);
      } else {
        HandleGradient(*session, command);
      }
    }
  }
}

void Step::BeginReducing() {
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

// The decision: norm, clipping; or that the step is invalidated, or refused because blocks cannot be
// read: then the gradients are kept, and another call tries again.
void Step::DecideWhenReduced() {
  if (!accumulator_.reduced() || extra_copies_ > 0 || reads_.in_progress()) return;
  if (!accumulator_.fault().ok()) {
    const absl::Status fault = accumulator_.fault();
    phase_ = Phase::kOpen;
    for (const auto& [rank, call] : barrier_.Drain()) io_.Answer(call.command, fault);
    accumulator_.Clear(fault);
    trace_.OnRefused();
    return;
  }
  if (const absl::Status error = pipeline_.prefetch_error(); !error.ok()) {
    phase_ = Phase::kOpen;
    pipeline_.ForgetPrefetchErrors();
    RefuseCalls(error);
    trace_.OnRefused();
    return;
  }
  const StepCall& call = barrier_.by_rank().begin()->second;
  const auto world_size = static_cast<double>(members_.world_size());
  double scale = 1.0 / world_size;
  next_ = {};
  if (call.request.max_grad_norm > 0) {
    next_.norm = std::sqrt(accumulator_.SumSquares()) / world_size;
    const double clip = call.request.max_grad_norm / (next_.norm + kClipEps);
    next_.clipped = clip < 1.0;
    if (next_.clipped) scale *= clip;
  }
  phase_ = Phase::kUpdating;
  pipeline_.Begin({.step = committed_step_ + 1,
                   .grad_scale = static_cast<float>(scale),
                   .hyper_params = call.hyper_params,
                   .groups = accumulator_.delivered_groups()});
  ArmLeaseTimer();
}

// Ranks have none now, so that whoever holds up the update is a reader.
void Step::ArmLeaseTimer() {
  if (leases_.count() == 0) return;
  for (uint32_t group = 0; group < spec_.layout->groups().size(); ++group) {
    if (!pipeline_.Updates(group) || !leases_.IsLeased(group)) continue;
    io_.actions().Emit(StartLeaseTimer{.job = spec_.id, .step = committed_step_ + 1});
    return;
  }
}

absl::Status Step::LeasesHeldError(const Session& session, uint64_t step) const {
  std::vector<std::string> names;
  for (const uint32_t group : leases_.GroupsOf(session.id)) {
    names.push_back(spec_.layout->spec().group_names[group]);
  }
  return MakeError(ErrorId::kLease,
                   absl::StrCat("rank ", session.rank, " called step ", step,
                                " with leases on the weights of ", absl::StrJoin(names, ", ")),
                   "release every lease before step: the weights change in it");
}

void Step::Commit() {
  const uint64_t overflowed = pipeline_.Finish();
  last_ = std::exchange(next_, {});
  ++committed_step_;
  io_.set_committed_step(committed_step_);
  phase_ = Phase::kOpen;
  extra_slot_ = 1 - extra_slot_;
  trace_.OnCommitted();
  if (overflowed > 0) {
    last_.status = MakeError(
        ErrorId::kOverflow,
        absl::StrCat(overflowed, " parameters of job ", spec_.name, " became non-finite in step ",
                     committed_step_, ", which is committed"),
        "go back to a checkpoint, or lower the learning rate");
  }
  accumulator_.Clear(absl::OkStatus());
  io_.actions().Emit(StepCommitted{.job = spec_.id, .step = committed_step_});
  for (const auto& [rank, call] : barrier_.Drain()) {
    extra_bytes_[rank] = call.request.extra_state_bytes;
    protocol::Completion completion{};
    completion.norm = last_.norm;
    if (last_.clipped) completion.flags = protocol::kStepClipped;
    io_.Answer(call.command, completion, last_.status);
  }
}

absl::Status Step::OnGradientTask(TaskKind kind, const TaskDone& done) {
  if (!done.status.ok()) return done.status;
  if (kind == TaskKind::kAddGradient) accumulator_.OnAdded(done);
  if (kind == TaskKind::kMoveGradient) accumulator_.OnMoved(done);
  if (kind == TaskKind::kSumGroup) accumulator_.OnSummed(done);
  return absl::OkStatus();
}

absl::Status Step::OnExtraStateCopied(const TaskDone& done) {
  --extra_copies_;
  return done.status;
}

void Step::Advance() {
  if (phase_ == Phase::kFailed) pipeline_.Abandon();
  if (phase_ == Phase::kOpen) {
    ReportInvalidated();
    RepeatWhenAllHaveSeen();
  }
  if (phase_ == Phase::kReducing) DecideWhenReduced();
  if (phase_ == Phase::kUpdating) {
    pipeline_.Pump();
    if (pipeline_.done()) Commit();
  }
}

void Step::OnAttached(Session& session) { session.awaits_repetition = !accumulator_.fault().ok(); }

bool Step::HasContributed(const Session& session) const {
  return accumulator_.has_delivered(session.rank) || barrier_.has(session.rank) ||
         session.step_being_copied || !session.parked.empty();
}

void Step::OnRankDetached(uint32_t rank) {
  accumulator_.OnRankDetached();
  RefuseCalls(DetachedError(rank));
}

void Step::OnRankLost(const Session& lost, const absl::Status& status) {
  if (phase_ != Phase::kOpen) return;
  accumulator_.AnswerSession(lost.id, lost.fence);
  for (const auto& [rank, call] : barrier_.Drain()) {
    io_.Answer(call.command, call.command.session == lost.id ? lost.fence : status);
  }
  io_.NewEpoch();
  accumulator_.Drop(status);
  trace_.OnDropped();
}

void Step::AnswerWaiting(Session& session, const absl::Status& status) {
  for (const Command& command : session.parked) io_.Answer(session.IdOf(command), status);
  session.parked.clear();
  if (session.step_being_copied) io_.Answer(session.IdOf(*session.step_being_copied), status);
  session.step_being_copied.reset();
}

void Step::Fail(const absl::Status& first_error) {
  phase_ = Phase::kFailed;
  io_.NewEpoch();
  for (const auto& [rank, call] : barrier_.Drain()) io_.Answer(call.command, first_error);
  accumulator_.Drop(first_error);
}

bool Step::MayFetch(std::optional<uint32_t> rank, uint32_t group) const {
  if (!rank) return phase_ != Phase::kUpdating;
  if (phase_ == Phase::kReducing) return false;
  if (phase_ == Phase::kOpen) return !barrier_.has(*rank);
  return phase_ != Phase::kUpdating || pipeline_.IsGroupDone(group);
}

uint64_t Step::unanswered(const Session& session) const {
  uint64_t count = session.parked.size() + (session.step_being_copied ? 1 : 0);
  for (const auto& [rank, call] : barrier_.by_rank()) {
    count += call.command.session == session.id ? 1 : 0;
  }
  return count + accumulator_.unanswered(session.id);
}

void Step::CheckInvariants() const {
  accumulator_.CheckInvariants();
  pipeline_.CheckInvariants(committed_step_);
  FOREBAY_CHECK((phase_ == Phase::kUpdating) == pipeline_.running() || phase_ == Phase::kFailed);
  FOREBAY_CHECK(phase_ != Phase::kUpdating || !reads_.in_progress());
}

}  // namespace forebay::daemon
