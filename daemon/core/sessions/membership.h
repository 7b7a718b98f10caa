// SPDX-License-Identifier: Apache-2.0
// The sessions of a job: who may attach, which rank each has, which are fenced, which ranks have
// detached.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/job_tasks.h"
#include "daemon/core/base/views.h"
#include "daemon/core/plan/job_spec.h"
#include "daemon/core/sessions/session.h"

namespace forebay::daemon {

// E_LAYOUT, E_RANK, E_OPTION: this client's layout, world size where the job is sharded, or level of durability is
// not what the job has.
struct JobTraits {
  const std::string& name;
  const protocol::LayoutSpec& layout;
  uint32_t world_size;
  protocol::Durability durability;
};
absl::Status CheckTraits(const AttachRequested& request, const JobTraits& job);

// Of a session of a generation that is over.
absl::Status LeftBehindError(const std::string& name, uint64_t step);

// The job exists, is at this step, and belongs to another run.
absl::Status JobExistsError(const std::string& name, uint64_t step, const std::string& run);

// A rank has at most one session that has not ended. When a rank is lost, a new generation begins:
// the sessions of all other ranks are fenced and must attach again. Readers have no rank; nothing
// that happens to them concerns the ranks, and no fence concerns them.
//
// Ownership  The spec and the io outlive it. A Session lives until CloseEnded() closes it.
class Membership {
 public:
  enum class Ready : uint8_t { kNo, kYes };

  Membership(const JobSpec& spec, JobTasks& io)
      : spec_(spec),
        io_(io),
        run_(spec.recovered == nullptr ? std::string() : spec.recovered->run),
        detached_(spec.world_size(), false) {}

  // Whether this client may attach by its layout, its world size and the sizes it asks for, where
  // sessions get `room`. Another world size may where no rank has a session.
  absl::Status CheckAttach(const AttachRequested& request, const SessionRequest& room) const;
  // Whether this client's run may: the job's own, or, between runs, one that asks to resume. A job
  // whose parameters are not written (`ready`) is nobody's yet.
  //
  // Errors  E_BUSY        processes of another run are attached.
  //         E_JOB_EXISTS  another run has trained the job, and this one does not ask to resume it.
  absl::Status CheckRun(const AttachRequested& request, uint64_t committed_step, Ready ready) const;
  // Whether the client may have the rank that it asks for. A rank's session is replaced unless another process of the
  // same launch trains with it: that one runs and no fence concerns it.
  //
  // Errors  E_RANK  both processes were taken for this rank.
  absl::Status CheckRival(const AttachRequested& request) const;
  // The request's run becomes the job's.
  void Add(const AttachRequested& request);
  void OnMapped(SessionId id);

  Session* Find(SessionId id);
  Session* OfRank(uint32_t rank);   // that has not ended
  std::vector<Session*> Current();  // of ranks, attached and not fenced, in the order of ids
  bool HasCurrentBeside(SessionId id) const;
  uint64_t live_ranks() const;  // ranks' sessions that have not ended
  // Whether every rank's session waits for its answer.
  bool has_only_waiting() const;
  // The spec's world size is another: no rank has detached. Ranks' sessions are waiting.
  void OnWorldChanged() { detached_.assign(world_size(), false); }

  // In the order of arrival; a copy, because answers change it.
  std::vector<SessionId> attaching() const { return attaching_; }
  // Starts a session's memory as soon as no other session of its rank is left; true once it is made.
  bool HasMemory(Session& session);
  void OnMemoryMade(SessionId id, bool made);
  void SetAttached(Session& session);

  // Fences `lost`, a session of a rank (null: it ended while there was no daemon), and all current sessions with
  // E_RANK_LOST; returns the others.
  std::vector<Session*> BeginGeneration(Session* lost, const absl::Status& status);
  void SetEnded(Session& session);
  // Emits CloseSession for ended sessions whose tasks are done and of which nothing is in use.
  void CloseEnded(absl::FunctionRef<bool(SessionId)> in_use);
  std::vector<SessionId> DrainClosed();  // ids of those, since the last call

  // Whether a generation has begun with this daemon, where a rank was lost or one has attached anew: sessions of the daemon
  // before that are not back are of one that is over.
  bool has_begun_anew() const { return has_begun_anew_ || generation_ > 0; }

  // Ranks that have detached in good order and not attached again.
  void SetDetached(uint32_t rank) { detached_[rank] = true; }
  void ClearDetached();
  bool is_detached(uint32_t rank) const { return detached_[rank]; }
  std::optional<uint32_t> FirstDetached() const;

  // Arenas and rings of readers, until their sessions are closed.
  uint64_t reader_bytes() const;

  uint32_t world_size() const { return spec_.world_size(); }
  const std::string& run() const { return run_; }
  uint64_t generation() const { return generation_; }
  const std::map<SessionId, Session>& all() const { return sessions_; }
  bool empty() const { return sessions_.empty(); }
  void CheckInvariants() const;

 private:
  const JobSpec& spec_;
  JobTasks& io_;
  std::string run_;  // token of the newest attach, or of the one that it comes back from
  uint64_t generation_ = 0;
  bool has_begun_anew_ = false;
  std::map<SessionId, Session> sessions_;
  std::vector<SessionId> attaching_;
  std::vector<SessionId> closed_;
  std::vector<bool> detached_;  // by rank
};

}  // namespace forebay::daemon
