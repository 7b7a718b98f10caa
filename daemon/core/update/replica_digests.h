// SPDX-License-Identifier: Apache-2.0
// Computes digests of weights that other nodes have too. The next step compares the digests of replicas.
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

// Digests partitions in DRAM once a step that has updated them is published. Weights do not change while in_progress(): no step
// is prepared, and nothing is written to them.
class ReplicaDigests {
 public:
  // The arguments outlive this object.
  ReplicaDigests(const JobSpec& spec, JobTasks& io, const StepPipeline& pipeline);

  // Begins to digest the partitions that the published step has updated.
  void Begin();
  void OnDigested(const TaskDone& done);
  bool in_progress() const { return !waiting_.empty() || !running_.empty(); }

  // Returns digests by partition, 0 if a digest is not known. Empty for a layout without replicas.
  std::span<const uint64_t> all() const { return digests_; }

 private:
  void Start();

  const JobSpec& spec_;
  JobTasks& io_;
  const StepPipeline& pipeline_;
  const BlockStore& store_;
  std::vector<uint64_t> digests_;
  std::deque<uint32_t> waiting_;  // partitions
  std::map<TaskId, uint32_t> running_;
};

}  // namespace forebay::daemon
