// SPDX-License-Identifier: Apache-2.0
// The sessions of a job: answers attaches, and ends sessions by their clients, by a lost rank, and with the job.
#pragma once

#include <vector>

#include "daemon/core/job/job_life.h"
#include "daemon/core/job/job_parts.h"
#include "daemon/core/job/job_stop.h"
#include "daemon/core/job/job_world.h"

namespace forebay::daemon {

// Ownership  The arguments of the constructor outlive this object.
class JobSessions {
 public:
  JobSessions(JobParts& job, JobLife& life, const JobWorld& world, JobStop& stop)
      : job_(job), life_(life), world_(world), stop_(stop) {}

  // Checks that this client may attach: its layout and sizes, and that the job has not failed.
  absl::Status CheckAttach(const AttachRequested& request) const;
  // Adds the session of a checked request. Fences a live session of the same rank.
  void Attach(const AttachRequested& request);
  void OnMapped(SessionId id) { job_.members.OnMapped(id); }
  void OnReconnected(const SessionReconnected& event);
  void OnMemoryMade(SessionId id, const absl::Status& status);
  void AnswerAttaches();

  void OnEnded(SessionId id, EndCause cause);
  // Handles the end of a rank that was attached to the previous daemon, like the end of a session of this daemon. The rank is
  // refused if it returns later.
  void OnRankEnded(const RankEnded& event);
  // Ends readers that hold up the update of `step`, which has waited long enough. If `step` is 0, ends leases of ranks that
  // have not returned, because a fetch has waited long enough for them.
  void OnLeaseTimeExpired(uint64_t step);
  // Evicts the sessions of ranks that wait for the answer to their attach.
  void EvictWaiting(const absl::Status& reason);
  void CloseEnded();
  // Returns the sessions whose CloseSession was emitted since the last call.
  std::vector<SessionId> DrainClosed() { return job_.members.DrainClosed(); }

  // Errors  E_BUSY  sessions are attached.
  absl::Status DeleteJob();
  // Ends all sessions and fails the job, which is freed as soon as no session and no task uses it.
  void EndAll(const absl::Status& reason);
  // Fails the job. All waiting commands are answered with the first error. Later commands get E_JOB_FAILED. Running tasks return
  // their resources.
  void Fail(const absl::Status& first_error);

 private:
  absl::Status CheckReattach(const AttachRequested& request) const;
  bool MayAnswerAttach(const Session& session) const;
  void AnswerAttachOk(Session& session);
  AnswerAttach TermsOf(const Session& session) const;
  bool MayComeBack(const Session& session) const;
  void Evict(Session& session, const absl::Status& reason);
  void End(Session& session, const absl::Status& status);
  void EndInitial(Session& writer, const absl::Status& status);
  void OnRankFailed(uint32_t rank, Session* lost);
  void OnRankDetached(const Session& session);
  void AnswerWaiting(Session& session, const absl::Status& status);

  JobParts& job_;
  JobLife& life_;
  const JobWorld& world_;
  JobStop& stop_;
};

}  // namespace forebay::daemon
