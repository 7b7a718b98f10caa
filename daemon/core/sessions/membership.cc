// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/sessions/membership.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/os/status_macros.h"

namespace forebay::daemon {

using protocol::ErrorId;
using protocol::MakeError;

absl::Status CheckTraits(const AttachRequested& request, const JobTraits& job) {
  const bool sharded = !job.layout.partitions.empty() && !request.layout->is_shared();
  if (sharded && !request.reader && request.session_request.world_size != job.world_size) {
    return MakeError(ErrorId::kRank,
                     absl::StrCat("world size: job ", job.name, " is sharded over ", job.world_size,
                                  " ranks; this client wants ", request.session_request.world_size),
                     absl::StrCat("start ", job.world_size,
                                  " ranks: a sharded job keeps its world size. "
                                  "Another job name starts anew"));
  }
  const std::string difference = protocol::Layout::Difference(job.layout, request.layout->spec());
  if (!difference.empty()) {
    return MakeError(
        ErrorId::kLayout, absl::StrCat("job ", job.name, " has another layout: ", difference),
        "build the model and the optimizer as the job has them; for another model choose "
        "another job name, or delete the job");
  }
  if (request.reader || !request.durability || *request.durability == job.durability) {
    return absl::OkStatus();
  }
  return MakeError(
      ErrorId::kOption,
      absl::StrCat("durability ", protocol::FormatDurability(*request.durability), ": job ",
                   job.name, " has ", protocol::FormatDurability(job.durability)),
      "leave durability out, or delete the job and start with the other level");
}

absl::Status LeftBehindError(const std::string& name, uint64_t step) {
  return MakeError(
      ErrorId::kRankLost,
      absl::StrCat("the ranks of job ", name,
                   " have begun again without this one, which was away; the committed step is ",
                   step),
      absl::StrCat("attach again and go on after step ", step));
}

absl::Status JobExistsError(const std::string& name, uint64_t step, const std::string& run) {
  return MakeError(ErrorId::kJobExists,
                   absl::StrCat("job ", name, " exists and is at step ", step, "; another run (",
                                run, ") has trained it"),
                   absl::StrCat("attach with resume to go on after step ", step,
                                ", choose another job name, or delete the job: forebay jobs "
                                "--delete ",
                                name));
}

absl::Status Membership::CheckAttach(const AttachRequested& request,
                                     const SessionRequest& room) const {
  RETURN_IF_ERROR(CheckTraits(request, {.name = spec_.name,
                                        .layout = spec_.layout->spec(),
                                        .world_size = room.world_size,
                                        .durability = room.durability}));
  if (request.reader) return absl::OkStatus();
  const SessionRequest& wanted = request.session_request;
  if (wanted.world_ranks != room.world_ranks) {
    const auto ranks = [](const SessionRequest& session) {
      return std::max(session.world_ranks, session.world_size);
    };
    return MakeError(ErrorId::kRank,
                     absl::StrCat("job ", spec_.name, " has ", ranks(room),
                                  " ranks on all nodes; this client wants ", ranks(wanted)),
                     "start as many nodes, with as many ranks; another job name starts anew");
  }
  if (wanted.world_size != room.world_size) {
    if (live_ranks() == 0) return absl::OkStatus();  // the job takes this world size
    return MakeError(
        ErrorId::kRank,
        absl::StrCat("world size: job ", spec_.name, " has ", room.world_size, ", of which ",
                     live_ranks(), " are attached; this client wants ", wanted.world_size),
        "start all ranks with one world size, or end those that are attached");
  }
  const bool may_change = spec_.layout->is_shared() && live_ranks() == 0;
  if (wanted.accumulate && !room.accumulate && !may_change) {
    return MakeError(ErrorId::kRange,
                     absl::StrCat("gradients of several backward passes: the first session of job ",
                                  spec_.name, " did not ask for sums in float32"),
                     spec_.layout->is_shared()
                         ? "attach every rank with it, once none is attached"
                         : "leave accumulate out, or delete the job and start with it");
  }
  const auto check = [](ErrorId id, uint64_t bytes, uint64_t had, const std::string& what) {
    if (bytes <= had) return absl::OkStatus();
    return MakeError(
        id, absl::StrCat(what, "; the job's first session asked for ", had, " for each rank"),
        "ask for no more, or delete the job and start with more");
  };
  RETURN_IF_ERROR(check(ErrorId::kRange, wanted.grad_arena_bytes, room.grad_arena_bytes,
                        absl::StrCat("a gradient arena of ", wanted.grad_arena_bytes, " bytes")));
  RETURN_IF_ERROR(
      check(ErrorId::kRange, wanted.activation_bytes, room.activation_bytes,
            absl::StrCat("room for ", wanted.activation_bytes, " bytes of activations")));
  return check(ErrorId::kExtraState, wanted.extra_state_bytes, room.extra_state_bytes,
               absl::StrCat("room for ", wanted.extra_state_bytes, " bytes of extra_state"));
}

absl::Status Membership::CheckRun(const AttachRequested& request, uint64_t committed_step,
                                  Ready ready) const {
  if (request.reader || request.run == run_) return absl::OkStatus();
  if (request.reattach) return JobExistsError(spec_.name, committed_step, run_);
  if (live_ranks() > 0) {
    return MakeError(
        ErrorId::kBusy,
        absl::StrCat("job ", spec_.name, " is being trained by another run (", run_, "): ",
                     live_ranks(), " of its processes are attached, at step ", committed_step),
        "give all ranks of one run the same FOREBAY_RUN; else end those processes, or choose "
        "another job name for this run");
  }
  if (ready == Ready::kNo || request.resume) return absl::OkStatus();
  return JobExistsError(spec_.name, committed_step, run_);
}

absl::Status Membership::CheckRival(const AttachRequested& request) const {
  if (request.reader || request.reattach || request.rival_pid == 0) return absl::OkStatus();
  const auto trains = [&](const auto& entry) {
    const Session& session = entry.second;
    return session.IsOf(request.rank) && session.state != Session::State::kEnded &&
           session.fence.ok() && !session.is_away;
  };
  if (std::none_of(sessions_.begin(), sessions_.end(), trains)) return absl::OkStatus();
  const uint32_t rank = spec_.layout->WorldRank(request.rank);
  return MakeError(ErrorId::kRank,
                   absl::StrCat("process ", request.rival_pid, " of the same launch trains rank ",
                                rank, " of job ", spec_.name, "; this process wants rank ", rank,
                                " of ", request.session_request.world_size, " too"),
                   absl::StrCat("give each process a rank of its own: init_process_group() before "
                                "attach, RANK and WORLD_SIZE, or "
                                "rank= and world_size= of attach; for a training of its own "
                                "another job name. To replace process ",
                                request.rival_pid, ", end it first"));
}

void Membership::Add(const AttachRequested& request) {
  if (!request.reader) run_ = request.run;
  if (!request.reader && !request.reattach) {
    if (live_ranks() == 0) ClearDetached();
    has_begun_anew_ = true;
  }
  Session session;
  session.id = request.session;
  session.uid = request.uid;
  session.reader = request.reader;
  session.rank = request.rank;
  session.request = request.session_request;
  session.held_leases = request.held_leases;
  session.newest_before = request.newest_tag;
  sessions_.emplace(request.session, std::move(session));
  io_.Open(request.session);
  attaching_.push_back(request.session);
}

void Membership::OnMapped(SessionId id) {
  Session* session = Find(id);
  if (session != nullptr && session->state == Session::State::kAttached) session->mapped = true;
}

Session* Membership::Find(SessionId id) {
  const auto it = sessions_.find(id);
  return it == sessions_.end() ? nullptr : &it->second;
}

Session* Membership::OfRank(uint32_t rank) {
  for (auto& [id, session] : sessions_) {
    if (session.IsOf(rank) && session.state != Session::State::kEnded) return &session;
  }
  return nullptr;
}

std::vector<Session*> Membership::Current() {
  std::vector<Session*> current;
  for (auto& [id, session] : sessions_) {
    if (!session.reader && session.is_current()) current.push_back(&session);
  }
  return current;
}

bool Membership::HasCurrentBeside(SessionId id) const {
  return std::any_of(sessions_.begin(), sessions_.end(), [id](const auto& entry) {
    return !entry.second.reader && entry.second.is_current() && entry.first != id;
  });
}

uint64_t Membership::live_ranks() const {
  const auto count = std::count_if(sessions_.begin(), sessions_.end(), [](const auto& entry) {
    return !entry.second.reader && entry.second.state != Session::State::kEnded;
  });
  return static_cast<uint64_t>(count);
}

bool Membership::has_only_waiting() const {
  return std::all_of(sessions_.begin(), sessions_.end(), [](const auto& entry) {
    return entry.second.reader || entry.second.state == Session::State::kWaiting;
  });
}

bool Membership::HasMemory(Session& session) {
  if (session.memory_asked) return session.memory_made;
  const auto is_predecessor = [&](const auto& entry) {
    return entry.second.IsOf(session.rank) && entry.first != session.id;
  };
  if (!session.reader && std::any_of(sessions_.begin(), sessions_.end(), is_predecessor)) {
    return false;
  }
  session.memory_asked = true;
  io_.StartSessionMemory(session.id, session.reader
                                         ? ReaderArenaBytes(session.request.grad_arena_bytes)
                                         : spec_.plan.session_arena_bytes);
  return false;
}

void Membership::OnMemoryMade(SessionId id, bool made) { sessions_.at(id).memory_made = made; }

void Membership::SetAttached(Session& session) {
  std::erase(attaching_, session.id);
  session.state = Session::State::kAttached;
  if (!session.reader) detached_[session.rank] = false;
}

std::vector<Session*> Membership::BeginGeneration(Session* lost, const absl::Status& status) {
  ++generation_;
  ClearDetached();
  if (lost != nullptr) {
    lost->is_lost = true;
    if (lost->fence.ok()) lost->fence = status;
  }
  std::vector<Session*> fenced = Current();
  for (Session* session : fenced) session->fence = status;
  return fenced;
}

void Membership::SetEnded(Session& session) {
  std::erase(attaching_, session.id);
  session.state = Session::State::kEnded;
}

void Membership::CloseEnded(absl::FunctionRef<bool(SessionId)> in_use) {
  for (auto it = sessions_.begin(); it != sessions_.end();) {
    const SessionId id = it->first;
    if (it->second.state != Session::State::kEnded || io_.tasks_of(id) > 0 || in_use(id)) {
      ++it;
      continue;
    }
    const bool is_of_old = !it->second.fence.ok() && !it->second.is_lost;
    io_.actions().Emit(CloseSession{
        .session = id, .reason = it->second.close_reason, .is_of_old_generation = is_of_old});
    io_.Close(id);
    closed_.push_back(id);
    it = sessions_.erase(it);
  }
}

std::vector<SessionId> Membership::DrainClosed() { return std::exchange(closed_, {}); }

void Membership::ClearDetached() { detached_.assign(detached_.size(), false); }

uint64_t Membership::reader_bytes() const {
  uint64_t bytes = 0;
  for (const auto& [id, session] : sessions_) {
    if (!session.reader) continue;
    bytes += ReaderArenaBytes(session.request.grad_arena_bytes) + spec_.plan.ring_bytes;
  }
  return bytes;
}

std::optional<uint32_t> Membership::FirstDetached() const {
  const auto rank = std::find(detached_.begin(), detached_.end(), true);
  if (rank == detached_.end()) return std::nullopt;
  return static_cast<uint32_t>(rank - detached_.begin());
}

void Membership::CheckInvariants() const {
  std::map<uint32_t, uint32_t> live_of_rank;
  for (const auto& [id, session] : sessions_) {
    if (!session.reader && session.state != Session::State::kEnded) ++live_of_rank[session.rank];
  }
  for (const auto& [rank, live] : live_of_rank) FOREBAY_CHECK(live <= 1);
}

}  // namespace forebay::daemon
