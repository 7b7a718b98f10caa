// SPDX-License-Identifier: Apache-2.0
// Reserves the swap slots of jobs that a daemon recovers from its disk, or from the records (KeptRecord) of a killed daemon.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/base/durable_job.h"
#include "daemon/core/base/node_options.h"
#include "nvme/slot_map.h"

namespace forebay::daemon {

// Adds the job's durable step in `node.recovered` to the job, and reserves the slots that the job names.
//
// Errors  E_CORRUPT  another job has some of the slots. No slot is then reserved.
absl::Status ReserveKilled(DurableJob& job, NodeOptions& node);

// Reserves the slots of earlier steps (DurableJob::before) for the jobs of `node.recovered`, because the volume does not
// reserve these slots.
void ReserveBefore(NodeOptions& node);

// Reserves the spare slots of the jobs, and their slots for pages of gradient sums, unless another job has them. Adds the jobs
// to `node.recovered`. Called after ReserveKilled() of all jobs.
void AddKilled(std::vector<DurableJob> jobs, NodeOptions& node);

// Returns the node's job with the same owner and name, or null if the node has no such job.
std::shared_ptr<const DurableJob> FindNamed(const DurableNode& node, const DurableJob& job);

}  // namespace forebay::daemon
