// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/step/step.h"

#include <cmath>
#include <optional>
#include <span>
#include <utility>

#include "cpu_adam/square_sum.h"
#include "protocol/os/check.h"
#include "protocol/step_summary.h"

namespace forebay::daemon {

Step::Step(const JobSpec& spec, JobTasks& io, Membership& members, StepPipeline& pipeline,
           DurableSteps& durable, const StateAccess& access, WeightsCache& weights,
           const LeaseTable& leases)
    : parts_(spec, io, members, pipeline, durable),
      access_(access),
      weights_(weights),
      leases_(leases),
      gathering_(parts_),
      nodes_(parts_, gathering_),
      commands_(parts_, gathering_, nodes_, leases),
      is_to_be_resumed_(!parts_.is_published()) {}

void Step::Resume(const KeptUpdate& update) {
  if (update.prepared) return nodes_.Resume(update);
  parts_.pipeline.Resume(update);
  is_to_be_resumed_ = false;
  parts_.answers.OnResumed();
}

// ----------------------------------------------------------------------------------------- masters

void Step::BeginMasters(std::vector<CommandId> commands, bool has_masters) {
  initial_done_ = std::move(commands);
  if (!has_masters && parts_.pipeline.BeginMasters()) {
    parts_.phase = Phase::kMasters;
  } else {
    AnswerInitialDone();
  }
}

void Step::AnswerInitialDone() {
  for (const CommandId& command : std::exchange(initial_done_, {})) {
    parts_.io.Answer(command, absl::OkStatus());
  }
}

void Step::EndMasters() {
  parts_.pipeline.Finish();
  parts_.phase = Phase::kOpen;
  parts_.io.actions().Emit(StepPublished{.job = parts_.spec.id, .step = 0});
  AnswerInitialDone();
}

// ---------------------------------------------------------------------------------------- decision

// Prepares or decides the step once everything is added. If the gradients have a fault, the attempt ends. If blocks cannot be
// read, the calls are refused and the gradients are retained, so that another call can try again.
void Step::DecideWhenReduced() {
  const Activities under_way = UnderWay();
  // An attempt with a fault changes no block, and ends during the update of the step before.
  if (!MayBegin(Activity::kDecision, under_way.Without(Activity::kUpdate))) return;
  if (!parts_.gradients.fault().ok()) {
    parts_.phase = Phase::kOpen;
    gathering_.DropFaulty();
    parts_.trace.OnRefused();
    return;
  }
  if (!parts_.gradients.reduced() || !MayBegin(Activity::kDecision, under_way)) return;
  ReadAhead& read_ahead = parts_.pipeline.read_ahead();
  if (const absl::Status error = read_ahead.error(); !error.ok()) {
    read_ahead.ForgetErrors();
    if (!nodes_.decision()) {
      parts_.phase = Phase::kOpen;
      gathering_.RefuseCalls(error);
      parts_.trace.OnRefused();
      return;
    }
  }
  if (parts_.spec.is_over_nodes() && !nodes_.decision()) {
    nodes_.Prepare();
  } else {
    Decide();
  }
}

void Step::Decide() {
  constexpr double kClipEps = 1e-6;  // the value in torch.nn.utils.clip_grad_norm_
  const StepCall& call = parts_.barrier.by_rank().begin()->second;
  const auto& of_nodes = nodes_.decision();
  double scale = parts_.ScaleOf(call);
  StepAnswers::Decided decided{.overflowed = of_nodes ? of_nodes->head.overflowed : 0};
  if (call.request.max_grad_norm > 0) {
    const auto squares = of_nodes ? cpu_adam::SquareSum::FromDigits(of_nodes->head.squares)
                                  : parts_.gradients.turns().Squares();
    decided.norm =
        std::sqrt(squares.ToDouble()) * std::abs(call.request.grad_scale) / parts_.addends();
    const double clip = call.request.max_grad_norm / (decided.norm + kClipEps);
    decided.clipped = clip < 1.0;
    if (decided.clipped) scale *= clip;
  }
  parts_.answers.OnDecided(decided, parts_.published_step);
  parts_.trace.OnCommitted();
  parts_.pipeline.FollowTrace(parts_.trace.committed());
  StepOrder order = parts_.OrderOf(call, scale);
  // The calls of a step that the previous daemon has prepared have no presence: the nodes' decision has it.
  const std::pmr::vector<uint64_t> present =
      of_nodes ? std::pmr::vector<uint64_t>(of_nodes->present.begin(), of_nodes->present.end(),
                                            parts_.io.memory())
               : parts_.Presence();
  for (uint32_t param = 0; param < parts_.spec.layout->params().size(); ++param) {
    order.params.push_back(protocol::IsPresent(present, param));
  }
  const bool is_as_announced = parts_.announcement.OnDecided(
      call, decided.clipped ? Announcement::Clipped::kYes : Announcement::Clipped::kNo);
  std::optional<RecordDecision> decision;
  if (parts_.spec.options.keeps_jobs) decision = DecisionOf(order);
  // The sums of a prepared step are recorded already, so the decision is recorded first. Begin() records the sums of other
  // steps, and the decision is recorded after these.
  const bool was_recorded = decision && of_nodes;
  if (was_recorded) parts_.io.actions().Emit(*std::exchange(decision, std::nullopt));
  parts_.pipeline.Begin(std::move(order), is_as_announced);
  if (decision) parts_.io.actions().Emit(*std::move(decision));
  weights_.ForgetUpdated();
  ArmLeaseTimer();
  Commit();
}

RecordDecision Step::DecisionOf(const StepOrder& order) const {
  const std::vector<uint64_t>& updates = parts_.pipeline.terms().updates();
  const std::vector<uint32_t>& trace = parts_.trace.committed();
  std::pmr::memory_resource* const memory = parts_.io.memory();
  RecordDecision record{.job = parts_.spec.id,
                        .step = order.step,
                        .order = order.CopyIn(memory),
                        .param_updates = {updates.begin(), updates.end(), memory},
                        .trace = {trace.begin(), trace.end(), memory},
                        .extra_states = parts_.extra.NextParts(parts_.barrier.by_rank()),
                        .norm = parts_.answers.norm(),
                        .clipped = parts_.answers.clipped(),
                        .overflowed = parts_.answers.overflow_to_report()};
  if (parts_.spec.plan.uses_float_sums) record.float_sums = parts_.spec.plan.float_sums_part();
  if (nodes_.decision()) record.summary = protocol::EncodeStepSummary(*nodes_.decision());
  for (uint32_t param = 0; param < order.params.size(); ++param) {
    if (order.params[param]) ++record.param_updates[param];
  }
  return record;
}

// Starts the lease timer if the update waits for a lease. Only readers can have leases at a decision.
void Step::ArmLeaseTimer() {
  if (leases_.count() == 0) return;
  for (uint32_t partition = 0; partition < parts_.spec.layout->partitions().size(); ++partition) {
    if (!parts_.pipeline.queue().Updates(partition) || !leases_.IsLeased(partition)) continue;
    parts_.io.actions().Emit(StartLeaseTimer{.job = parts_.spec.id, .step = parts_.next_step()});
    return;
  }
}

// Commits the step, so that the next step may be gathered. The sums of this step stay in the accumulators until their blocks
// are updated.
void Step::Commit() {
  ++parts_.committed_step;
  parts_.io.set_committed_step(parts_.committed_step);
  parts_.phase = Phase::kOpen;
  gathering_.Commit();
  parts_.io.actions().Emit(StepCommitted{.job = parts_.spec.id, .step = parts_.committed_step});
  nodes_.Commit();
  parts_.extra.Commit(parts_.barrier.by_rank());
  for (const auto& [rank, call] : parts_.barrier.Drain()) {
    if (!call.is_answered) parts_.answers.AnswerCommitted(call.command, call.answered_when);
  }
  parts_.answers.AnswerDeciding();
}

void Step::Publish() {
  const uint64_t overflowed = parts_.pipeline.Finish();
  const uint64_t step = parts_.published_step = parts_.committed_step;
  const JobId job = parts_.spec.id;
  if (parts_.spec.options.keeps_jobs) {
    parts_.io.actions().Emit(RecordStep{.job = job, .step = step, .overflowed = overflowed});
  }
  parts_.io.actions().Emit(StepPublished{.job = job, .step = step});
  parts_.answers.OnPublished(overflowed, step);
  parts_.digests.Begin();
  if (parts_.durable.IsDue(step)) parts_.durable.Begin(PublishedNow());
  if (!parts_.is_awaiting_durable()) parts_.answers.AnswerWaiting();
}

void Step::OnDurable() {
  if (parts_.is_published()) parts_.answers.AnswerWaiting();
}

DurableSteps::Published Step::PublishedNow() const {
  return {.step = parts_.published_step,
          .run = parts_.members.run(),
          .trace = parts_.trace.committed(),
          .extra_states = parts_.extra.Parts()};
}

void Step::Record(KeptMemory& kept, bool is_last) {
  const StepAnswers& answers = parts_.answers;
  kept.attempt = gathering_.Record();
  kept.norm = answers.norm();
  kept.clipped = answers.clipped();
  // The next daemon reports an overflow. Only the last record knows whether this daemon has reported it.
  if (!is_last || !answers.unreported().ok()) kept.overflowed = answers.overflowed();
  kept.summary = nodes_.EncodeLast();
}

// ----------------------------------------------------------------------------------------- advance

void Step::Advance(bool may_update_early) {
  if (phase() == Phase::kFailed) return parts_.pipeline.Abandon();
  gathering_.Advance(may_update_early);
  if (phase() == Phase::kReducing) DecideWhenReduced();
  AdvanceUpdate();
  if (parts_.pipeline.sums().has_arrived()) gathering_.Pump();
}

void Step::AdvanceUpdate() {
  if (phase() == Phase::kFailed) return;
  parts_.pipeline.Pump();
  gathering_.PumpSums();
  if (!parts_.pipeline.done()) return;
  if (phase() == Phase::kMasters) {
    EndMasters();
  } else {
    Publish();
  }
}

void Step::AnswerWaiting(Session& session, const absl::Status& status) {
  parts_.gradients.norms().AnswerSession(session.id, status);
  if (session.step_being_copied) {
    parts_.io.Answer(session.IdOf(*std::exchange(session.step_being_copied, {})), status);
  }
  std::erase_if(initial_done_, [&](const CommandId& command) {
    if (command.session != session.id) return false;
    parts_.io.Answer(command, status);
    return true;
  });
}

void Step::Fail(const absl::Status& first_error) {
  parts_.phase = Phase::kFailed;
  parts_.io.NewEpoch();
  gathering_.RefuseCalls(first_error);
  parts_.answers.Fail(first_error);
  parts_.gradients.Drop(first_error);
}

// --------------------------------------------------------------------------------------- questions

Activities Step::UnderWay() const {
  const StepPipeline& pipeline = parts_.pipeline;
  Activities under_way;
  under_way.AddIf(pipeline.running(), Activity::kUpdate);
  under_way.AddIf(pipeline.early().has_tasks(), Activity::kEarlyUpdate);
  under_way.AddIf(access_.in_progress(), Activity::kAccess);
  under_way.AddIf(pipeline.store().is_moving(), Activity::kMove);
  under_way.AddIf(parts_.durable.in_progress(), Activity::kDurableStep);
  under_way.AddIf(parts_.durable.is_restoring(), Activity::kRestore);
  under_way.AddIf(parts_.digests.in_progress(), Activity::kDigests);
  under_way.AddIf(weights_.is_loading(), Activity::kWeightsLoad);
  under_way.AddIf(parts_.extra.is_copying(), Activity::kExtraCopy);
  under_way.AddIf(phase() == Phase::kReducing, Activity::kCalledStep);
  under_way.AddIf(phase() == Phase::kPrepared, Activity::kPrepared);
  return under_way;
}

bool Step::MayUseFloatSums() const {
  if (!MayBegin(Activity::kFloatSums, UnderWay())) return false;
  const bool waits = phase() == Phase::kReducing && parts_.gradients.needs_float_sums();
  return (phase() == Phase::kOpen || waits) && parts_.gradients.is_idle();
}

bool Step::is_quiet() const {
  for (const auto& [id, session] : parts_.members.all()) {
    if (session.step_being_copied) return false;
  }
  return phase() == Phase::kOpen && parts_.is_published() && !parts_.is_gathering() &&
         parts_.barrier.by_rank().empty() && !parts_.answers.has_waiting() &&
         (parts_.answers.unreported().ok() || parts_.members.live_ranks() == 0);
}

uint64_t Step::unanswered(const Session& session) const {
  uint64_t count = session.step_being_copied ? 1 : 0;
  for (const CommandId& command : initial_done_) count += command.session == session.id ? 1 : 0;
  for (const auto& [rank, call] : parts_.barrier.by_rank()) {
    count += call.command.session == session.id && !call.is_answered ? 1 : 0;
  }
  return count + parts_.answers.unanswered(session.id) + parts_.gradients.unanswered(session.id);
}

void Step::CheckInvariants() const {
  parts_.gradients.CheckInvariants();
  parts_.pipeline.CheckInvariants(committed_step());
  // The numbers are those of the list of invariants in step.h.
  // 1
  FOREBAY_CHECK(committed_step() - published_step() <= 1);
  // 2
  const bool updating = phase() == Phase::kMasters || !parts_.is_published();
  const bool updates = parts_.pipeline.running() || is_to_be_resumed_;
  FOREBAY_CHECK(updating == updates || phase() == Phase::kFailed);
  // 3
  FOREBAY_CHECK(!updating || !access_.in_progress());
  // 4
  FOREBAY_CHECK(updating || parts_.is_awaiting_durable() || !parts_.answers.has_waiting());
}

}  // namespace forebay::daemon
