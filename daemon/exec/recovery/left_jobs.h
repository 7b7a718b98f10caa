// SPDX-License-Identifier: Apache-2.0
// Reads the jobs that the previous daemon has left in memory, from descriptors of their records and arenas.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/core/base/durable_job.h"
#include "daemon/core/base/node_options.h"
#include "daemon/exec/arena_policy.h"
#include "daemon/exec/job_memory.h"
#include "daemon/exec/recovery/absent_ranks.h"
#include "daemon/exec/recovery/job_records.h"
#include "daemon/exec/recovery/stored_descriptors.h"
#include "protocol/os/unique_fd.h"

namespace forebay::daemon {

class SwapSpace;

// A job of a daemon that has stopped or was killed, in the state of its record.
struct RecordedJob {
  DurableJob job;
  uint64_t nonce = 0;         // nonce of the swap volume with the job's slots
  AdoptedRecord record = {};  // no record if KeptMemory::has_record is false
};

// A job that continues. `memory` has arenas of the previous daemon.
struct AdoptedJob {
  JobId id = 0;
  JobMemory memory;
  std::map<uint32_t, AbsentRank> ranks = {};  // by rank
  AdoptedRecord record = {};
};

// Takes the records out of `left`. Omits records from which no job can continue, and logs the reason.
//
// Errors  E_CONFIG  a record is of a newer version. This daemon must not start, since it would free the job of the record.
absl::StatusOr<std::vector<RecordedJob>> ReadRecords(DescriptorsByName& left);

// Checks that the slots of all jobs are on the volume of `swap`; null: the daemon has no swap.
//
// Errors  E_CONFIG  it is not: started with other swap.paths they are not lost.
absl::Status CheckVolume(const std::vector<RecordedJob>& recorded, const SwapSpace* swap);

// Retained staging arena of the earlier daemon. `name` is empty if no arena with slots of this size exists.
struct LeftStaging {
  std::string name;
  protocol::UniqueFd fd;
};
LeftStaging FindStaging(uint64_t slot_bytes, DescriptorsByName& left);

// Continues the jobs. Takes their arenas out of `left` and adds the jobs to `node`. The durable state of a job on the disk of
// `node` stays durable. If a job was killed in an update, undoes the elements that workers had in progress, and copies blocks
// from the staging slots of `staging` to the same slots of `swap`. If the id of a job belongs to another job on disk, the job
// gets a new id, which a job without slots can. `swap` may be null. Omits a job that cannot continue, and logs the reason.
// Destroying the arenas does not free their pages. Blocks, but populates no page.
std::vector<AdoptedJob> AdoptJobs(std::vector<RecordedJob> jobs, const SwapSpace* swap,
                                  const LeftStaging& staging, const ArenaPolicy& arenas,
                                  DescriptorsByName& left, NodeOptions& node);

}  // namespace forebay::daemon
