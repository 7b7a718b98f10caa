// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/update/replica_digests.h"

#include "protocol/os/check.h"

namespace forebay::daemon {

ReplicaDigests::ReplicaDigests(const JobSpec& spec, JobTasks& io, const StepPipeline& pipeline)
    : spec_(spec), io_(io), pipeline_(pipeline), store_(pipeline.store()) {
  if (spec.layout->spec().has_replicas) digests_.resize(spec.layout->partitions().size());
}

void ReplicaDigests::Begin() {
  FOREBAY_CHECK(!in_progress());
  for (uint32_t partition = 0; partition < digests_.size(); ++partition) {
    if (!pipeline_.queue().HasUpdated(partition) || store_.map().is_on_swap(partition)) continue;
    waiting_.push_back(partition);
  }
  Start();
}

void ReplicaDigests::Start() {
  while (!waiting_.empty() && running_.size() < spec_.options.workers) {
    const uint32_t partition = waiting_.front();
    waiting_.pop_front();
    const TaskId task =
        io_.Start(TaskKind::kDigestWeights, 0,
                  DigestWeights{.offset_bytes = store_.PlaceOfWeights(partition, 0).offset_bytes,
                                .bytes = spec_.layout->partition_bytes(partition)});
    running_.emplace(task, partition);
  }
}

void ReplicaDigests::OnDigested(const TaskDone& done) {
  const auto node = running_.extract(done.task);
  FOREBAY_CHECK(!node.empty());
  digests_[node.mapped()] = done.checksum;
  Start();
}

}  // namespace forebay::daemon
