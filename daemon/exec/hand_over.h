// What one daemon leaves to the next: descriptors of arenas, by name, and one of a ledger that says what is in them.
// Whoever keeps them meanwhile (fd_store.h) knows nothing of either.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/core/durable_job.h"
#include "daemon/exec/arena_policy.h"
#include "daemon/exec/job_memory.h"
#include "daemon/exec/ledger_codec.h"
#include "protocol/os/unique_fd.h"

namespace forebay::daemon {

using DescriptorsByName = std::map<std::string, protocol::UniqueFd>;

std::string WeightsDescriptor(JobId job);
std::string StatesDescriptor(JobId job);
std::string StepDescriptor(JobId job);
std::string GradientsDescriptor(JobId job, uint32_t rank);

// Writes the ledger of `node` into `to`, of swap with this nonce and sequence (0 without swap).
//
// Errors  of EncodeLedger. E_LIMIT, E_INTERNAL  no memory or descriptor for it.
absl::Status AddHandedOver(const DurableNode& node, uint64_t nonce, uint64_t sequence,
                           DescriptorsByName& to);

// What AddHandedOver() has written; no jobs where there is nothing.
//
// Errors  of DecodeLedger.
absl::StatusOr<DecodedLedger> ReadHandedOver(const DescriptorsByName& from);

// Takes the arenas of a job that is in the ledger out of `from`. Their ends leave the pages alone. Blocks, but gives
// memory to no page.
//
// Errors  of PinnedArena::Adopt. E_CORRUPT  a descriptor is missing.
absl::StatusOr<AdoptedArenas> AdoptArenas(const DurableJob& job, const ArenaPolicy& policy,
                                          DescriptorsByName& from);

}  // namespace forebay::daemon
