// SPDX-License-Identifier: Apache-2.0
// Jobs that a daemon comes back with, from its disk or (KeptRecord) of one that was killed: its swap has their slots.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/base/durable_job.h"
#include "daemon/core/base/limits.h"
#include "nvme/slot_map.h"

namespace forebay::daemon {

// Slots become the job's; those that `node.recovered` names for it are its own already.
//
// Errors  E_CORRUPT  another one has some of them; no slot has changed hands.
absl::Status ReserveSlots(const DurableJob& job, std::vector<nvme::Slot> slots, NodeOptions& node);

// What is durable of the job, by `node.recovered`, becomes part of it, and slots that it names its own.
//
// Errors  of ReserveSlots.
absl::Status ReserveKilled(DurableJob& job, NodeOptions& node);

// Slots of the steps before (DurableJob::before) of what `node.recovered` has become those of its jobs: the volume does not
// keep them.
void ReserveBefore(NodeOptions& node);

// After ReserveKilled() of all of them: slots that hold nothing are the jobs' where nobody else has them, and
// `node.recovered` has the jobs.
void AddKilled(std::vector<DurableJob> jobs, NodeOptions& node);

// Of the jobs of a node.
std::shared_ptr<const DurableJob> FindNamed(const DurableNode& node, const DurableJob& job);

}  // namespace forebay::daemon
