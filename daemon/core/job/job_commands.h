// SPDX-License-Identifier: Apache-2.0
// Checks the commands of a job's sessions and dispatches them.
#pragma once

#include "daemon/core/job/job_life.h"
#include "daemon/core/job/job_parts.h"
#include "daemon/core/job/job_sessions.h"
#include "daemon/core/job/job_stop.h"

namespace forebay::daemon {

// Ownership  The arguments of the constructor outlive this object.
class JobCommands {
 public:
  JobCommands(JobParts& job, JobLife& life, const JobStop& stop, JobSessions& sessions)
      : job_(job), life_(life), stop_(stop), sessions_(sessions) {}

  void OnCommand(SessionId id, const protocol::Command& command);
  void OnStepRequest(const StepRequestCopied& copied) {
    Session* const session = job_.members.Find(copied.session);
    if (session != nullptr) job_.step.commands().OnStepRequest(*session, copied);
  }
  void OnSummary(const SummaryCopied& copied) {
    Session* const session = job_.members.Find(copied.session);
    if (session != nullptr) job_.step.commands().OnSummary(*session, copied);
  }

 private:
  absl::Status Check(const Session& session, const protocol::Command& command) const;
  void Dispatch(Session& session, const protocol::Command& command);
  void HandleInitial(Session& session, const protocol::Command& command);
  void HandleWrite(Session& session, const protocol::Command& command);
  void HandleGoBack(Session& session, const protocol::Command& command);

  JobParts& job_;
  JobLife& life_;
  const JobStop& stop_;
  JobSessions& sessions_;
};

}  // namespace forebay::daemon
