// SPDX-License-Identifier: Apache-2.0
// Digests of weights that other nodes have too: replicas are compared by them, with the next step.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <span>
#include <vector>

#include "daemon/core/base/events.h"
#include "daemon/core/base/job_tasks.h"
#include "daemon/core/plan/job_spec.h"
#include "daemon/core/update/step_pipeline.h"

namespace forebay::daemon {

// Of partitions in DRAM, once a step that has updated them is published. Weights do not change meanwhile: no step is
// prepared, and nothing is written to them, while it is in_progress().
class ReplicaDigests {
 public:
  // What is given outlives it.
  ReplicaDigests(const JobSpec& spec, JobTasks& io, const StepPipeline& pipeline);

  // A step is published.
  void Begin();
  void OnDigested(const TaskDone& done);
  bool in_progress() const { return !waiting_.empty() || !running_.empty(); }

  // By partition; 0: not known. Of a layout without replicas empty.
  std::span<const uint64_t> all() const { return digests_; }

 private:
  void Start();

  const JobSpec& spec_;
  JobTasks& io_;
  const StepPipeline& pipeline_;
  std::vector<uint64_t> digests_;
  std::deque<uint32_t> waiting_;  // partitions
  std::map<TaskId, uint32_t> running_;
};

}  // namespace forebay::daemon
