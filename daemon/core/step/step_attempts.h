// SPDX-License-Identifier: Apache-2.0
// The attempts at the next step of a job.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "daemon/core/base/job_tasks.h"
#include "daemon/core/plan/job_spec.h"
#include "protocol/wire.h"

namespace forebay::daemon {

// Deliveries and step calls carry the number of their rank's attempt (wire.h). Only the gradients of the newest attempt are
// retained. An attempt ends when a rank begins a newer attempt, when a rank is lost, and with a fault: a value that is not
// finite.
//
// Invariants
// - The record's attempt is at most one ahead of the newest attempt: it is recorded before the first gradient is delivered.
// - A rank's attempt is at most one ahead of the newest attempt (Check()).
//
// Ownership  The arguments of the constructor outlive this object.
class StepAttempts {
 public:
  StepAttempts(const JobSpec& spec, JobTasks& io) : spec_(spec), io_(io) {}

  uint64_t newest() const { return newest_; }
  // Returns the first attempt that has not ended.
  uint64_t open() const;

  // Sets the newest attempt. Older attempts end.
  void Begin(uint64_t attempt, uint64_t step);
  // Ends the newest attempt with a fault. Begin() of the next attempt follows.
  void EndWithFault(const absl::Status& fault);
  // Begins attempt 0 of the step after a committed one.
  void BeginStep();
  // Begins attempt 0 of the same step for ranks that have attached again. All sessions of older attempts are fenced.
  void BeginGeneration(uint64_t step);
  // Begins attempt 0 of the same step for the ranks of another world. The job is recorded from scratch.
  void BeginWorld();
  void Recover(uint64_t attempt);

  // Emits RecordAttempt, unless the record has this attempt.
  void RecordOpen(uint64_t attempt, uint64_t step);
  // Returns the attempt for a record of the whole job.
  enum class Gradients : uint8_t { kNone, kDelivered };
  uint64_t Record(Gradients gradients);

  // Errors  E_PROTOCOL  the attempt is more than one ahead. A correct client begins a new attempt only after it has sent a
  //                     command in the attempt before.
  absl::Status Check(uint32_t rank, const protocol::Command& command) const;
  // Returns the fault of an attempt that has ended, or E_GRAD_DROPPED.
  absl::Status DroppedError(uint64_t attempt, uint64_t step) const;

 private:
  void Set(uint64_t attempt);

  const JobSpec& spec_;
  JobTasks& io_;
  uint64_t newest_ = 0;
  uint64_t recorded_ = 0;
  uint64_t faulty_ = 0;  // the last attempt that ended with a fault
  absl::Status fault_;   // fault of attempt faulty_; OK if no attempt had a fault
};

}  // namespace forebay::daemon
