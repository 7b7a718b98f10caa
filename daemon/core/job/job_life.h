// SPDX-License-Identifier: Apache-2.0
// The life of a job: creates it, restores it from a ledger or from retained memory, and frees it.
#pragma once

#include <memory>

#include "daemon/core/job/job_parts.h"

namespace forebay::daemon {

// Ownership  `job` outlives this object.
class JobLife {
 public:
  enum class State : uint8_t {
    // The job waits for DRAM, and attaches wait for the job.
    kQueued,
    // The memory and the swap of the job are being created.
    kCreating,
    // The arenas of a recovered job are created, and their bytes are being restored.
    kRestoring,
    // Ranks write the initial parameters, or train.
    kActive,
    // The job could not be created or restored, or has neither parameters nor sessions. A recovered job is parked again. In
    // this state and in the states below no client may attach. The job is freed as soon as no session and no task uses it.
    kDiscarded,
    // The job was deleted. Nothing remains of it.
    kDeleted,
    // The job returns to a durable step, at which it is parked.
    kGoingBack,
  };
  using enum State;

  explicit JobLife(JobParts& job) : job_(job) {}

  State state() const { return state_; }
  // True once tasks that create memory were emitted. Stays true until the job is freed.
  bool has_begun() const { return has_begun_; }
  bool is_ending() const { return state_ >= kDiscarded; }
  bool goes_back() const { return state_ == kGoingBack; }
  // True once FreeJob was emitted, so that the Job can be destroyed.
  bool is_freed() const { return is_freed_; }

  // Emits the tasks that create the job's memory and swap. Called once enough DRAM is free.
  void Begin();
  // Refuses the job. Attaches are answered with `reason`.
  void Refuse(const absl::Status& reason);
  void OnMemoryMade(const TaskDone& done);
  void OnRestored(const TaskDone& done);
  void OnExtraStatesRestored(const TaskDone& done);
  void SetError(const absl::Status& error) { error_ = error; }
  void GoBackTo(std::shared_ptr<const DurableJob> step);
  // Deletes the job, also one that returns to a durable step. Does nothing if the job was deleted before.
  void Delete();
  void FreeWhenUnused();

  // Returns the error of the creation, the restore or the step. OK: none.
  const absl::Status& error() const { return error_; }
  // Returns the answer to commands and attaches of a job whose step has failed.
  absl::Status FailedStatus() const;

  // True if the job is recovered, and is not restored yet or could not be restored.
  bool is_unrestored() const {
    return job_.spec.recovered != nullptr && (state_ < kActive || state_ == kDiscarded);
  }
  // Returns the durable step to which the job returns, or the recovered job if is_unrestored(). Null otherwise.
  std::shared_ptr<const DurableJob> unrestored() const;
  // True if the job is recovered in the middle of an update. If the update cannot continue, the job continues from its durable
  // step or is lost.
  bool is_resumed() const;

  // WantsLedger() is true if a gathered step waits for the next ledger. ForLedger() returns the job's entry in that ledger, or
  // null if it has none.
  bool WantsLedger() const { return job_.durable.is_gathered() && !is_ending(); }
  std::shared_ptr<const DurableJob> ForLedger() const;
  // Returns the job's entry in the newest durable ledger, or null if it has none.
  std::shared_ptr<const DurableJob> durable() const;
  // True if the job was recovered, or if the next ledger names it. Ledgers may then name the job's slots.
  bool is_in_ledger() const {
    return job_.spec.recovered != nullptr || job_.durable.ForLedger() != nullptr;
  }

 private:
  void Enter(State next);
  void AddError(const absl::Status& status) { error_.Update(status); }  // retains the first error
  void StartRestore();
  void TryEndRestore();

  JobParts& job_;
  State state_ = kQueued;
  bool has_begun_ = false;
  bool is_freed_ = false;
  uint32_t tasks_ = 0;  // running tasks that create memory and swap, or restore extra states
  std::shared_ptr<const DurableJob> goes_back_to_;
  absl::Status error_;
};

}  // namespace forebay::daemon
