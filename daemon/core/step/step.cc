// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/step/step.h"

#include <algorithm>
#include <cmath>
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
using protocol::StepAnswer;

StepAnswer AnsweredWhen(const Command& step_call) {
  return static_cast<StepAnswer>(step_call.kind);
}

constexpr double kClipEps = 1e-6;  // the value in torch.nn.utils.clip_grad_norm_

// Maximum bytes of a request's header, hyper-parameters and presence, without its extra_state.
uint64_t StepHeadBytesMax(const protocol::Layout& layout) {
  return sizeof(protocol::StepRequest) + layout.param_group_rows() * sizeof(protocol::HyperParams) +
         protocol::PresenceBytes(layout.params().size());
}

}  // namespace

Step::Step(const JobSpec& spec, JobTasks& io, Membership& members, StepPipeline& pipeline,
           DurableSteps& durable, const StateAccess& access, WeightsCache& weights,
           const LeaseTable& leases)
    : spec_(spec),
      io_(io),
      members_(members),
      pipeline_(pipeline),
      durable_(durable),
      access_(access),
      weights_(weights),
      leases_(leases),
      gradients_(io, spec.layout, spec.plan, members, pipeline),
      attempts_(spec, io),
      announcement_(spec.layout->spec().optimizer),
      digests_(spec, io, pipeline),
      barrier_(io.memory()),
      nodes_(spec),
      trace_(spec.layout->partitions().size()),
      extra_(spec, io),
      answers_(spec, io) {}

void Step::Recover(const DurableJob& job) {
  committed_step_ = published_step_ = job.step;
  io_.set_committed_step(committed_step_);
  if (job.kept) {
    attempts_.Recover(job.kept->attempt);
    nodes_.Recover(job.kept->summary);
    is_to_be_resumed_ = job.kept->update != nullptr && !job.kept->update->prepared;
    if (is_to_be_resumed_) --published_step_;
    answers_.Recover(
        *job.kept, job.step,
        is_to_be_resumed_ ? StepAnswers::Recovered::kUpdating : StepAnswers::Recovered::kPublished);
  }
  trace_.Recover(job.trace);
  pipeline_.FollowTrace(job.trace);
  extra_.Recover(*job.extra_states);
}

CommandLimits LimitsOf(const JobSpec& spec, const Session& session) {
  if (spec.options.disable_range_check_for_test) {
    return {.grad_bytes = UINT64_MAX,
            .step_region_offset = 0,
            .step_region_bytes = UINT64_MAX,
            .rank = session.rank};
  }
  return {.grad_bytes = session.request.grad_arena_bytes,
          .step_region_offset = spec.plan.step_region_offset,
          .step_region_bytes = spec.plan.step_region_bytes,
          .extra_state_bytes = session.request.extra_state_bytes,
          .rank = session.rank};
}

void Step::BeginMasters(std::vector<CommandId> commands, bool has_masters) {
  initial_done_ = std::move(commands);
  if (!has_masters && pipeline_.BeginMasters()) {
    phase_ = Phase::kMasters;
  } else {
    AnswerInitialDone();
  }
}

void Step::AnswerInitialDone() {
  for (const CommandId& command : std::exchange(initial_done_, {})) {
    io_.Answer(command, absl::OkStatus());
  }
}

void Step::EndMasters() {
  pipeline_.Finish();
  phase_ = Phase::kOpen;
  io_.actions().Emit(StepPublished{.job = spec_.id, .step = 0});
  AnswerInitialDone();
}

void Step::FollowAttempt(const Session& session, const Command& command) {
  if (command.attempt <= attempts_.newest()) return;
  const absl::Status status =
      MakeError(ErrorId::kGradDropped,
                absl::StrCat("rank ", spec_.layout->WorldRank(session.rank), " of job ", spec_.name,
                             " has begun step ", committed_step_ + 1,
                             " anew: the gradients of all ranks were dropped"));
  BeginAttempt(command.attempt, status);
}

// Drops the gathered gradients of every rank, and the announcement of scalars.
void Step::DropGradients(const absl::Status& status) {
  gradients_.Drop(status);
  pipeline_.early().ForgetSums();
  announcement_.Reset();
}

// --------------------------------------------------------------------------------- the step's call

// Begins an attempt. Ranks that wait in step get `status`. The delivered gradients are dropped.
void Step::BeginAttempt(uint64_t attempt, const absl::Status& status) {
  attempts_.Begin(attempt, committed_step_ + 1);
  for (const auto& [rank, call] : barrier_.Drain()) AnswerCall(call, status);
  io_.NewEpoch();
  DropGradients(absl::OkStatus());
}

// Answers a step call, unless the call was answered when the step was prepared.
void Step::AnswerCall(const StepCall& call, const absl::Status& status, uint16_t flags) {
  protocol::Completion completion{};
  completion.flags = flags;
  if (!call.is_answered) io_.Answer(call.command, completion, status);
}

// Ends the attempt for every rank if a gradient is not finite.
void Step::DropFaulty() {
  if (gradients_.fault().ok()) return;
  const absl::Status fault = gradients_.fault();
  attempts_.EndWithFault(fault);
  BeginAttempt(attempts_.newest() + 1, fault);
}

void Step::HandleStep(Session& session, const Command& command) {
  const CommandId id = session.IdOf(command);
  if (command.step != 0 && command.step == committed_step_) return HandleRepeated(command, id);
  if (command.step != committed_step_ + 1) {
    io_.Answer(id, StepNumberError(command.step));
    return;
  }
  if (prepared_step() > 0 && command.attempt == attempts_.newest()) {
    AnswerPrepared(session, id);
    return;
  }
  if (phase_ != Phase::kOpen || barrier_.has(session.rank) || session.step_being_copied) {
    io_.Answer(id, MakeError(ErrorId::kStep,
                             absl::StrCat("rank ", spec_.layout->WorldRank(session.rank),
                                          " has called step ", command.step,
                                          " already and waits for the other ranks"),
                             "wait for the answer to the first call"));
    return;
  }
  if (leases_.count_of(session.id) > 0) {
    io_.Answer(id, LeasesHeldError(session, command.step));
    return;
  }
  const absl::Status status = attempts_.Check(session.rank, command);
  if (!status.ok() || command.attempt < attempts_.newest()) {
    io_.Answer(id, status.ok() ? DroppedError(command.attempt) : status);
    return;
  }
  FollowAttempt(session, command);
  CopyRequest(session, command);
}

// Answers a repeated call, or a repeated decision, of the committed step.
void Step::HandleRepeated(const Command& command, const CommandId& id) {
  const bool is_published = published_step_ == committed_step_;
  const bool waits_for_disk =
      answers_.is_durable_first() && (!is_published || durable_.in_progress());
  if ((AnsweredWhen(command) == StepAnswer::kPublished && !is_published) || waits_for_disk) {
    answers_.Wait({.command = id, .repeated = true});
  } else {
    answers_.Answer({.command = id, .repeated = true});
  }
}

absl::Status Step::StepNumberError(uint64_t step) const {
  return MakeError(ErrorId::kStep,
                   absl::StrCat("step ", step, "; the committed step is ", committed_step_,
                                ", the next one ", committed_step_ + 1),
                   "steps are numbered from 1 without a gap: go on after the committed one, "
                   "and take up its extra_state");
}

void Step::CopyRequest(Session& session, const Command& command) {
  session.step_being_copied = command;
  io_.actions().Emit(CopyStepRequest{
      .session = session.id,
      .tag = command.tag,
      .arena_offset_bytes = command.arena_offset_bytes,
      .length_bytes = std::min(command.length_bytes, StepHeadBytesMax(*spec_.layout)),
      .presence_words = protocol::PresenceWords(spec_.layout->params().size())});
}

absl::Status Step::CheckCall(const Session& session, const Command& command,
                             const StepRequestCopied& copied) const {
  RETURN_IF_ERROR(CheckStepRequest(command, copied, *spec_.layout, LimitsOf(spec_, session)));
  RETURN_IF_ERROR(CheckDelivered(session.rank, copied.presence));
  const std::optional<uint32_t> detached = members_.FirstDetached();
  return detached ? DetachedError(*detached) : absl::OkStatus();
}

// Checks that the rank has delivered all its elements of every parameter for which its step call reports a gradient.
absl::Status Step::CheckDelivered(uint32_t rank, std::span<const uint64_t> presence) const {
  const protocol::Layout& layout = *spec_.layout;
  for (const protocol::BoxPlace& place : layout.boxes()) {
    if (!protocol::IsPresent(presence, place.box.param)) continue;
    if (!layout.is_shared() && layout.partitions()[place.partition].owner != rank) continue;
    const uint64_t elems = place.box.elems();
    const uint64_t delivered = gradients_.turns().Delivered(
        rank, {place.partition, place.partition_elem, place.partition_elem + elems});
    if (delivered == elems) continue;
    return MakeError(
        ErrorId::kGradPartial,
        absl::StrCat("rank ", layout.WorldRank(rank), " has delivered ", delivered, " of ",
                     layout.is_shared() ? "the " : "its ", elems, " elements of parameter ",
                     layout.spec().params[place.box.param].name, " in step ", committed_step_ + 1));
  }
  return absl::OkStatus();
}

// Checks that, with sharded attachment, either all owners of a parameter have delivered a gradient or none has: gradients are
// reduced over ranks.
absl::Status Step::CheckOwnersDelivered() const {
  const protocol::Layout& layout = *spec_.layout;
  if (layout.is_shared()) return absl::OkStatus();
  const std::pmr::vector<bool> present = ParamsWithGradient();
  for (const protocol::BoxPlace& place : layout.boxes()) {
    const uint32_t param = place.box.param;
    const uint32_t owner = layout.partitions()[place.partition].owner;
    const std::span<const uint64_t> of_owner = barrier_.by_rank().at(owner).presence;
    if (!present[param] || protocol::IsPresent(of_owner, param)) continue;
    return MakeError(
        ErrorId::kGradPartial,
        absl::StrCat("rank ", layout.WorldRank(owner), " has delivered none of its ",
                     place.box.elems(), " elements of parameter ", layout.spec().params[param].name,
                     " in step ", committed_step_ + 1, ", of which other ranks have a gradient"),
        "every rank takes part in the reduction of a gradient and delivers its own part");
  }
  return absl::OkStatus();
}

std::pmr::vector<bool> Step::ParamsWithGradient() const {
  std::pmr::vector<bool> present(spec_.layout->params().size(), false, io_.memory());
  for (const auto& [rank, call] : barrier_.by_rank()) {
    for (uint32_t i = 0; i < present.size(); ++i) {
      if (protocol::IsPresent(call.presence, i)) present[i] = true;
    }
  }
  return present;
}

absl::Status Step::DetachedError(uint32_t rank) const {
  return MakeError(ErrorId::kRankLost,
                   absl::StrCat("rank ", spec_.layout->WorldRank(rank), " of job ", spec_.name,
                                " has detached; the committed step is ", committed_step_),
                   "attach that rank again, then call step again");
}

void Step::OnStepRequest(Session& session, const StepRequestCopied& copied) {
  if (!session.step_being_copied || session.step_being_copied->tag != copied.tag) {
    return;  // the session was fenced, and the call answered, meanwhile
  }
  const Command command = *std::exchange(session.step_being_copied, std::nullopt);
  const bool announces = static_cast<protocol::Op>(command.op) == protocol::Op::kAnnounceStep;
  const absl::Status status =
      announces ? CheckStepRequest(command, copied, *spec_.layout, LimitsOf(spec_, session))
                : CheckCall(session, command, copied);
  if (!status.ok()) {
    io_.Answer(session.IdOf(command), status);
    return;
  }
  if (command.attempt < attempts_.newest()) {
    io_.Answer(session.IdOf(command), announces ? absl::OkStatus() : DroppedError(command.attempt));
    return;
  }
  const auto hyper_end = copied.hyper_params.begin() + copied.request.param_groups;
  StepCall call{.command = session.IdOf(command),
                .answered_when = AnsweredWhen(command),
                .request = copied.request,
                .hyper_params = {copied.hyper_params.begin(), hyper_end, io_.memory()},
                .presence = {copied.presence, io_.memory()},
                .extra_state_offset_bytes = command.arena_offset_bytes + command.length_bytes -
                                            copied.request.extra_state_bytes};
  if (!announces) {
    AddCall(session, std::move(call));
    return;
  }
  Announce(session.rank, std::move(call));
  io_.Answer(session.IdOf(command), absl::OkStatus());
}

void Step::AddCall(Session& session, StepCall call) {
  const absl::Status status = barrier_.Compare(session.rank, call, *spec_.layout);
  if (!status.ok()) {
    io_.Answer(call.command, status);
    RefuseCalls(status);
    return;
  }
  barrier_.Add(session.rank, std::move(call));
  if (barrier_.IsComplete(members_.world_size())) {
    if (const absl::Status missing = CheckOwnersDelivered(); !missing.ok()) {
      RefuseCalls(missing);
      return;
    }
    BeginReducing();
  }
  gradients_.CloseRank(session.rank);
}

// Refuses every step call with `status`. The gradients are retained.
void Step::RefuseCalls(const absl::Status& status, uint16_t flags) {
  for (const auto& [rank, call] : barrier_.Drain()) AnswerCall(call, status, flags);
  gradients_.ReopenRanks();
}

void Step::BeginReducing() {
  phase_ = Phase::kReducing;
  io_.actions().Emit(StepCalled{.job = spec_.id, .step = committed_step_ + 1});
  extra_.Copy(barrier_.by_rank());
}

double Step::ScaleOf(const StepCall& call) const { return call.request.grad_scale / addends(); }

StepOrder Step::OrderOf(const StepCall& call, double scale) const {
  return {.step = committed_step_ + 1,
          .grad_scale = static_cast<float>(scale),
          .grad_min = static_cast<float>(call.request.grad_min),
          .grad_max = static_cast<float>(call.request.grad_max),
          .hyper_params = {call.hyper_params, io_.memory()},
          .params = std::pmr::vector<bool>(io_.memory())};
}

// Prepares or decides the step once everything is added. If the gradients have a fault, the attempt ends. If blocks cannot be
// read, the calls are refused and the gradients are retained, so that another call can try again.
void Step::DecideWhenReduced() {
  const Activities under_way = UnderWay();
  // An attempt with a fault changes no block, and ends during the update of the step before.
  if (!MayBegin(Activity::kDecision, under_way.Without(Activity::kUpdate))) return;
  if (!gradients_.fault().ok()) {
    phase_ = Phase::kOpen;
    DropFaulty();
    trace_.OnRefused();
    return;
  }
  if (!gradients_.reduced() || !MayBegin(Activity::kDecision, under_way)) return;
  if (const absl::Status error = pipeline_.read_ahead().error(); !error.ok()) {
    pipeline_.read_ahead().ForgetErrors();
    if (!nodes_.decision()) {
      phase_ = Phase::kOpen;
      RefuseCalls(error);
      trace_.OnRefused();
      return;
    }
  }
  if (spec_.is_over_nodes() && !nodes_.decision()) {
    Prepare();
  } else {
    Decide();
  }
}

void Step::Decide() {
  const StepCall& call = barrier_.by_rank().begin()->second;
  const auto& of_nodes = nodes_.decision();
  double scale = ScaleOf(call);
  StepAnswers::Decided decided{.overflowed = of_nodes ? of_nodes->head.overflowed : 0};
  if (call.request.max_grad_norm > 0) {
    const double squares = of_nodes ? nodes_.squares() : gradients_.turns().Squares().ToDouble();
    decided.norm = std::sqrt(squares) * std::abs(call.request.grad_scale) / addends();
    const double clip = call.request.max_grad_norm / (decided.norm + kClipEps);
    decided.clipped = clip < 1.0;
    if (decided.clipped) scale *= clip;
  }
  answers_.OnDecided(decided, published_step_);
  trace_.OnCommitted();
  pipeline_.FollowTrace(trace_.committed());
  StepOrder order = OrderOf(call, scale);
  order.params = of_nodes ? nodes_.ParamsWithGradient(io_.memory()) : ParamsWithGradient();
  const bool is_as_announced = announcement_.OnDecided(
      call, decided.clipped ? Announcement::Clipped::kYes : Announcement::Clipped::kNo);
  std::optional<RecordDecision> decision;
  if (spec_.options.keeps_jobs) decision = DecisionOf(order);
  // The sums of a prepared step are recorded already, so the decision is recorded first. Begin() records the sums of other
  // steps, and the decision is recorded after these.
  const bool was_recorded = decision && of_nodes;
  if (was_recorded) io_.actions().Emit(*std::exchange(decision, std::nullopt));
  pipeline_.Begin(std::move(order), is_as_announced);
  if (decision) io_.actions().Emit(*std::move(decision));
  weights_.ForgetUpdated();
  ArmLeaseTimer();
  Commit();
}

// Starts the lease timer if the update waits for a lease. Only readers can have leases at a decision.
void Step::ArmLeaseTimer() {
  if (leases_.count() == 0) return;
  for (uint32_t partition = 0; partition < spec_.layout->partitions().size(); ++partition) {
    if (!pipeline_.queue().Updates(partition) || !leases_.IsLeased(partition)) continue;
    io_.actions().Emit(StartLeaseTimer{.job = spec_.id, .step = committed_step_ + 1});
    return;
  }
}

absl::Status Step::LeasesHeldError(const Session& session, uint64_t step) const {
  std::vector<std::string> names;
  for (const uint32_t partition : leases_.PartitionsOf(session.id)) {
    names.push_back(spec_.layout->PartitionName(partition));
  }
  return MakeError(
      ErrorId::kLease,
      absl::StrCat("rank ", spec_.layout->WorldRank(session.rank), " called step ", step,
                   " with leases on the weights of ", absl::StrJoin(names, ", ")),
      "release every lease before step: the weights change in it");
}

// Commits the step, so that the next step may be gathered. The sums of this step stay in the accumulators until their blocks
// are updated.
void Step::Commit() {
  ++committed_step_;
  io_.set_committed_step(committed_step_);
  phase_ = Phase::kOpen;
  DropGradients(absl::OkStatus());
  attempts_.BeginStep();
  io_.actions().Emit(StepCommitted{.job = spec_.id, .step = committed_step_});
  nodes_.Commit();
  extra_.Commit(barrier_.by_rank());
  for (const auto& [rank, call] : barrier_.Drain()) {
    if (!call.is_answered) answers_.AnswerCommitted(call.command, call.answered_when);
  }
  answers_.AnswerDeciding();
}

void Step::Publish() {
  const uint64_t overflowed = pipeline_.Finish();
  published_step_ = committed_step_;
  if (spec_.options.keeps_jobs) {
    io_.actions().Emit(
        RecordStep{.job = spec_.id, .step = published_step_, .overflowed = overflowed});
  }
  io_.actions().Emit(StepPublished{.job = spec_.id, .step = published_step_});
  answers_.OnPublished(overflowed, published_step_);
  digests_.Begin();
  if (durable_.IsDue(published_step_)) durable_.Begin(PublishedNow());
  if (!answers_.is_durable_first() || !durable_.in_progress()) answers_.AnswerWaiting();
}

DurableSteps::Published Step::PublishedNow() const {
  return {.step = published_step_,
          .run = members_.run(),
          .trace = trace_.committed(),
          .extra_states = extra_.Parts()};
}

bool Step::is_quiet() const {
  for (const auto& [id, session] : members_.all()) {
    if (session.step_being_copied) return false;
  }
  return phase_ == Phase::kOpen && published_step_ == committed_step_ && !is_gathering() &&
         barrier_.by_rank().empty() && !answers_.has_waiting() &&
         (answers_.unreported().ok() || members_.live_ranks() == 0);
}

void Step::OnDurable() {
  if (published_step_ == committed_step_) answers_.AnswerWaiting();
}

absl::Status Step::OnGradientTask(TaskKind kind, const TaskDone& done) {
  if (!done.status.ok()) return done.status;
  gradients_.OnTask(kind, done);
  return absl::OkStatus();
}

Activities Step::UnderWay() const {
  Activities under_way;
  under_way.AddIf(pipeline_.running(), Activity::kUpdate);
  under_way.AddIf(pipeline_.early().has_tasks(), Activity::kEarlyUpdate);
  under_way.AddIf(access_.in_progress(), Activity::kAccess);
  under_way.AddIf(pipeline_.store().is_moving(), Activity::kMove);
  under_way.AddIf(durable_.in_progress(), Activity::kDurableStep);
  under_way.AddIf(durable_.is_restoring(), Activity::kRestore);
  under_way.AddIf(digests_.in_progress(), Activity::kDigests);
  under_way.AddIf(weights_.is_loading(), Activity::kWeightsLoad);
  under_way.AddIf(extra_.is_copying(), Activity::kExtraCopy);
  under_way.AddIf(phase_ == Phase::kReducing, Activity::kCalledStep);
  under_way.AddIf(phase_ == Phase::kPrepared, Activity::kPrepared);
  return under_way;
}

// True if the job can switch to float32 accumulators: no block is being updated from the old accumulators, and no task adds to
// them.
bool Step::MayUseFloatSums() const {
  if (!MayBegin(Activity::kFloatSums, UnderWay())) return false;
  const bool waits = phase_ == Phase::kReducing && gradients_.needs_float_sums();
  return (phase_ == Phase::kOpen || waits) && gradients_.is_idle();
}

void Step::OnFloatSums(std::vector<uint64_t> narrow_offsets) {
  gradients_.OnFloatSums(std::move(narrow_offsets));
}

absl::Status Step::OnExtraStateCopied(const TaskDone& done) {
  extra_.OnCopied();
  return done.status;
}

void Step::Advance(bool may_update_early) {
  if (phase_ == Phase::kFailed) pipeline_.Abandon();
  if (const absl::Status lost = pipeline_.sums().DrainError(); !lost.ok()) gradients_.Fail(lost);
  if (phase_ == Phase::kOpen) DropFaulty();
  if (phase_ != Phase::kFailed) PumpSums();
  PumpGradients();
  if (phase_ != Phase::kFailed) FollowSums();
  if (may_update_early) UpdateEarly();
  if (phase_ == Phase::kReducing) DecideWhenReduced();
  AdvanceUpdate();
  if (pipeline_.sums().has_arrived()) PumpGradients();
}

// Moves pages of gradient sums. Early updates may free frames, unless a norm waits for the sums.
void Step::PumpSums() {
  pipeline_.sums().Pump(pipeline_.early().has_work() && gradients_.norms().empty());
}

void Step::PumpGradients() {
  if (phase_ == Phase::kOpen || phase_ == Phase::kReducing) gradients_.Pump();
}

void Step::AdvanceUpdate() {
  if (phase_ == Phase::kFailed) return;
  pipeline_.Pump();
  PumpSums();
  if (!pipeline_.done()) return;
  if (phase_ == Phase::kMasters) {
    EndMasters();
  } else {
    Publish();
  }
}

bool Step::HasContributed(const Session& session) const {
  return gradients_.turns().has_delivered(session.rank) || barrier_.has(session.rank) ||
         session.step_being_copied;
}

void Step::OnRankDetached(uint32_t rank) {
  gradients_.OnRankDetached(DetachedError(rank));
  RefuseCalls(DetachedError(rank));
}

void Step::OnRankFailed(const Session* lost, const absl::Status& status) {
  if (phase_ != Phase::kOpen) return;
  if (lost != nullptr) gradients_.AnswerSession(lost->id, lost->fence);
  for (const auto& [rank, call] : barrier_.Drain()) {
    const bool is_of_lost = lost != nullptr && call.command.session == lost->id;
    io_.Answer(call.command, is_of_lost ? lost->fence : status);
  }
  io_.NewEpoch();
  DropGradients(status);
  attempts_.BeginGeneration(committed_step_ + 1);
  trace_.OnDropped();
}

void Step::GiveUpAttempt() {
  if (phase_ != Phase::kOpen || gradients_.empty()) return;
  BeginAttempt(
      attempts_.newest() + 1,
      MakeError(ErrorId::kGradDropped,
                absl::StrCat("the gradients of step ", committed_step_ + 1, " of job ", spec_.name,
                             " were dropped: the daemon is being restarted, "
                             "and a rank is not there")));
}

void Step::DropForNewWorld() {
  if (gradients_.empty()) return;
  io_.NewEpoch();
  DropGradients(absl::OkStatus());
}

void Step::OnWorldChanged() {
  FOREBAY_CHECK(phase_ == Phase::kOpen && gradients_.empty() && barrier_.by_rank().empty());
  gradients_.Drop(absl::OkStatus());
  pipeline_.early().ForgetSums();
  announcement_.Reset();
  extra_.OnWorldChanged();
  attempts_.BeginWorld();
}

void Step::AnswerWaiting(Session& session, const absl::Status& status) {
  gradients_.norms().AnswerSession(session.id, status);
  if (session.step_being_copied) io_.Answer(session.IdOf(*session.step_being_copied), status);
  session.step_being_copied.reset();
  std::erase_if(initial_done_, [&](const CommandId& command) {
    if (command.session != session.id) return false;
    io_.Answer(command, status);
    return true;
  });
}

void Step::Fail(const absl::Status& first_error) {
  phase_ = Phase::kFailed;
  io_.NewEpoch();
  for (const auto& [rank, call] : barrier_.Drain()) AnswerCall(call, first_error);
  answers_.Fail(first_error);
  gradients_.Drop(first_error);
}

uint64_t Step::FetchStep(std::optional<uint32_t> rank) const {
  const bool has_called = rank && (phase_ != Phase::kOpen || barrier_.has(*rank));
  return committed_step_ + (has_called ? 1 : 0);
}

bool Step::MayFetch(std::optional<uint32_t> rank, uint32_t partition) const {
  if (phase_ == Phase::kMasters) return true;
  if (!rank) return published_step_ == committed_step_;
  if (phase_ == Phase::kReducing || prepared_step() > 0 || barrier_.has(*rank)) return false;
  return pipeline_.queue().IsPartitionDone(partition);
}

uint64_t Step::unanswered(const Session& session) const {
  uint64_t count = session.step_being_copied ? 1 : 0;
  for (const CommandId& command : initial_done_) count += command.session == session.id ? 1 : 0;
  for (const auto& [rank, call] : barrier_.by_rank()) {
    count += call.command.session == session.id && !call.is_answered ? 1 : 0;
  }
  return count + answers_.unanswered(session.id) + gradients_.unanswered(session.id);
}

void Step::CheckInvariants() const {
  gradients_.CheckInvariants();
  pipeline_.CheckInvariants(committed_step_);
  // The numbers are those of the list of invariants in step.h.
  // 1
  FOREBAY_CHECK(committed_step_ - published_step_ <= 1);
  // 2
  const bool updating = phase_ == Phase::kMasters || published_step_ < committed_step_;
  const bool updates = pipeline_.running() || is_to_be_resumed_;
  FOREBAY_CHECK(updating == updates || phase_ == Phase::kFailed);
  // 3
  FOREBAY_CHECK(!updating || !access_.in_progress());
  // 4
  const bool waits = updating || (answers_.is_durable_first() && durable_.in_progress());
  FOREBAY_CHECK(waits || !answers_.has_waiting());
}

}  // namespace forebay::daemon
