// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/job/job_commands.h"

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/core/base/job_name.h"
#include "daemon/core/sessions/command_check.h"
#include "protocol/error.h"
#include "protocol/os/check.h"

namespace forebay::daemon {

using protocol::Command;
using protocol::ErrorId;
using protocol::MakeError;
using protocol::Op;

namespace {

bool NeedsRank(Op op) {
  return op == Op::kWriteInitial || op == Op::kInitialDone || op == Op::kGradReady ||
         op == Op::kStep || op == Op::kWriteState || op == Op::kWriteUpdates ||
         op == Op::kGradNorm || op == Op::kAnnounceStep || op == Op::kDecide || op == Op::kGoBack;
}

}  // namespace

void JobCommands::OnCommand(SessionId id, const Command& command) {
  Session* session = job_.members.Find(id);
  if (session == nullptr || session->state != Session::State::kAttached || !session->mapped) return;
  if (stop_.is_quiescent()) return;  // the client sends the command to the next daemon
  if (job_.io.Rejoin(id, command.tag)) return;
  job_.io.Arrived(id, command.tag);
  if (const absl::Status status = Check(*session, command); !status.ok()) {
    job_.io.Answer(session->IdOf(command), status);
  } else {
    Dispatch(*session, command);
  }
}

absl::Status JobCommands::Check(const Session& session, const Command& command) const {
  if (job_.io.commands_of(session.id) > protocol::kRingEntries) {
    return MakeError(ErrorId::kLimit, absl::StrCat("more than ", protocol::kRingEntries,
                                                   " commands of one session are in flight"));
  }
  if (!session.fence.ok() && !job_.spec.options.disable_fence_for_test) return session.fence;
  if (job_.failed()) return life_.FailedStatus();
  if (session.reader && NeedsRank(static_cast<Op>(command.op))) {
    return MakeError(ErrorId::kRank, "this session is a reader: it has no rank",
                     "attach with a rank to write parameters, deliver gradients or call step");
  }
  return CheckCommand(command, *job_.spec.layout, LimitsOf(job_.spec, session));
}

void JobCommands::Dispatch(Session& session, const Command& command) {
  const Op op = static_cast<Op>(command.op);
  const bool writes_initial =
      op == Op::kWriteState && command.kind == 0 && job_.initial.IsWriter(session.id);
  if (op == Op::kWriteInitial || op == Op::kInitialDone || writes_initial) {
    return HandleInitial(session, command);
  }
  if (op == Op::kCheck) return job_.io.Answer(session.IdOf(command), absl::OkStatus());
  if (!job_.is_ready()) {
    return job_.io.Answer(
        session.IdOf(command),
        MakeError(ErrorId::kNotReady,
                  absl::StrCat("job ", job_.spec.name, ": the initial parameters were not written"),
                  "write every group (sharded: the rank's own partitions), call initial_done and "
                  "wait for its answer"));
  }
  switch (op) {
    case Op::kFetch:
      return job_.fetches.Handle(session, command);
    case Op::kRelease:
      return job_.io.Answer(session.IdOf(command),
                            job_.leases.Release(session.id, command.lease_id));
    case Op::kGradReady:
      return job_.step.commands().HandleGradient(session, command);
    case Op::kGradNorm:
      return job_.step.commands().HandleGradNorm(session, command);
    case Op::kAnnounceStep:
      return job_.step.commands().HandleAnnouncement(session, command);
    case Op::kStep:
      return job_.step.commands().HandleStep(session, command);
    case Op::kDecide:
      return job_.step.commands().HandleDecision(session, command);
    case Op::kGoBack:
      return HandleGoBack(session, command);
    case Op::kReadState:
      return job_.access.AddRead(session.IdOf(command), command);
    case Op::kWriteState:
    case Op::kWriteUpdates:
      return HandleWrite(session, command);
    default:
      FOREBAY_CHECK(false);  // CheckCommand() refuses other ops
  }
}

void JobCommands::HandleInitial(Session& session, const Command& command) {
  const CommandId id = session.IdOf(command);
  if (job_.initial.ready() && session.WasSentAgain(command)) {
    return job_.io.Answer(id, absl::OkStatus());
  }
  if (!job_.initial.IsWriter(session.id)) {
    job_.io.Answer(
        id, MakeError(ErrorId::kProtocol,
                      absl::StrCat("job ", job_.spec.name, ": rank ",
                                   job_.spec.layout->WorldRank(session.rank),
                                   " does not write the initial parameters"),
                      "the job has its parameters, or another rank writes them: read them with "
                      "fetch"));
  } else if (static_cast<Op>(command.op) == Op::kInitialDone) {
    job_.initial.Done(id);
  } else if (const absl::Status kind = job_.initial.CheckKind(command); !kind.ok()) {
    job_.io.Answer(id, kind);
  } else if (static_cast<Op>(command.op) == Op::kWriteState ||
             job_.weights.Holds(command.partition)) {
    job_.initial.SetMasters(job_.access.AddWrite(id, command), false);
  } else {
    job_.initial.Write(id, command);
  }
}

// Handles a write between two steps, by a rank that has not called the next step and has no lease on the partition.
void JobCommands::HandleWrite(Session& session, const Command& command) {
  const CommandId id = session.IdOf(command);
  if (job_.step.parts().HasCalled(session)) {
    return job_.io.Answer(
        id, MakeError(ErrorId::kStep,
                      absl::StrCat("rank ", job_.spec.layout->WorldRank(session.rank),
                                   " has called step ", job_.step.committed_step() + 1,
                                   ": parameters are written between steps"),
                      "wait for the answer to step"));
  }
  const bool has_elements = static_cast<Op>(command.op) == Op::kWriteState;
  for (const uint32_t partition : job_.leases.PartitionsOf(session.id)) {
    if (!has_elements || partition != command.partition) continue;
    return job_.io.Answer(
        id,
        MakeError(ErrorId::kLease,
                  absl::StrCat("rank ", job_.spec.layout->WorldRank(session.rank),
                               " writes parameters of ", job_.spec.layout->PartitionName(partition),
                               " while it holds a lease on them"),
                  "release the lease first"));
  }
  job_.step.gathering().DropEarlyUpdates();
  job_.access.AddWrite(id, command);
}

void JobCommands::HandleGoBack(Session& session, const Command& command) {
  const CommandId id = session.IdOf(command);
  const uint64_t step = command.step;
  if (!job_.spec.is_over_nodes()) {
    return job_.io.Answer(
        id, MakeError(ErrorId::kUnsupported,
                      absl::StrCat("job ", job_.spec.name, " is on one node, and is to go back ",
                                   "to step ", step)));
  }
  if (step == job_.step.committed_step() && job_.step.parts().prepared_step() == 0) {
    return job_.io.Answer(id, absl::OkStatus());
  }
  const std::shared_ptr<const DurableJob> to = OfStep(job_.durable.durable(), step);
  if (to == nullptr) {
    return job_.io.Answer(
        id, MakeError(ErrorId::kStep,
                      absl::StrCat("job ", job_.spec.name, " is to go back to step ", step,
                                   ", which is not durable here; its durable step is ",
                                   job_.durable.durable_step())));
  }
  job_.io.Answer(id, absl::OkStatus());
  job_.io.actions().Emit(
      JobWentBack{.job = JobNameFor(/*uid=*/0, {.uid = job_.spec.uid, .name = job_.spec.name}),
                  .from_step = job_.step.committed_step(),
                  .to_step = step});
  life_.GoBackTo(to);
  sessions_.EndAll(MakeError(
      ErrorId::kFenced,
      absl::StrCat("job ", job_.spec.name, " goes back from step ", job_.step.committed_step(),
                   " to step ", step, ", the newest that all its nodes have"),
      "attach again"));
}

}  // namespace forebay::daemon
