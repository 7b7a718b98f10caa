// SPDX-License-Identifier: Apache-2.0
// Heap that a job's tables take, in the limit; estimated from above.
#pragma once

#include <cstdint>

#include "daemon/core/base/limits.h"
#include "daemon/core/base/session_request.h"
#include "daemon/core/plan/memory_plan.h"
#include "protocol/layout.h"

namespace forebay::daemon {

// All of them: of the layout and the sessions, of durable steps, and what the next daemon goes on from. The plan has its
// session and its arenas; blocks of states have `block_elems`.
uint64_t TableBytes(const protocol::Layout& layout, const NodeOptions& options,
                    const MemoryPlan& plan, uint64_t block_elems);

// Digests of the pages of weights on swap, of the current and of the next version.
uint64_t DigestBytes(const protocol::Layout& layout);
// The digests in records of the job.
uint64_t RecordDigestBytes(const protocol::Layout& layout, const NodeOptions& options);

// Durable steps that a job keeps, with the one before (DurableJob::before).
uint64_t DurableStepsKept(const SessionRequest& session);

}  // namespace forebay::daemon
