// SPDX-License-Identifier: Apache-2.0
// Upper estimates of the heap bytes of a job's tables, which count in the DRAM limit.
#pragma once

#include <cstdint>

#include "daemon/core/base/node_options.h"
#include "daemon/core/base/session_request.h"
#include "daemon/core/plan/memory_plan.h"
#include "protocol/layout.h"

namespace forebay::daemon {

// Returns the bytes of all tables of a job: tables of the layout, the sessions and durable steps, and the records from which
// the next daemon continues. `plan` must have its session and its arenas. Blocks of states have `block_elems` elements.
uint64_t TableBytes(const protocol::Layout& layout, const NodeOptions& options,
                    const MemoryPlan& plan, uint64_t block_elems);

// Returns the bytes of digests of the pages of weights on swap, for the current and the next version.
uint64_t DigestBytes(const protocol::Layout& layout);
// Returns the bytes that the records of a job take for weights on swap: digests of pages, and leases.
uint64_t RecordSwapBytes(const protocol::Layout& layout, const NodeOptions& options,
                         uint32_t world_size);

// Returns the number of durable steps that a job retains: two if the job is over several nodes (DurableJob::before), otherwise
// one.
uint64_t DurableStepsKept(const SessionRequest& session);

}  // namespace forebay::daemon
