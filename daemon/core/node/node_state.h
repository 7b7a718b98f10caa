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
#include "daemon/core/base/node_options.h"
#include "daemon/core/base/views.h"

namespace forebay::daemon {

class Job;
class StagingPool;

// Owns every job of the node.
//
// Threads  The loop thread alone.
// Errors   Actions answer the errors of clients. A TaskDone without a task, or a SessionId
//          used twice, is a bug of the executor and ends the process.
class NodeState {
 public:
  using Options = NodeOptions;

  explicit NodeState(const Options& options);
  NodeState(const NodeState&) = delete;
  NodeState& operator=(const NodeState&) = delete;
  ~NodeState();

  // Handles one event, and appends the resulting actions to `actions`, in the order in which they must be executed.
  void Handle(const Event& event, std::vector<Action>& actions);

  struct Limits {
    uint64_t dram_bytes = 0;
    uint64_t swap_bytes = 0;
  };
  // Returns the plan of an attach that would create a job. With `limits` the plan is for an empty node with that much DRAM and
  // swap, otherwise for the current state of this node.
  //
  // Errors  as the attach's.
  absl::StatusOr<JobPlan> Plan(const AttachRequested& request,
                               const std::optional<Limits>& limits) const;
  // Returns the plan of an existing job. Without `limits` the plan has the bytes that the job takes now, with the current
  // places of its blocks, and JobPlan::others has the bytes of all other jobs.
  //
  // Errors  E_JOB_NAME   no such job exists.
  //         E_NOT_READY  the job was recovered, and no client has attached to it since the daemon was started.
  absl::StatusOr<JobPlan> PlanOfJob(const JobName& name, const std::optional<Limits>& limits) const;

  // True if the newest step of a job with durable steps is not durable yet.
  bool HasStepsToMakeDurable() const;
  // Returns views of all jobs, by id. Includes jobs of the ledger to which no client has attached since the daemon was started.
  // These have no sessions.
  std::vector<JobView> Jobs() const;
  NodeView Node() const;
  // Returns the jobs of the newest durable ledger, including jobs to which no client has attached since the daemon was started.
  std::vector<std::shared_ptr<const DurableJob>> DurableJobs() const;

  // CHECKs the invariants between any two events. Takes time linear in the size of the state.
  void CheckInvariants() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace forebay::daemon
