// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/job/job_sessions.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "protocol/error.h"

namespace forebay::daemon {

using protocol::ErrorId;
using protocol::MakeError;

// ---------------------------------------------------------------------------------------- attaches

absl::Status JobSessions::CheckAttach(const AttachRequested& request) const {
  absl::Status status = job_.members.CheckAttach(request, world_.room());
  if (!status.ok()) return status;
  if (job_.failed() && !life_.goes_back()) return life_.FailedStatus();
  if (life_.is_ending()) {
    return MakeError(
        ErrorId::kBusy,
        absl::StrCat("job ", job_.spec.name,
                     life_.goes_back() ? " goes back to a durable step" : " is being deleted"),
        "attach again in a moment");
  }
  const bool ready = job_.initial.ready() && !life_.is_unrestored();
  status = job_.members.CheckRun(request, job_.step.committed_step(),
                                 ready ? Membership::Ready::kYes : Membership::Ready::kNo);
  if (!status.ok()) return status;
  return request.reattach ? CheckReattach(request) : job_.members.CheckRival(request);
}

absl::Status JobSessions::CheckReattach(const AttachRequested& request) const {
  const bool may_go_on =
      !request.is_left_behind && !job_.members.has_begun_anew() &&
      !(request.rank < job_.spec.world_size() && job_.members.is_detached(request.rank));
  if (may_go_on) return absl::OkStatus();
  return LeftBehindError(job_.spec.name, job_.step.committed_step());
}

void JobSessions::Attach(const AttachRequested& request) {
  Session* const old = request.reader ? nullptr : job_.members.OfRank(request.rank);
  if (old != nullptr) {
    Evict(*old, MakeError(ErrorId::kFenced,
                          absl::StrCat("a newer session of rank ",
                                       job_.spec.layout->WorldRank(request.rank), " of job ",
                                       job_.spec.name, " has attached"),
                          "one process trains a rank: end the other, then attach again"));
  }
  job_.members.Add(request);
}

void JobSessions::OnReconnected(const SessionReconnected& event) {
  Session* const session = job_.members.Find(event.session);
  if (session == nullptr) return;
  if (!MayComeBack(*session)) {
    const absl::Status reason =
        session->close_reason.ok()
            ? MakeError(ErrorId::kRankLost, "the session has ended meanwhile", "attach again")
            : session->close_reason;
    job_.io.actions().Emit(AnswerAttach{.session = session->id, .status = reason, .trace = {}});
    return;
  }
  session->mapped = false;
  session->is_away = false;
  session->newest_before = event.newest_tag;
  AnswerAttach answer = TermsOf(*session);
  answer.leases = job_.leases.KeepOnly(session->id, event.held_leases);
  job_.io.actions().Emit(std::move(answer));
}

void JobSessions::AnswerAttaches() {
  if (life_.state() < JobLife::kActive || world_.is_making_arena()) return;
  if (world_.has_next_plan() && !job_.failed()) return;
  for (const SessionId id : job_.members.attaching()) {
    Session& session = *job_.members.Find(id);
    if (job_.failed()) {
      Evict(session, life_.is_ending() ? life_.error() : life_.FailedStatus());
    } else if (job_.members.HasMemory(session) && MayAnswerAttach(session)) {
      AnswerAttachOk(session);
    }
  }
}

bool JobSessions::MayAnswerAttach(const Session& session) const {
  if (session.reader) return job_.is_ready();
  const bool is_between_steps =
      job_.step.phase() == Step::Phase::kOpen || job_.step.parts().prepared_step() > 0;
  if (!is_between_steps || job_.pipeline.running()) return false;
  if (job_.io.stale_tasks() > 0 || job_.durable.in_progress()) return false;
  return job_.initial.ready() || job_.initial.WaitsForWriter(session.rank);
}

void JobSessions::AnswerAttachOk(Session& session) {
  job_.members.SetAttached(session);
  if (session.reader) {
    const uint64_t arena_bytes = ReaderArenaBytes(session.request.grad_arena_bytes);
    job_.io.actions().Emit(AnswerAttach{.session = session.id,
                                        .status = absl::OkStatus(),
                                        .job = job_.spec.id,
                                        .committed_step = job_.step.committed_step(),
                                        .weights_bytes = job_.spec.plan.weights_bytes,
                                        .weights_on_swap = job_.spec.plan.has_weights_on_swap(),
                                        .grad_arena_bytes = arena_bytes,
                                        .step_region_offset = arena_bytes,
                                        .trace = job_.step.parts().trace.committed()});
    return;
  }
  const uint32_t leases = job_.leases.GiveTo(session.id, session.rank, session.held_leases);
  const bool writes_initial = !job_.initial.ready();
  if (writes_initial) job_.initial.AddWriter(session.id, session.rank);
  AnswerAttach answer = TermsOf(session);
  answer.writes_initial = writes_initial;
  const StepExtraStates& extra = job_.step.parts().extra;
  answer.extra_state_bytes = extra.Part(session.rank).bytes;
  answer.extra_state_offset = extra.Part(session.rank).offset_bytes;
  answer.rank0_extra_state_bytes = session.rank == 0 ? 0 : extra.Part(0).bytes;
  answer.rank0_extra_state_offset = extra.Part(0).offset_bytes;
  answer.leases = leases;
  job_.io.actions().Emit(std::move(answer));
}

// Returns the answer for a rank, without fields that a reconnecting rank knows already.
AnswerAttach JobSessions::TermsOf(const Session& session) const {
  const protocol::Layout& layout = *job_.spec.layout;
  const MemoryPlan& plan = job_.spec.plan;
  std::vector<uint32_t> trace = job_.step.parts().trace.committed();
  std::erase_if(trace, [&](uint32_t partition) {
    return !layout.is_shared() && layout.partitions()[partition].owner != session.rank;
  });
  return {.session = session.id,
          .status = absl::OkStatus(),
          .job = job_.spec.id,
          .committed_step = job_.step.committed_step(),
          .weights_bytes = plan.weights_bytes,
          .weights_on_swap = plan.has_weights_on_swap(),
          .grad_arena_bytes = plan.session_arena_bytes,
          .step_region_offset = plan.step_region_offset,
          .step_region_bytes = plan.step_region_bytes,
          .trace_bytes = plan.trace_bytes,
          .trace = std::move(trace),
          .attempt = job_.step.gathering().attempt(),
          .outlives_daemon = job_.spec.options.keeps_jobs,
          .prepared_step = job_.step.parts().prepared_step(),
          .durable_step = job_.durable.durable_step(),
          .durable_before = job_.durable.durable_before(),
          .summary = job_.step.nodes().EncodeLast()};
}

void JobSessions::OnMemoryMade(SessionId id, const absl::Status& status) {
  job_.members.OnMemoryMade(id, status.ok());
  Session& session = *job_.members.Find(id);
  if (!status.ok() && session.state == Session::State::kWaiting) Evict(session, status);
}

// -------------------------------------------------------------------------------------------- ends

void JobSessions::OnEnded(SessionId id, EndCause cause) {
  Session* session = job_.members.Find(id);
  if (session == nullptr || session->state == Session::State::kEnded) return;
  if (cause == EndCause::kDisconnected && MayComeBack(*session)) {
    session->is_away = true;
    job_.io.Disconnect(id);
    // The client sends accesses of states and fetches again, so these end here. Other commands belong to the step and still wait.
    const absl::Status away = MakeError(ErrorId::kFenced, "the client is away");
    job_.access.Drop(id, away);
    job_.fetches.Answer(id, away);
    return;
  }
  job_.io.End(id);  // the session gets no further answers
  const bool counts =
      session->is_current() && job_.initial.ready() && !job_.failed() && !stop_.is_quiescent();
  if (!session->reader && counts) {
    if (cause != EndCause::kDetached || job_.step.parts().HasContributed(*session)) {
      OnRankFailed(session->rank, session);
    } else {
      OnRankDetached(*session);
    }
  }
  End(*session, absl::OkStatus());
}

void JobSessions::OnRankEnded(const RankEnded& event) {
  if (job_.members.has_begun_anew() || job_.members.OfRank(event.rank) != nullptr) return;
  if (job_.members.Current().empty() || !job_.initial.ready()) return;
  if (job_.failed() || stop_.is_quiescent()) return;
  if (!event.has_detached) return OnRankFailed(event.rank, nullptr);
  if (job_.members.is_detached(event.rank)) return;
  job_.members.SetDetached(event.rank);
  job_.step.gathering().OnRankDetached(event.rank);
}

void JobSessions::OnLeaseTimeExpired(uint64_t step) {
  if (step == 0) return job_.fetches.OnLeaseTimeExpired();
  if (!job_.pipeline.running() || step != job_.step.committed_step()) return;
  for (const auto& [id, session] : job_.members.all()) {
    std::vector<std::string> names;
    for (const uint32_t partition : job_.leases.PartitionsOf(id)) {
      if (!job_.pipeline.queue().Updates(partition)) continue;
      names.push_back(job_.spec.layout->PartitionName(partition));
    }
    if (!session.reader || names.empty()) continue;
    Evict(*job_.members.Find(id),
          MakeError(ErrorId::kLease,
                    absl::StrCat("this reader held leases on ", absl::StrJoin(names, ", "),
                                 " while the update of step ", step, " of job ", job_.spec.name,
                                 " waited longer than reader.lease_max"),
                    "attach again; release each lease as soon as the bytes are read, or raise "
                    "reader.lease_max in the daemon's configuration"));
  }
}

// True if a session whose client is disconnected may continue, with this daemon or the next one.
bool JobSessions::MayComeBack(const Session& session) const {
  return !session.reader && session.is_current() && job_.is_ready() && !job_.failed() &&
         !life_.is_ending();
}

// Ends a session that its client did not end. The client gets `reason`.
void JobSessions::Evict(Session& session, const absl::Status& reason) {
  session.close_reason = reason;
  if (session.state == Session::State::kWaiting) {
    job_.io.actions().Emit(AnswerAttach{.session = session.id, .status = reason, .trace = {}});
  } else if (session.is_current()) {
    session.fence = reason;
    const bool counts = job_.initial.ready() && !job_.failed();
    if (!session.reader && counts) OnRankFailed(session.rank, &session);
  }
  End(session, reason);
  job_.io.End(session.id);
}

void JobSessions::EvictWaiting(const absl::Status& reason) {
  for (const SessionId id : job_.members.attaching()) {
    Session& session = *job_.members.Find(id);
    if (!session.reader) Evict(session, reason);
  }
}

void JobSessions::End(Session& session, const absl::Status& status) {
  if (job_.initial.IsWriter(session.id)) EndInitial(session, status);
  AnswerWaiting(session, status);
  if (!session.mapped) job_.leases.ReturnToNobody(session.id);
  job_.leases.DropAll(session.id);
  job_.members.SetEnded(session);
}

// Ends a writer of initial parameters. Ranks that attach again write all parameters from scratch. With shared attachment the
// ranks that wait for the writer are evicted. With sharded attachment the other writers are fenced.
void JobSessions::EndInitial(Session& writer, const absl::Status& status) {
  job_.io.NewEpoch();
  const absl::Status lost = MakeError(
      ErrorId::kRankLost,
      absl::StrCat("rank ", job_.spec.layout->WorldRank(writer.rank), " of job ", job_.spec.name,
                   " was lost before all initial parameters were written"),
      "attach again and write them again");
  if (job_.spec.layout->is_shared()) {
    job_.initial.Reset(status);
    EvictWaiting(lost);
    return;
  }
  job_.initial.AnswerWriter(writer.id, status);
  job_.initial.Reset(lost);
  for (Session* session : job_.members.BeginGeneration(&writer, lost)) {
    AnswerWaiting(*session, lost);
  }
}

// Begins a new generation: every other session is fenced. A step that all ranks have called continues and is answered. Any
// other step is dropped. `lost` is null if the rank had no session with this daemon.
void JobSessions::OnRankFailed(uint32_t rank, Session* lost) {
  const uint64_t committed = job_.step.committed_step();
  const absl::Status status = MakeError(
      ErrorId::kRankLost,
      absl::StrCat("rank ", job_.spec.layout->WorldRank(rank), " of job ", job_.spec.name,
                   " was lost in step ", committed + 1, "; the committed step is ", committed),
      absl::StrCat("attach again and go on after step ", committed));
  const std::vector<Session*> fenced = job_.members.BeginGeneration(lost, status);
  job_.step.gathering().OnRankFailed(lost, status);
  for (Session* session : fenced) {
    AnswerWaiting(*session, status);
    job_.leases.DropAll(session->id);
  }
}

// Handles the detach of a rank that has delivered no gradients to the step. The step calls of other ranks are refused until
// this rank has attached again.
void JobSessions::OnRankDetached(const Session& session) {
  const bool may_come_back = job_.spec.kept() != nullptr && !job_.members.has_begun_anew();
  if (!job_.members.HasCurrentBeside(session.id) && !may_come_back) {
    job_.members.ClearDetached();  // no rank remains: the step waits for all ranks to attach
    return;
  }
  job_.members.SetDetached(session.rank);
  job_.step.gathering().OnRankDetached(session.rank);
}

void JobSessions::AnswerWaiting(Session& session, const absl::Status& status) {
  job_.step.AnswerWaiting(session, status);
  job_.access.Drop(session.id, status);
  job_.fetches.Answer(session.id, status);
}

void JobSessions::CloseEnded() {
  job_.members.CloseEnded(
      [this](SessionId id) { return job_.step.parts().gradients.UsesArenaOf(id); });
}

absl::Status JobSessions::DeleteJob() {
  if (stop_.is_quiescent()) {
    return MakeError(ErrorId::kBusy, "the daemon is being restarted", "try again in a moment");
  }
  if (job_.members.live_ranks() > 0) {
    return MakeError(ErrorId::kBusy,
                     absl::StrCat("job ", job_.spec.name, " has ", job_.members.live_ranks(),
                                  job_.members.live_ranks() == 1 ? " session" : " sessions"),
                     "end its processes first");
  }
  life_.Delete();
  EndAll(MakeError(ErrorId::kFenced, absl::StrCat("job ", job_.spec.name, " was deleted"),
                   "attach to another job"));
  return absl::OkStatus();
}

void JobSessions::EndAll(const absl::Status& reason) {
  for (const auto& [id, session] : job_.members.all()) {
    if (session.state != Session::State::kEnded) Evict(*job_.members.Find(id), reason);
  }
  // Fails the job even if dead ranks had called step, so that no step is decided or updated any more.
  Fail(reason);
}

void JobSessions::Fail(const absl::Status& first_error) {
  if (job_.failed()) return;
  life_.SetError(first_error);
  stop_.EndRecord();
  job_.step.Fail(first_error);
  job_.access.Drop(0, first_error);
  job_.durable.Abandon();
  if (!life_.is_ending()) job_.residency.Abandon();  // the memory of a deleted job is freed soon
  job_.initial.Reset(first_error);
  for (const auto& [id, session] : job_.members.all()) {
    AnswerWaiting(*job_.members.Find(id), first_error);
  }
}

}  // namespace forebay::daemon
