// SPDX-License-Identifier: Apache-2.0
// Gathers the next step of a job: the gradients, the announcements and the step calls of its ranks.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "daemon/core/sessions/session.h"
#include "daemon/core/sessions/step_barrier.h"
#include "daemon/core/step/step_parts.h"
#include "protocol/wire.h"

namespace forebay::daemon {

// A step is gathered in attempts. Deliveries and step calls carry the number of their rank's attempt (wire.h). Only the gradients
// of the newest attempt are retained. An attempt ends with the decision of the step (Commit). It ends without a decision, and its
// gradients are dropped, in these cases:
//
//   FollowAttempt    a rank begins the next attempt; ranks that wait in step get E_GRAD_DROPPED
//   DropFaulty       a gradient or a sum is not finite, or sums are lost; ranks that wait in step get the fault
//   OnRankFailed     a rank is lost; all ranks attach again, and begin with attempt 0
//   BeginAttempt     the nodes drop a prepared step; no rank waits
//   GiveUp           the daemon stops, and a rank is missing
//   DropForNewWorld  the ranks of another world wait for their attach
//
// RefuseCalls() does not end the attempt: the gradients are retained, and the ranks may call step again.
//
// Example: two ranks gather step 42.
//
//   rank 0 delivers in attempt 0          attempt 0
//   rank 0 calls step in attempt 0        its call waits for rank 1
//   rank 1 delivers NaN in attempt 0      attempt 1; rank 0's call gets E_NONFINITE
//   rank 1 calls step in attempt 0        refused with E_NONFINITE, the fault of attempt 0
//   both deliver and call in attempt 1    the decision of step 42
//
// Invariants
// - The record's attempt is at most one ahead of the newest attempt: it is recorded before the first gradient is delivered.
// - A rank's attempt is at most one ahead of the newest attempt (CheckAttempt()).
//
// Ownership  The argument of the constructor outlives this object.
class StepGathering {
 public:
  // Sets the recovered job's attempt.
  explicit StepGathering(StepParts& step);

  uint64_t attempt() const { return attempt_; }  // the newest attempt
  // Errors  E_PROTOCOL  the attempt is more than one ahead. A correct client begins a new attempt only after it has sent a
  //                     command in the attempt before.
  absl::Status CheckAttempt(const Session& session, const protocol::Command& command) const;
  // Returns the fault of an attempt that has ended, or E_GRAD_DROPPED.
  absl::Status DroppedError(uint64_t attempt) const;
  // Begins the attempt of a checked command if it is newer than the newest attempt.
  void FollowAttempt(const Session& session, const protocol::Command& command);
  // Begins the next attempt. Ranks that wait in step get `status`. The delivered gradients are dropped.
  void BeginAttempt(const absl::Status& status);
  // Emits RecordAttempt before the first gradient of the newest attempt: if this daemon is killed, that attempt has ended.
  void RecordNext();
  // Returns the attempt for a record of the whole job.
  uint64_t Record();

  // Begins the next attempt if the gradients have a fault.
  void DropFaulty();
  // Begins attempt 0 of the step after a committed one. The sums of the committed step are retained for its update.
  void Commit();
  // Refuses every step call with `status`. The gradients are retained.
  void RefuseCalls(const absl::Status& status, uint16_t flags = 0);
  // Handles an announcement: the rank's later deliveries belong to its last pass. If ranks announce different scalars, no block
  // is updated early.
  void Announce(uint32_t rank, StepCall call);
  // Drops the early updates, because masters are going to be written. No early update begins before the next announcement.
  void DropEarlyUpdates();

  // Starts all additions and early updates that can start. If `may_update_early` is false, no early update begins.
  void Advance(bool may_update_early);
  // Starts additions that can start.
  void Pump();
  // Moves pages of gradient sums. Early updates may free frames, unless a norm waits for the sums.
  void PumpSums();

  void OnRankDetached(uint32_t rank);  // refuses the step calls of all ranks
  // Handles the loss of a rank. A step that not all ranks have called is dropped. A step that all ranks have called continues.
  // `lost` is null if the rank had no session with this daemon.
  void OnRankFailed(const Session* lost, const absl::Status& status);
  void GiveUp();
  void DropForNewWorld();
  // Follows a change of the spec's world size and plan. The extra_state of ranks in both worlds is retained. Called in phase
  // kOpen, before gradients are delivered and while no task runs.
  void OnWorldChanged();

 private:
  void Set(uint64_t attempt);
  void RecordOpen(uint64_t attempt);
  void Restart();
  void Drop(const absl::Status& status);
  void FollowSums();
  void UpdateEarly();

  StepParts& step_;
  uint64_t attempt_ = 0;
  uint64_t recorded_ = 0;  // the attempt in the record
  uint64_t faulty_ = 0;    // the last attempt that ended with a fault
  absl::Status fault_;     // fault of attempt faulty_; OK if no attempt had a fault
};

}  // namespace forebay::daemon
