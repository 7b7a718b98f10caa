// What one daemon leaves to the next: descriptors of arenas, by name, and one of a ledger that says what is in them.
// Whoever keeps them meanwhile (fd_store.h) knows nothing of either.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "daemon/core/durable_job.h"
#include "daemon/core/limits.h"
#include "daemon/exec/arena_policy.h"
#include "daemon/exec/job_memory.h"
#include "daemon/exec/ledger_codec.h"
#include "protocol/os/unique_fd.h"

namespace forebay::daemon {

class SwapSpace;

using DescriptorsByName = std::map<std::string, protocol::UniqueFd>;
// Of whoever keeps them for the next daemon.
using KeepDescriptors = absl::AnyInvocable<absl::Status(DescriptorsByName kept)>;

std::string WeightsDescriptor(JobId job);
std::string StatesDescriptor(JobId job);
std::string StepDescriptor(JobId job);
std::string GradientsDescriptor(JobId job, uint32_t rank);

// Writes the ledger of `node` into `to`, of swap with this nonce and sequence (0 without swap).
//
// Errors  of EncodeLedger. E_LIMIT, E_INTERNAL  no memory or descriptor for it.
absl::Status AddHandedOver(const DurableNode& node, uint64_t nonce, uint64_t sequence,
                           DescriptorsByName& to);

// What AddHandedOver() has written; no jobs where there is nothing, or where it cannot be read: the log says why.
DecodedLedger ReadHandedOver(const DescriptorsByName& from);

// Jobs of the ledger go on: their arenas come out of `left`, and the jobs into `node`, in the place of what its disk says
// of them. Where another job has the number of one, which then is of another volume and names no slot, that one gets a
// new number. `swap` may be null. A job that cannot go on is left out, and the log says why. The arenas' ends leave
// their pages alone. Blocks, but gives memory to no page.
std::vector<AdoptedArenas> AdoptJobs(const DecodedLedger& ledger, const SwapSpace* swap,
                                     const ArenaPolicy& arenas, DescriptorsByName& left,
                                     NodeOptions& node);

}  // namespace forebay::daemon
