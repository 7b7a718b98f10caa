// Sessions of a job: attach, detach, loss of a rank, generations and their fences.

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "daemon/core/job.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/os/status_macros.h"

namespace forebay::daemon {

using protocol::ErrorId;
using protocol::MakeError;

absl::Status Job::CheckAttach(const AttachRequested& request) const {
  if (request.uid != spec_.uid && request.uid != 0) {
    return MakeError(ErrorId::kPermission,
                     absl::StrCat("job ", spec_.name, " belongs to uid ", spec_.uid,
                                  ", not to uid ", request.uid),
                     "take another job name, or attach as that user");
  }
  const std::string difference =
      protocol::Layout::Difference(spec_.layout->spec(), request.layout->spec());
  if (!difference.empty()) {
    return MakeError(ErrorId::kLayout,
                     absl::StrCat("job ", spec_.name, " has another layout: ", difference),
                     "take another job name, or delete the job");
  }
  const SessionRequest& room = spec_.plan.session;
  if (request.grad_arena_bytes > room.grad_arena_bytes) {
    return MakeError(ErrorId::kRange,
                     absl::StrCat("a gradient arena of ", request.grad_arena_bytes,
                                  " bytes; the job's first session took ", room.grad_arena_bytes,
                                  " for each rank"),
                     "ask for no more, or delete the job and start with more");
  }
  if (request.extra_state_bytes > room.extra_state_bytes) {
    return MakeError(ErrorId::kExtraState,
                     absl::StrCat("room for ", request.extra_state_bytes,
                                  " bytes of extra_state; the job's first session took ",
                                  room.extra_state_bytes, " for each rank"),
                     "ask for no more, or delete the job and start with more");
  }
  if (phase_ == Phase::kFailed) return FailedStatus();
  if (deleting_) {
    return MakeError(ErrorId::kBusy, absl::StrCat("job ", spec_.name, " is being deleted"),
                     "attach again in a moment");
  }
  return absl::OkStatus();
}

void Job::Attach(const AttachRequested& request) {
  for (auto& [id, session] : sessions_) {
    if (session.rank != request.rank || session.state == Session::State::kEnded) continue;
    Evict(session, MakeError(ErrorId::kFenced,
                             absl::StrCat("a newer session of rank ", request.rank, " of job ",
                                          spec_.name, " has attached"),
                             "one process trains a rank: end the other, then attach again"));
  }
  Session session;
  session.id = request.session;
  session.uid = request.uid;
  session.rank = request.rank;
  session.request = {.grad_arena_bytes = request.grad_arena_bytes,
                     .extra_state_bytes = request.extra_state_bytes};
  sessions_.emplace(request.session, std::move(session));
  io_.Open(request.session);
  attaching_.push_back(request.session);
}

void Job::OnMapped(SessionId id) {
  Session* session = Find(id);
  if (session != nullptr && session->state == Session::State::kAttached) session->mapped = true;
}

void Job::OnEnded(SessionId id, EndCause cause) {
  Session* session = Find(id);
  if (session == nullptr || session->state == Session::State::kEnded) return;
  io_.End(id);  // nothing is said to it any more
  if (session->is_current() && initial_.ready() && phase_ != Phase::kFailed) {
    const bool contributed = accumulator_.has_delivered(session->rank) ||
                             barrier_.has(session->rank) || session->step_being_copied ||
                             !session->parked.empty();
    if (cause == EndCause::kLost || contributed) {
      OnRankFailed(*session);
    } else {
      OnRankDetached(*session);
    }
  }
  End(*session, absl::OkStatus());
}

// The session is told why and is closed without its client's asking.
void Job::Evict(Session& session, const absl::Status& reason) {
  session.close_reason = reason;
  if (session.state == Session::State::kWaiting) {
    io_.actions().Emit(AnswerAttach{.session = session.id, .status = reason, .trace = {}});
  } else if (session.is_current()) {
    session.fence = reason;
    if (initial_.ready() && phase_ != Phase::kFailed) OnRankFailed(session);
  }
  End(session, reason);
  io_.End(session.id);
}

void Job::End(Session& session, const absl::Status& status) {
  if (initial_.writer() == session.id) {
    initial_.Reset(io_, status);
    io_.NewEpoch();
  }
  AnswerWaiting(session, status);
  leases_.DropAll(session.id);
  std::erase(attaching_, session.id);
  session.state = Session::State::kEnded;
}

void Job::ClearDetached() {
  for (uint32_t rank = 0; rank < detached_.size(); ++rank) SetDetached(rank, false);
}

void Job::SetDetached(uint32_t rank, bool left) {
  detached_[rank] = left;
  accumulator_.SetDetached(io_, rank, left);
}

// A new generation: the step being gathered is dropped and every other session is fenced. A step
// that all ranks have called goes on and is answered.
void Job::OnRankFailed(Session& lost) {
  ++generation_;
  ClearDetached();
  const absl::Status status =
      MakeError(ErrorId::kRankLost,
                absl::StrCat("rank ", lost.rank, " of job ", spec_.name, " was lost in step ",
                             committed_step_ + 1, "; the committed step is ", committed_step_),
                absl::StrCat("attach again and go on after step ", committed_step_));
  if (lost.fence.ok()) lost.fence = status;
  std::vector<Session*> fenced;
  for (auto& [id, session] : sessions_) {
    if (!session.is_current()) continue;
    session.fence = status;
    fenced.push_back(&session);
  }
  if (phase_ == Phase::kOpen) {
    accumulator_.AnswerSession(io_, lost.id, lost.fence);
    for (const auto& [rank, call] : barrier_.Drain()) {
      io_.Answer(call.command, call.command.session == lost.id ? lost.fence : status);
    }
    io_.NewEpoch();
    accumulator_.Drop(io_, status);
    fetched_.clear();
  }
  for (Session* session : fenced) {
    AnswerWaiting(*session, status);
    leases_.DropAll(session->id);
  }
}

// Detached in good order with nothing of it in the step: the others' step is refused until the rank
// is back.
void Job::OnRankDetached(const Session& session) {
  const auto stays = [&](const auto& entry) {
    return entry.second.is_current() && entry.first != session.id;
  };
  if (std::none_of(sessions_.begin(), sessions_.end(), stays)) {
    ClearDetached();  // whoever comes next is waited for
    return;
  }
  SetDetached(session.rank, true);
  RefuseStepCalls(MakeError(ErrorId::kRankLost,
                            absl::StrCat("rank ", session.rank, " of job ", spec_.name,
                                         " has detached; the committed step is ", committed_step_),
                            "attach that rank again, then call step again"));
}

// All that waits of a session but contributions and calls, which are the job's.
void Job::AnswerWaiting(Session& session, const absl::Status& status) {
  for (const protocol::Command& command : session.parked) {
    io_.Answer(session.IdOf(command), status);
  }
  session.parked.clear();
  if (session.step_being_copied) io_.Answer(session.IdOf(*session.step_being_copied), status);
  session.step_being_copied.reset();
  reads_.Drop(io_, pipeline_, session.id, status);
  std::erase_if(fetches_, [&](const WaitingFetch& fetch) {
    if (fetch.command.session != session.id) return false;
    io_.Answer(fetch.command, status);
    return true;
  });
}

bool Job::MayAnswerAttach(const Session& session) const {
  if (!session.memory_made || phase_ != Phase::kOpen || io_.stale_tasks() > 0) return false;
  return initial_.ready() || initial_.writer() == 0;
}

void Job::AnswerAttaches() {
  if (phase_ == Phase::kCreating) return;
  const std::vector<SessionId> waiting = attaching_;
  for (const SessionId id : waiting) {
    Session& session = sessions_.at(id);
    if (phase_ == Phase::kFailed) {
      Evict(session, deleting_ ? failed_ : FailedStatus());
      continue;
    }
    if (!session.memory_asked) {
      const auto same_rank = [&](const auto& entry) {
        return entry.second.rank == session.rank && entry.first != id;
      };
      if (std::any_of(sessions_.begin(), sessions_.end(), same_rank)) continue;  // being closed
      session.memory_asked = true;
      io_.StartSessionMemory(id, spec_.plan.session_arena_bytes);
    } else if (MayAnswerAttach(session)) {
      AnswerAttachOk(session);
    }
  }
}

void Job::AnswerAttachOk(Session& session) {
  std::erase(attaching_, session.id);
  session.state = Session::State::kAttached;
  session.awaits_repetition = !accumulator_.fault().ok();
  SetDetached(session.rank, false);
  const bool writes_initial = !initial_.ready();
  if (writes_initial) initial_.set_writer(session.id);
  io_.actions().Emit(
      AnswerAttach{.session = session.id,
                   .status = absl::OkStatus(),
                   .job = spec_.id,
                   .committed_step = committed_step_,
                   .writes_initial = writes_initial,
                   .weights_bytes = spec_.plan.weights_bytes,
                   .grad_arena_bytes = spec_.plan.session_arena_bytes,
                   .step_region_offset = spec_.plan.step_region_offset,
                   .step_region_bytes = spec_.plan.step_region_bytes,
                   .extra_state_bytes = extra_bytes_[session.rank],
                   .extra_state_offset = spec_.plan.extra_state_slot(session.rank, extra_slot_),
                   .trace = trace_});
}

void Job::CloseEnded() {
  std::vector<SessionId> done;
  for (const auto& [id, session] : sessions_) {
    if (session.state == Session::State::kEnded && io_.tasks_of(id) == 0 &&
        !accumulator_.UsesArenaOf(id)) {
      done.push_back(id);
    }
  }
  for (const SessionId id : done) {
    io_.actions().Emit(CloseSession{.session = id, .reason = sessions_.at(id).close_reason});
    io_.Close(id);
    sessions_.erase(id);
    closed_.push_back(id);
  }
}

Session* Job::Find(SessionId id) {
  const auto it = sessions_.find(id);
  return it == sessions_.end() ? nullptr : &it->second;
}

}  // namespace forebay::daemon
