// SPDX-License-Identifier: Apache-2.0
// Jobs that outlive their daemon in memory: named descriptors of arenas, and of a record of each job. The keeper of the
// descriptors (fd_store.h) does not know their contents.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/core/base/durable_job.h"
#include "daemon/core/base/node_options.h"
#include "daemon/exec/arena_policy.h"
#include "daemon/exec/job_memory.h"
#include "daemon/exec/recovery/kept_record.h"
#include "protocol/os/unique_fd.h"

namespace forebay::daemon {

class SwapSpace;

using DescriptorsByName = std::map<std::string, protocol::UniqueFd>;

// Function of the keeper: returns when the service manager has every descriptor that was stored.
using FlushStore = absl::AnyInvocable<absl::Status()>;

// Functions of the keeper that store and drop one descriptor while the daemon runs, so that another daemon finds it if this
// daemon is killed. Both run on the loop thread.
struct DescriptorStore {
  absl::AnyInvocable<absl::Status(const std::string& name, int fd)> keep;
  absl::AnyInvocable<void(const std::string& name)> drop;
};

// Returns the bytes of a descriptor's file. Errors: E_INTERNAL.
absl::StatusOr<uint64_t> SizeOf(const protocol::UniqueFd& fd);

std::string WeightsDescriptor(JobId job);
std::string StatesDescriptor(JobId job);
std::string StepDescriptor(JobId job);
std::string GradientsDescriptor(JobId job, uint32_t rank);
std::string ProcessDescriptor(JobId job, uint32_t rank, bool has_detached);
// Name of a staging arena with slots of this size. The arena with the largest number is the newest.
std::string StagingDescriptor(uint64_t slot_bytes, uint64_t number);
// Name of a record. Each record of a job has another number; the newest intact record counts.
std::string RecordDescriptor(JobId job, uint64_t number);

// A job of a daemon that has stopped or was killed, in the state of its record.
struct RecordedJob {
  DurableJob job;
  uint64_t nonce = 0;                       // nonce of the swap volume with the job's slots
  std::unique_ptr<KeptRecord> record = {};  // null if KeptMemory::has_record is false
  uint64_t number = 0;                      // number in the name of the record's descriptor
  // True if `record` is new, and the descriptor has a record of release 0.2.0 (record_before.h).
  bool is_converted = false;
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
std::vector<AdoptedArenas> AdoptJobs(std::vector<RecordedJob> jobs, const SwapSpace* swap,
                                     const LeftStaging& staging, const ArenaPolicy& arenas,
                                     DescriptorsByName& left, NodeOptions& node);

}  // namespace forebay::daemon
