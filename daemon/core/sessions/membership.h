// SPDX-License-Identifier: Apache-2.0
// The sessions of a job. Decides which clients may attach, and tracks the rank of each session, fenced sessions, and ranks that
// have detached.
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
// Errors  E_LAYOUT  the layout differs.
//         E_RANK    the world size differs, and the job is sharded.
//         E_OPTION  the level of durability differs.
absl::Status CheckTraits(const AttachRequested& request, const JobTraits& job);

// Returns the error (E_RANK_LOST) of a session that reattaches after its job has begun a new generation without the session.
absl::Status LeftBehindError(const std::string& name, uint64_t step);

// Returns the error (E_JOB_EXISTS) of an attach to a job that is at `step` and belongs to another run.
absl::Status JobExistsError(const std::string& name, uint64_t step, const std::string& run);

// A rank has at most one session that has not ended. When a rank is lost, a new generation begins: the sessions of all other
// ranks are fenced, and their clients must attach again. Readers have no rank. The end of a reader does not affect the ranks,
// and readers are never fenced.
//
// Ownership  `spec` and `io` outlive the Membership. A Session lives until CloseEnded() closes it.
class Membership {
 public:
  enum class Ready : uint8_t { kNo, kYes };

  Membership(const JobSpec& spec, JobTasks& io)
      : spec_(spec),
        io_(io),
        run_(spec.recovered == nullptr ? std::string() : spec.recovered->run),
        detached_(spec.world_size(), false) {}

  // Checks that this client's layout, world size and sizes allow an attach. `room`: the request that the job's sessions have in
  // common. A different world size is allowed if no rank has a session.
  absl::Status CheckAttach(const AttachRequested& request, const SessionRequest& room) const;
  // Checks that this client's run may attach. The job's own run may attach, and, if no rank has a session, a run that asks to
  // resume the job. A job whose parameters are not written yet (`ready`) belongs to no run.
  //
  // Errors  E_BUSY        processes of another run are attached.
  //         E_JOB_EXISTS  another run has trained the job, and this run does not ask to resume the job.
  absl::Status CheckRun(const AttachRequested& request, uint64_t committed_step, Ready ready) const;
  // Checks that the client may have the rank that it asks for. The new session replaces the rank's session, unless that session
  // belongs to another running process of the same launch and is neither fenced nor disconnected.
  //
  // Errors  E_RANK  another process of the launch already has this rank.
  absl::Status CheckRival(const AttachRequested& request) const;
  // Adds the session of a request. The run of a rank's request becomes the job's run.
  void Add(const AttachRequested& request);
  void OnMapped(SessionId id);

  Session* Find(SessionId id);
  Session* OfRank(uint32_t rank);   // the rank's session that has not ended, or null
  std::vector<Session*> Current();  // sessions of ranks, attached and not fenced, by id
  bool HasCurrentBeside(SessionId id) const;
  uint64_t live_ranks() const;  // number of ranks' sessions that have not ended
  // True if all sessions of ranks wait for their first answer, and none has ended.
  bool has_only_waiting() const;
  // Handles a change of the spec's world size: no rank counts as detached. Sessions of ranks, if any, wait for their answer.
  void OnWorldChanged() { detached_.assign(world_size(), false); }

  // Returns a copy of the sessions that wait for their answer, in order of arrival. Answers change the list itself.
  std::vector<SessionId> attaching() const { return attaching_; }
  // Starts creating a session's memory as soon as no other session of its rank exists. True if the memory has been created.
  bool HasMemory(Session& session);
  void OnMemoryMade(SessionId id, bool made);
  void SetAttached(Session& session);

  // Begins a generation. Fences `lost`, the session of the lost rank, and all current sessions with `status`. Returns the
  // fenced sessions without `lost`. `lost` is null if the rank ended while no daemon ran.
  std::vector<Session*> BeginGeneration(Session* lost, const absl::Status& status);
  void SetEnded(Session& session);
  // Emits CloseSession for ended sessions whose tasks have ended, and for which `in_use` is false.
  void CloseEnded(absl::FunctionRef<bool(SessionId)> in_use);
  std::vector<SessionId> DrainClosed();  // sessions closed since the last call

  // True if this daemon has begun a generation: a rank was lost, or a rank has attached without reattach. Sessions of the
  // previous daemon that have not reattached by then can no longer reattach.
  bool has_begun_anew() const { return has_begun_anew_ || generation_ > 0; }

  // Ranks that have detached properly and have not attached again.
  void SetDetached(uint32_t rank) { detached_[rank] = true; }
  void ClearDetached();
  bool is_detached(uint32_t rank) const { return detached_[rank]; }
  std::optional<uint32_t> FirstDetached() const;

  // Returns the bytes of arenas and rings of readers whose sessions are not closed.
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
