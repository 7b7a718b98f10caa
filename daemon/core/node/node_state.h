// SPDX-License-Identifier: Apache-2.0
// The deterministic state machine of one node: jobs, sessions, admission. Events in, actions out;
// no clock, no I/O, no thread, no randomness, so that the same events give the same actions in the
// daemon and in a simulator.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/job_name.h"
#include "daemon/core/base/limits.h"
#include "daemon/core/base/views.h"

namespace forebay::daemon {

class Job;
class StagingPool;

// Owns every job of the node.
//
// Threads  The loop thread alone.
// Errors   What clients get wrong is answered by actions. A TaskDone without a task, or a SessionId
//          used twice, is a bug of the executor and ends the process.
class NodeState {
 public:
  using Options = NodeOptions;

  explicit NodeState(const Options& options);
  NodeState(const NodeState&) = delete;
  NodeState& operator=(const NodeState&) = delete;
  ~NodeState();

  // Handles one event, and appends the actions to take to `actions`, in order.
  void Handle(const Event& event, std::vector<Action>& actions);

  struct Limits {
    uint64_t dram_bytes = 0;
    uint64_t swap_bytes = 0;
  };
  // Returns the plan of an attach that creates a job; nothing changes. With `limits` the plan is for an empty node with so much
  // DRAM and swap, otherwise for this node as it is.
  //
  // Errors  as the attach's.
  absl::StatusOr<JobPlan> Plan(const AttachRequested& request,
                               const std::optional<Limits>& limits) const;
  // Returns the plan of an existing job. Without `limits` the plan is what the job takes now, with its blocks where they are.
  // `others` is then what all but this job and the node take.
  //
  // Errors  E_JOB_NAME   there is none.
  //         E_NOT_READY  the job was recovered, and nobody has attached to it since the start.
  absl::StatusOr<JobPlan> PlanOfJob(const JobName& name, const std::optional<Limits>& limits) const;

  // True if the newest step of a job with durable steps is not durable yet.
  bool HasStepsToMakeDurable() const;
  // Returns views of all jobs, by id. Jobs of the ledger that nobody has attached to since the start are included, without
  // sessions.
  std::vector<JobView> Jobs() const;
  NodeView Node() const;
  // Returns the jobs of the newest durable ledger, also those that nobody has attached to since the start.
  std::vector<std::shared_ptr<const DurableJob>> DurableJobs() const;

  // CHECKs the invariants between any two events. Cost: linear in everything.
  void CheckInvariants() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace forebay::daemon
