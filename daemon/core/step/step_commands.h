// SPDX-License-Identifier: Apache-2.0
// Checks and answers the commands of a job's ranks about its step.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/job_tasks.h"
#include "daemon/core/sessions/command_check.h"
#include "daemon/core/sessions/lease_table.h"
#include "daemon/core/sessions/session.h"
#include "daemon/core/step/nodes_decision.h"
#include "daemon/core/step/step_gathering.h"
#include "daemon/core/step/step_parts.h"
#include "daemon/core/update/sum_pages.h"
#include "protocol/wire.h"

namespace forebay::daemon {

// A command of the newest attempt, or of the next one, is accepted if no check fails. Other commands are answered here:
//
//   handled before (HasTaken)          OK, because only the answer was lost
//   of an older attempt, not a call    OK, and discarded: the rank's step call gets the error
//   of an older attempt, call or norm  the fault of that attempt, or E_GRAD_DROPPED
//   call of the committed step         the answer of that step, marked as repeated
//   call of the prepared step          the summary of this node
//   all others                         an error that says what to do
//
// The body of a step call, of an announcement and of a decision is in the arena of the rank. The body is copied first
// (Session::step_being_copied), and then checked. The rank counts as having called step while the body is copied.
//
// Ownership  The arguments of the constructor outlive this object.
class StepCommands {
 public:
  StepCommands(StepParts& step, StepGathering& gathering, NodesDecision& nodes,
               const LeaseTable& leases)
      : step_(step), gathering_(gathering), nodes_(nodes), leases_(leases) {}

  // Handle checked commands (CheckCommand) of a current session.
  void HandleGradient(Session& session, const protocol::Command& command);
  void HandleGradNorm(Session& session, const protocol::Command& command);
  void HandleAnnouncement(Session& session, const protocol::Command& command);
  void HandleStep(Session& session, const protocol::Command& command);
  void HandleDecision(Session& session, const protocol::Command& command);
  // Handle the copied body of a command. Ignored if the session was fenced, and the command answered, meanwhile.
  void OnStepRequest(Session& session, const StepRequestCopied& copied);
  void OnSummary(Session& session, const SummaryCopied& copied);

 private:
  void Answer(const Session& session, const protocol::Command& command,
              const absl::Status& status) const;
  bool HasTaken(const Session& session, const protocol::Command& command) const;
  SumPages::Range RangeOf(const protocol::Command& command) const;
  void CopyRequest(Session& session, const protocol::Command& command);
  void AddCall(Session& session, StepCall call);
  void HandleRepeated(const Session& session, const protocol::Command& command);

  absl::Status CheckCall(const Session& session, const protocol::Command& command,
                         const StepRequestCopied& copied) const;
  absl::Status CheckDelivered(uint32_t rank, std::span<const uint64_t> presence) const;
  absl::Status CheckOwnersDelivered() const;
  absl::Status CalledError(const Session& session, const std::string& then,
                           std::string_view hint) const;
  absl::Status LeasesHeldError(const Session& session, uint64_t step) const;
  absl::Status StepNumberError(uint64_t step) const;

  StepParts& step_;
  StepGathering& gathering_;
  NodesDecision& nodes_;
  const LeaseTable& leases_;
};

// Returns the limits against which CheckCommand() checks the commands of a session.
CommandLimits LimitsOf(const JobSpec& spec, const Session& session);

}  // namespace forebay::daemon
