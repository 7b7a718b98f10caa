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

  // Takes one event and appends what is to be done, in order.
  void Handle(const Event& event, std::vector<Action>& actions);

  struct Limits {
    uint64_t dram_bytes = 0;
    uint64_t swap_bytes = 0;
  };
  // Returns the plan of an attach that creates a job; nothing changes. With `limits` it is that of an empty node with so
  // much DRAM and swap, else that of this node as it is.
  //
  // Errors  as the attach's.
  absl::StatusOr<JobPlan> Plan(const AttachRequested& request,
                               const std::optional<Limits>& limits) const;
  // The same of a job that is there. Without `limits` what it takes now, its blocks where they are; what `others`
  // hold is then all but it and the node.
  //
  // Errors  E_JOB_NAME   there is none.
  //         E_NOT_READY  it has come back, and nobody has attached to it since the start.
  absl::StatusOr<JobPlan> PlanOfJob(const JobName& name, const std::optional<Limits>& limits) const;

  // The newest step of a job at a durable level is not durable yet.
  bool HasStepsToMakeDurable() const;
  // By id; those of the ledger that nobody has attached to since the start too, without sessions.
  std::vector<JobView> Jobs() const;
  NodeView Node() const;
  // Returns the jobs of the newest durable ledger, also those that nobody has attached to since the start.
  std::vector<std::shared_ptr<const DurableJob>> DurableJobs() const;

  // CHECKs what must hold between any two events. Cost: linear in everything.
  void CheckInvariants() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace forebay::daemon
