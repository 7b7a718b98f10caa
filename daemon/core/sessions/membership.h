// SPDX-License-Identifier: Apache-2.0
// The sessions of a job: which clients may attach, the rank of each session, which sessions are fenced, and which ranks have
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

// The values of a job that an attach request must match.
struct JobTraits {
  const std::string& name;
  const protocol::LayoutSpec& layout;
  uint32_t world_size;
  protocol::Durability durability;
};

// Compares an attach request with the job.
//
// Errors  E_LAYOUT  another layout.
//         E_RANK    another world size, if the job is sharded.
//         E_OPTION  another level of durability.
absl::Status CheckTraits(const AttachRequested& request, const JobTraits& job);

// The error (E_RANK_LOST) of a session that reattaches after its job has begun a new generation without it.
absl::Status LeftBehindError(const std::string& name, uint64_t step);

// The error (E_JOB_EXISTS) of an attach to a job that exists, is at this step, and belongs to another run.
absl::Status JobExistsError(const std::string& name, uint64_t step, const std::string& run);

// A rank has at most one session that has not ended. When a rank is lost, a new generation begins: the sessions of all other
// ranks are fenced, and their clients must attach again. Readers have no rank. Their ends do not affect the ranks, and they are
// never fenced.
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

  // Checks whether this client may attach, by its layout, its world size and the sizes it asks for. `room`: the request that
  // the job's sessions have in common. Another world size is allowed if no rank has a session.
  absl::Status CheckAttach(const AttachRequested& request, const SessionRequest& room) const;
  // Checks whether this client's run may attach: the job's own run, or, if no rank has a session, a run that asks to resume the
  // job. A job whose parameters are not written yet (`ready`) belongs to no run.
  //
  // Errors  E_BUSY        processes of another run are attached.
  //         E_JOB_EXISTS  another run has trained the job, and this one does not ask to resume it.
  absl::Status CheckRun(const AttachRequested& request, uint64_t committed_step, Ready ready) const;
  // Checks whether the client may have the rank that it asks for. The new session replaces the rank's session, unless that is
  // the session of another running process of the same launch, which is neither fenced nor disconnected.
  //
  // Errors  E_RANK  both processes were taken for this rank.
  absl::Status CheckRival(const AttachRequested& request) const;
  // Adds the session of a request. The run of a rank's request becomes the job's run.
  void Add(const AttachRequested& request);
  void OnMapped(SessionId id);

  Session* Find(SessionId id);
  Session* OfRank(uint32_t rank);   // its session that has not ended; null: none
  std::vector<Session*> Current();  // sessions of ranks, attached and not fenced, by id
  bool HasCurrentBeside(SessionId id) const;
  uint64_t live_ranks() const;  // number of ranks' sessions that have not ended
  // True if no rank's session has got its answer yet, or has ended.
  bool has_only_waiting() const;
  // The world size of the spec has changed: no rank has detached. Ranks' sessions, if any, are waiting.
  void OnWorldChanged() { detached_.assign(world_size(), false); }

  // Sessions that wait for their answer, in order of arrival. A copy, because answers change the list.
  std::vector<SessionId> attaching() const { return attaching_; }
  // Starts creating a session's memory as soon as no other session of its rank exists. True if the memory is made.
  bool HasMemory(Session& session);
  void OnMemoryMade(SessionId id, bool made);
  void SetAttached(Session& session);

  // Begins a generation. Fences `lost`, a session of a rank (null: it ended while there was no daemon), and all current
  // sessions with `status`; returns those sessions without `lost`.
  std::vector<Session*> BeginGeneration(Session* lost, const absl::Status& status);
  void SetEnded(Session& session);
  // Emits CloseSession for ended sessions whose tasks have ended, and for which `in_use` is false.
  void CloseEnded(absl::FunctionRef<bool(SessionId)> in_use);
  std::vector<SessionId> DrainClosed();  // sessions closed since the last call

  // True if this daemon has begun a generation: a rank was lost, or a rank has attached without reattach. Sessions of the
  // daemon before that have not reattached by then are left behind.
  bool has_begun_anew() const { return has_begun_anew_ || generation_ > 0; }

  // Ranks that have detached properly and have not attached again.
  void SetDetached(uint32_t rank) { detached_[rank] = true; }
  void ClearDetached();
  bool is_detached(uint32_t rank) const { return detached_[rank]; }
  std::optional<uint32_t> FirstDetached() const;

  // Bytes of the arenas and rings of readers, until their sessions are closed.
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
  std::string run_;  // token of the newest rank's attach, or the recovered job's
  uint64_t generation_ = 0;
  bool has_begun_anew_ = false;
  std::map<SessionId, Session> sessions_;
  std::vector<SessionId> attaching_;
  std::vector<SessionId> closed_;
  std::vector<bool> detached_;  // by rank
};

}  // namespace forebay::daemon
