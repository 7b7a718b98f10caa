// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/step/step_commands.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "protocol/error.h"
#include "protocol/layout.h"
#include "protocol/os/status_macros.h"
#include "protocol/step_summary.h"

namespace forebay::daemon {
namespace {

using protocol::Command;
using protocol::ErrorId;
using protocol::MakeError;
using protocol::Op;
using protocol::StepAnswer;
using protocol::StepDecision;
using protocol::StepSummary;

StepAnswer AnsweredWhen(const Command& call) { return static_cast<StepAnswer>(call.kind); }

// Maximum bytes of a request's header, hyper-parameters and presence, without its extra_state.
uint64_t StepHeadBytesMax(const protocol::Layout& layout) {
  return sizeof(protocol::StepRequest) + layout.param_group_rows() * sizeof(protocol::HyperParams) +
         protocol::PresenceBytes(layout.params().size());
}

// Returns the command of the session whose body was copied. nullopt if the session no longer waits for the copy.
std::optional<Command> DrainCopied(Session& session, uint64_t tag) {
  const bool waits = session.step_being_copied && session.step_being_copied->tag == tag;
  return waits ? std::exchange(session.step_being_copied, std::nullopt) : std::nullopt;
}

}  // namespace

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

void StepCommands::Answer(const Session& session, const Command& command,
                          const absl::Status& status) const {
  step_.io.Answer(session.IdOf(command), status);
}

// --------------------------------------------------------------------------------------- gradients

void StepCommands::HandleGradient(Session& session, const Command& command) {
  if (HasTaken(session, command)) return Answer(session, command, absl::OkStatus());
  if (command.step != step_.next_step()) {
    return Answer(
        session, command,
        MakeError(ErrorId::kStep,
                  absl::StrCat("a gradient for step ", command.step, "; the committed step is ",
                               step_.committed_step, ", the next one ", step_.next_step())));
  }
  if (step_.HasCalled(session)) {
    return Answer(session, command,
                  CalledError(session,
                              absl::StrCat(" already; its gradient for partition ",
                                           command.partition, " comes too late"),
                              "deliver every gradient of a step before calling step"));
  }
  const absl::Status status = gathering_.CheckAttempt(session, command);
  if (!status.ok() || command.attempt < gathering_.attempt()) {
    return Answer(session, command, status);
  }
  gathering_.FollowAttempt(session, command);
  if (step_.gradients.turns().ranks()[session.rank].has_asked) {
    return Answer(session, command,
                  MakeError(ErrorId::kStep,
                            absl::StrCat("rank ", step_.spec.layout->WorldRank(session.rank),
                                         " has asked for a norm in step ", command.step,
                                         ": its gradient for partition ", command.partition,
                                         " comes too late"),
                            "deliver every gradient of a step before asking for norms"));
  }
  gathering_.RecordNext();
  step_.gradients.Deliver(command.step, {.range = RangeOf(command),
                                         .turn = {.pass = command.kind, .rank = session.rank},
                                         .arena_offset_bytes = command.arena_offset_bytes,
                                         .grad_arena_bytes = session.request.grad_arena_bytes,
                                         .command = session.IdOf(command)});
}

// True if a repeated command was handled before, so that only its answer was lost. The commands of a rank arrive in order: if
// its step call has arrived, all earlier commands were handled.
bool StepCommands::HasTaken(const Session& session, const Command& command) const {
  if (!session.WasSentAgain(command)) return false;
  if (command.step <= step_.committed_step) return true;
  if (command.attempt != gathering_.attempt()) return false;
  if (step_.HasCalled(session)) return true;
  if (static_cast<Op>(command.op) != Op::kGradReady) return false;
  return step_.gradients.HasTaken({.pass = command.kind, .rank = session.rank}, RangeOf(command));
}

SumPages::Range StepCommands::RangeOf(const Command& command) const {
  const uint64_t elems =
      command.length_bytes / protocol::SizeBytes(step_.spec.layout->grad_dtype());
  return {command.partition, command.element_offset, command.element_offset + elems};
}

void StepCommands::HandleGradNorm(Session& session, const Command& command) {
  if (step_.HasCalled(session)) {
    return Answer(
        session, command,
        CalledError(session, ": its gradients are the step's", "ask for norms before step"));
  }
  const absl::Status status = command.attempt < gathering_.attempt()
                                  ? gathering_.DroppedError(command.attempt)
                                  : gathering_.CheckAttempt(session, command);
  if (!status.ok()) return Answer(session, command, status);
  const std::optional<uint32_t> detached = step_.members.FirstDetached();
  if (step_.spec.layout->is_shared() && detached) {
    return Answer(session, command, step_.DetachedError(*detached));
  }
  gathering_.FollowAttempt(session, command);
  step_.gradients.AskNorm(session.IdOf(command), session.rank, command.partition);
}

void StepCommands::HandleAnnouncement(Session& session, const Command& command) {
  if (HasTaken(session, command)) return Answer(session, command, absl::OkStatus());
  if (command.step != step_.next_step()) {
    return Answer(session, command, StepNumberError(command.step));
  }
  if (step_.HasCalled(session)) {
    return Answer(session, command,
                  CalledError(session, " already, and announces its scalars",
                              "announce them before the last backward pass"));
  }
  const absl::Status status = gathering_.CheckAttempt(session, command);
  if (!status.ok() || command.attempt < gathering_.attempt()) {
    return Answer(session, command, status);
  }
  gathering_.FollowAttempt(session, command);
  CopyRequest(session, command);
}

// --------------------------------------------------------------------------------- the step's call

void StepCommands::HandleStep(Session& session, const Command& command) {
  if (command.step != 0 && command.step == step_.committed_step) {
    return HandleRepeated(session, command);
  }
  if (command.step != step_.next_step()) {
    return Answer(session, command, StepNumberError(command.step));
  }
  if (step_.prepared_step() > 0 && command.attempt == gathering_.attempt()) {
    return nodes_.AnswerPrepared(session, session.IdOf(command));
  }
  if (step_.HasCalled(session)) {
    return Answer(session, command,
                  CalledError(session, " already and waits for the other ranks",
                              "wait for the answer to the first call"));
  }
  if (leases_.count_of(session.id) > 0) {
    return Answer(session, command, LeasesHeldError(session, command.step));
  }
  const absl::Status status = command.attempt < gathering_.attempt()
                                  ? gathering_.DroppedError(command.attempt)
                                  : gathering_.CheckAttempt(session, command);
  if (!status.ok()) return Answer(session, command, status);
  gathering_.FollowAttempt(session, command);
  CopyRequest(session, command);
}

// Answers a repeated call, or a repeated decision, of the committed step.
void StepCommands::HandleRepeated(const Session& session, const Command& command) {
  const StepAnswers::Call call = {.command = session.IdOf(command), .repeated = true};
  const bool waits_for_disk =
      step_.answers.is_durable_first() && (!step_.is_published() || step_.durable.in_progress());
  const bool waits_for_update =
      AnsweredWhen(command) == StepAnswer::kPublished && !step_.is_published();
  if (waits_for_update || waits_for_disk) {
    step_.answers.Wait(call);
  } else {
    step_.answers.Answer(call);
  }
}

void StepCommands::CopyRequest(Session& session, const Command& command) {
  session.step_being_copied = command;
  step_.io.actions().Emit(CopyStepRequest{
      .session = session.id,
      .tag = command.tag,
      .arena_offset_bytes = command.arena_offset_bytes,
      .length_bytes = std::min(command.length_bytes, StepHeadBytesMax(*step_.spec.layout)),
      .presence_words = protocol::PresenceWords(step_.spec.layout->params().size())});
}

void StepCommands::OnStepRequest(Session& session, const StepRequestCopied& copied) {
  const std::optional<Command> waiting = DrainCopied(session, copied.tag);
  if (!waiting) return;
  const Command& command = *waiting;
  const bool announces = static_cast<Op>(command.op) == Op::kAnnounceStep;
  const absl::Status status = announces ? CheckStepRequest(command, copied, *step_.spec.layout,
                                                           LimitsOf(step_.spec, session))
                                        : CheckCall(session, command, copied);
  if (!status.ok()) return Answer(session, command, status);
  if (command.attempt < gathering_.attempt()) {
    return Answer(session, command,
                  announces ? absl::OkStatus() : gathering_.DroppedError(command.attempt));
  }
  const auto hyper_end = copied.hyper_params.begin() + copied.request.param_groups;
  StepCall call{.command = session.IdOf(command),
                .answered_when = AnsweredWhen(command),
                .request = copied.request,
                .hyper_params = {copied.hyper_params.begin(), hyper_end, step_.io.memory()},
                .presence = {copied.presence, step_.io.memory()},
                .extra_state_offset_bytes = command.arena_offset_bytes + command.length_bytes -
                                            copied.request.extra_state_bytes};
  if (!announces) return AddCall(session, std::move(call));
  gathering_.Announce(session.rank, std::move(call));
  Answer(session, command, absl::OkStatus());
}

// Adds a checked call. The call of the last rank begins Phase::kReducing.
void StepCommands::AddCall(Session& session, StepCall call) {
  const absl::Status status = step_.barrier.Compare(session.rank, call, *step_.spec.layout);
  if (!status.ok()) {
    step_.io.Answer(call.command, status);
    return gathering_.RefuseCalls(status);
  }
  step_.barrier.Add(session.rank, std::move(call));
  if (step_.barrier.IsComplete(step_.members.world_size())) {
    if (const absl::Status missing = CheckOwnersDelivered(); !missing.ok()) {
      return gathering_.RefuseCalls(missing);
    }
    step_.phase = StepPhase::kReducing;
    step_.io.actions().Emit(StepCalled{.job = step_.spec.id, .step = step_.next_step()});
    step_.extra.Copy(step_.barrier.by_rank());
  }
  step_.gradients.CloseRank(session.rank);
}

absl::Status StepCommands::CheckCall(const Session& session, const Command& command,
                                     const StepRequestCopied& copied) const {
  RETURN_IF_ERROR(
      CheckStepRequest(command, copied, *step_.spec.layout, LimitsOf(step_.spec, session)));
  RETURN_IF_ERROR(CheckDelivered(session.rank, copied.presence));
  const std::optional<uint32_t> detached = step_.members.FirstDetached();
  return detached ? step_.DetachedError(*detached) : absl::OkStatus();
}

// Checks that the rank has delivered all its elements of every parameter for which its step call reports a gradient.
absl::Status StepCommands::CheckDelivered(uint32_t rank, std::span<const uint64_t> presence) const {
  const protocol::Layout& layout = *step_.spec.layout;
  for (const protocol::BoxPlace& place : layout.boxes()) {
    if (!protocol::IsPresent(presence, place.box.param)) continue;
    if (!layout.is_shared() && layout.partitions()[place.partition].owner != rank) continue;
    const uint64_t elems = place.box.elems();
    const uint64_t delivered = step_.gradients.turns().Delivered(
        rank, {place.partition, place.partition_elem, place.partition_elem + elems});
    if (delivered == elems) continue;
    return MakeError(
        ErrorId::kGradPartial,
        absl::StrCat("rank ", layout.WorldRank(rank), " has delivered ", delivered, " of ",
                     layout.is_shared() ? "the " : "its ", elems, " elements of parameter ",
                     layout.spec().params[place.box.param].name, " in step ", step_.next_step()));
  }
  return absl::OkStatus();
}

// Checks that, with sharded attachment, either all owners of a parameter have delivered a gradient or none has: gradients are
// reduced over ranks.
absl::Status StepCommands::CheckOwnersDelivered() const {
  const protocol::Layout& layout = *step_.spec.layout;
  if (layout.is_shared()) return absl::OkStatus();
  const std::pmr::vector<uint64_t> present = step_.Presence();
  for (const protocol::BoxPlace& place : layout.boxes()) {
    const uint32_t param = place.box.param;
    const uint32_t owner = layout.partitions()[place.partition].owner;
    const std::span<const uint64_t> of_owner = step_.barrier.by_rank().at(owner).presence;
    if (!protocol::IsPresent(present, param) || protocol::IsPresent(of_owner, param)) continue;
    return MakeError(
        ErrorId::kGradPartial,
        absl::StrCat("rank ", layout.WorldRank(owner), " has delivered none of its ",
                     place.box.elems(), " elements of parameter ", layout.spec().params[param].name,
                     " in step ", step_.next_step(), ", of which other ranks have a gradient"),
        "every rank takes part in the reduction of a gradient and delivers its own part");
  }
  return absl::OkStatus();
}

void StepCommands::HandleDecision(Session& session, const Command& command) {
  if (!step_.spec.is_over_nodes()) {
    return Answer(session, command,
                  MakeError(ErrorId::kUnsupported,
                            absl::StrCat("a decision of several nodes on step ", command.step,
                                         " of job ", step_.spec.name, ", which is on one")));
  }
  if (command.step != 0 && command.step == step_.committed_step) {
    return HandleRepeated(session, command);
  }
  if (command.step != step_.next_step() || session.step_being_copied) {
    return Answer(session, command, StepNumberError(command.step));
  }
  session.step_being_copied = command;
  step_.io.actions().Emit(
      CopySummary{.session = session.id,
                  .tag = command.tag,
                  .arena_offset_bytes = step_.spec.plan.summary_offset(*step_.spec.layout),
                  .bytes = protocol::StepSummaryBytes(step_.spec.layout->params().size())});
}

void StepCommands::OnSummary(Session& session, const SummaryCopied& copied) {
  const std::optional<Command> command = DrainCopied(session, copied.tag);
  if (!command) return;
  absl::StatusOr<StepSummary> summary =
      protocol::DecodeStepSummary(copied.bytes, step_.spec.layout->params().size());
  const absl::Status status = summary.ok() ? nodes_.Check(*command, *summary) : summary.status();
  if (!status.ok()) return Answer(session, *command, status);
  const StepDecision decision = summary->head.decision;
  if (decision == StepDecision::kCommit) {
    step_.answers.AddDeciding(session.IdOf(*command), AnsweredWhen(*command));
    return nodes_.Decide(*std::move(summary));
  }
  if (step_.prepared_step() > 0 && command->attempt == gathering_.attempt()) {
    nodes_.GiveUp(decision);
  } else if (step_.phase == StepPhase::kOpen && decision == StepDecision::kWithdraw) {
    gathering_.RefuseCalls(
        MakeError(ErrorId::kStep,
                  absl::StrCat("rank ", step_.spec.layout->WorldRank(session.rank),
                               " of this node met an error and does not call step ", command->step,
                               " of job ", step_.spec.name, " now"),
                  "see what that rank says; call step again: the gradients are kept"),
        protocol::kStepWithdrawn);
  }
  Answer(session, *command, absl::OkStatus());
}

absl::Status StepCommands::CalledError(const Session& session, const std::string& then,
                                       std::string_view hint) const {
  return MakeError(ErrorId::kStep,
                   absl::StrCat("rank ", step_.spec.layout->WorldRank(session.rank),
                                " has called step ", step_.next_step(), then),
                   hint);
}

absl::Status StepCommands::LeasesHeldError(const Session& session, uint64_t step) const {
  std::vector<std::string> names;
  for (const uint32_t partition : leases_.PartitionsOf(session.id)) {
    names.push_back(step_.spec.layout->PartitionName(partition));
  }
  return MakeError(
      ErrorId::kLease,
      absl::StrCat("rank ", step_.spec.layout->WorldRank(session.rank), " called step ", step,
                   " with leases on the weights of ", absl::StrJoin(names, ", ")),
      "release every lease before step: the weights change in it");
}

absl::Status StepCommands::StepNumberError(uint64_t step) const {
  return MakeError(ErrorId::kStep,
                   absl::StrCat("step ", step, "; the committed step is ", step_.committed_step,
                                ", the next one ", step_.next_step()),
                   "steps are numbered from 1 without a gap: go on after the committed one, "
                   "and take up its extra_state");
}

}  // namespace forebay::daemon
