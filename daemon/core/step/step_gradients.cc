// SPDX-License-Identifier: Apache-2.0
// The part of a step that takes gradients and requests for their norms.

#include <cstdint>
#include <optional>

#include "absl/strings/str_cat.h"
#include "daemon/core/step/step.h"
#include "protocol/error.h"

namespace forebay::daemon {

using protocol::Command;
using protocol::ErrorId;
using protocol::MakeError;

void Step::HandleGradient(Session& session, const Command& command) {
  const CommandId id = session.IdOf(command);
  if (HasTaken(session, command)) {
    io_.Answer(id, absl::OkStatus());
    return;
  }
  if (command.step != committed_step_ + 1) {
    io_.Answer(
        id, MakeError(ErrorId::kStep,
                      absl::StrCat("a gradient for step ", command.step, "; the committed step is ",
                                   committed_step_, ", the next one ", committed_step_ + 1)));
    return;
  }
  if (phase_ != Phase::kOpen || barrier_.has(session.rank) || session.step_being_copied) {
    io_.Answer(id, MakeError(ErrorId::kStep,
                             absl::StrCat("rank ", spec_.layout->WorldRank(session.rank),
                                          " has called step ", command.step,
                                          " already; its gradient for partition ",
                                          command.partition, " comes too late"),
                             "deliver every gradient of a step before calling step"));
    return;
  }
  const absl::Status status = attempts_.Check(session.rank, command);
  if (!status.ok()) {
    io_.Answer(id, status);
    return;
  }
  if (command.attempt < attempts_.newest()) {
    io_.Answer(id, absl::OkStatus());  // discards the gradient: the rank's step call gets the error
    return;
  }
  FollowAttempt(session, command);
  if (gradients_.turns().ranks()[session.rank].has_asked) {
    io_.Answer(id, MakeError(ErrorId::kStep,
                             absl::StrCat("rank ", spec_.layout->WorldRank(session.rank),
                                          " has asked for a norm in step ", command.step,
                                          ": its gradient for partition ", command.partition,
                                          " comes too late"),
                             "deliver every gradient of a step before asking for norms"));
    return;
  }
  if (gradients_.empty()) attempts_.RecordOpen(attempts_.newest() + 1, committed_step_ + 1);
  gradients_.Deliver(command.step, {.range = RangeOf(command),
                                    .turn = {.pass = command.kind, .rank = session.rank},
                                    .arena_offset_bytes = command.arena_offset_bytes,
                                    .grad_arena_bytes = session.request.grad_arena_bytes,
                                    .command = id});
}

// True if a repeated command was handled before, so that only its answer was lost. The commands of a rank arrive in order: if
// its step call has arrived, all earlier commands were handled.
bool Step::HasTaken(const Session& session, const Command& command) const {
  if (!session.WasSentAgain(command)) return false;
  if (command.step <= committed_step_) return true;
  if (command.attempt != attempts_.newest()) return false;
  if (HasCalled(session)) return true;
  if (static_cast<protocol::Op>(command.op) != protocol::Op::kGradReady) return false;
  return gradients_.HasTaken({.pass = command.kind, .rank = session.rank}, RangeOf(command));
}

SumPages::Range Step::RangeOf(const Command& command) const {
  const uint64_t elems = command.length_bytes / protocol::SizeBytes(spec_.layout->grad_dtype());
  return {command.partition, command.element_offset, command.element_offset + elems};
}

void Step::HandleGradNorm(Session& session, const Command& command) {
  const CommandId id = session.IdOf(command);
  if (HasCalled(session)) {
    io_.Answer(id, MakeError(ErrorId::kStep,
                             absl::StrCat("rank ", spec_.layout->WorldRank(session.rank),
                                          " has called step ", committed_step_ + 1,
                                          ": its gradients are the step's"),
                             "ask for norms before step"));
    return;
  }
  if (command.attempt < attempts_.newest()) {
    io_.Answer(id, DroppedError(command.attempt));
    return;
  }
  if (const absl::Status status = attempts_.Check(session.rank, command); !status.ok()) {
    io_.Answer(id, status);
    return;
  }
  const std::optional<uint32_t> detached = members_.FirstDetached();
  if (spec_.layout->is_shared() && detached) {
    io_.Answer(id, DetachedError(*detached));
    return;
  }
  FollowAttempt(session, command);
  gradients_.AskNorm(id, session.rank, command.partition);
}

}  // namespace forebay::daemon
