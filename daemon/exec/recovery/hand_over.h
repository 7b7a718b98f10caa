// SPDX-License-Identifier: Apache-2.0
// What one daemon leaves to the next: descriptors of arenas, by name, and one of a ledger that says what is in them.
// Whoever keeps them meanwhile (fd_store.h) knows nothing of either.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "daemon/core/base/durable_job.h"
#include "daemon/core/base/limits.h"
#include "daemon/exec/arena_policy.h"
#include "daemon/exec/job_memory.h"
#include "daemon/exec/recovery/kept_record.h"
#include "daemon/exec/recovery/ledger_codec.h"
#include "protocol/os/unique_fd.h"

namespace forebay::daemon {

class SwapSpace;

using DescriptorsByName = std::map<std::string, protocol::UniqueFd>;
// Of whoever keeps them for the next daemon.
using KeepDescriptors = absl::AnyInvocable<absl::Status(DescriptorsByName kept)>;

// The same while the daemon runs, so that another one finds them where this one is killed. Both on the loop thread.
struct DescriptorStore {
  absl::AnyInvocable<absl::Status(const std::string& name, int fd)> keep;
  absl::AnyInvocable<void(const std::string& name)> drop;
};

// Whoever keeps the others keeps it last: without one of them it says what is not so.
inline constexpr char kLedgerDescriptor[] = "ledger";
std::string WeightsDescriptor(JobId job);
std::string StatesDescriptor(JobId job);
std::string StepDescriptor(JobId job);
std::string GradientsDescriptor(JobId job, uint32_t rank);
std::string ProcessDescriptor(JobId job, uint32_t rank, bool has_detached);
// Of the node, with slots of this size; the one with the largest number is the newest.
std::string StagingDescriptor(uint64_t slot_bytes, uint64_t number);
// Each record of a job has another number: the newest one that is whole counts.
std::string RecordDescriptor(JobId job, uint64_t number);

// Writes the ledger of `node` into `to`, of swap with this nonce and sequence (0 without swap).
//
// Errors  of EncodeLedger. E_LIMIT, E_INTERNAL  no memory or descriptor for it.
absl::Status AddHandedOver(const DurableNode& node, uint64_t nonce, uint64_t sequence,
                           DescriptorsByName& to);

// What AddHandedOver() has written; no jobs where there is nothing, or where it cannot be read: the log says why.
DecodedLedger ReadHandedOver(const DescriptorsByName& from);

// A job of a daemon that was killed, or has handed its jobs over, as its record says.
struct RecordedJob {
  DurableJob job;
  uint64_t nonce = 0;  // of the swap that its slots are of
  std::unique_ptr<KeptRecord> record;
  uint64_t number = 0;  // of its descriptor
};

// Takes records out of `left`. Those that no job can go on from are left out, and the log says why.
std::vector<RecordedJob> ReadRecords(DescriptorsByName& left);

// Whether what is on swap of all of them is on this one; null: there is none.
//
// Errors  E_CONFIG  it is not: started with other swap.paths they are not lost.
absl::Status CheckVolume(const DecodedLedger& ledger, const std::vector<RecordedJob>& recorded,
                         const SwapSpace* swap);

// Jobs of the ledger go on: their arenas come out of `left`, and the jobs into `node`, in the place of what its disk says
// of them. Where another job has the number of one, which then is of another volume and names no slot, that one gets a
// new number. Their records come out of `recorded` and stay theirs: where this daemon too is killed, before their ranks are
// back, the next one goes on from those. `swap` may be null. A job that cannot go on is left out, and the log says why. The
// arenas' ends leave their pages alone. Blocks, but gives memory to no page.
std::vector<AdoptedArenas> AdoptJobs(const DecodedLedger& ledger,
                                     std::vector<RecordedJob>& recorded, const SwapSpace* swap,
                                     const ArenaPolicy& arenas, DescriptorsByName& left,
                                     NodeOptions& node);

// The staging slots that a daemon which was killed has left; no name: none of this size.
struct LeftStaging {
  std::string name;
  protocol::UniqueFd fd;
};
LeftStaging FindStaging(uint64_t slot_bytes, DescriptorsByName& left);

// As AdoptJobs. What is durable of a job, on the disk of `node`, stays so. Of a job that was killed in an update, what workers
// had in hand is undone, and its blocks are in the same staging slots of `swap`.
std::vector<AdoptedArenas> AdoptKilled(std::vector<RecordedJob> jobs, const SwapSpace* swap,
                                       const LeftStaging& staging, const ArenaPolicy& arenas,
                                       DescriptorsByName& left, NodeOptions& node);

}  // namespace forebay::daemon
