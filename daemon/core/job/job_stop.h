// SPDX-License-Identifier: Apache-2.0
// Planned stop and record of a job. A job that stops becomes quiescent between two steps, and is then recorded. Its arenas are
// retained, so that the next daemon can continue the job. The ranks attach again, and repeat commands that were not answered.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "daemon/core/job/job_life.h"
#include "daemon/core/job/job_parts.h"
#include "daemon/core/job/job_world.h"

namespace forebay::daemon {

// Ownership  The arguments of the constructor outlive this object.
class JobStop {
 public:
  JobStop(JobParts& job, const JobLife& life, const JobWorld& world)
      : job_(job), life_(life), world_(world) {}

  // Makes the job quiescent as soon as possible, so that the next daemon can continue it.
  void Request() { state_ = std::max(state_, State::kWanted); }
  bool is_requested() const { return state_ != State::kNone; }
  bool is_stopping() const { return state_ == State::kWanted; }
  // True once the job no longer changes.
  bool is_quiescent() const { return state_ >= State::kSaving; }
  // True if the stop has ended. The job is then quiescent, durable if it has durable steps, and recorded if
  // NodeOptions::keeps_jobs is set.
  bool has_stopped() const { return state_ == State::kDone; }
  // False if the next daemon cannot continue the job from memory. Also false if the next daemon restores the job from the disk,
  // or if the ranks write the parameters again.
  bool MayStop() const;
  void TryStop();
  // True if fetches may be answered. During a stop, a rank with a lease on weights of the cache may wait for another rank
  // that has no lease yet. Once no session has a lease and no gradient has arrived, no more leases are granted.
  bool MayServeFetches() const;
  // Returns the sessions of ranks that continue with the next daemon.
  std::vector<SessionId> StoppedSessions() const;

  // Creates a new record of the job if it has none or an outdated one, as soon as no task changes the job.
  void TryRecord();
  // Marks the record as outdated, because the plan has changed.
  void ForgetRecord() { is_recorded_ = false; }
  // Ends the record, because the job has failed.
  void EndRecord();
  // True if a record names swap slots of the job, so that the next daemon must find the volume.
  bool WantsVolume() const {
    return is_recorded_ && world_.swap_bytes() > 0 && !job_.spec.options.loses_swap;
  }

 private:
  enum class State : uint8_t {
    kNone,    // no stop was requested
    kWanted,  // the stop was requested, and the job becomes quiescent
    kSaving,  // the job no longer changes, and its step is being made durable
    kDone,    // the job has stopped: see has_stopped()
  };

  bool IsQuiet() const;
  bool MissesRank() const;
  bool loses_slots() const { return job_.spec.options.loses_swap && world_.swap_bytes() > 0; }
  // True if a record of the present run exists.
  bool has_record() const { return is_recorded_ && recorded_run_ == job_.members.run(); }
  void Record();

  JobParts& job_;
  const JobLife& life_;
  const JobWorld& world_;
  State state_ = State::kNone;
  bool is_recorded_ = false;  // a record exists, and every change is recorded
  std::string recorded_run_;
};

}  // namespace forebay::daemon
