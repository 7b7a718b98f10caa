// SPDX-License-Identifier: Apache-2.0
// Heap bytes of a job's tables, which count in the limit. Upper estimates.
#pragma once

#include <cstdint>

#include "daemon/core/base/limits.h"
#include "daemon/core/base/session_request.h"
#include "daemon/core/plan/memory_plan.h"
#include "protocol/layout.h"

namespace forebay::daemon {

// All tables of a job: of the layout and the sessions, of durable steps, and the records that the next daemon continues from.
// `plan` has its session and its arenas; blocks of states have `block_elems`.
uint64_t TableBytes(const protocol::Layout& layout, const NodeOptions& options,
                    const MemoryPlan& plan, uint64_t block_elems);

// Digests of the pages of weights on swap, in the current and the next version.
uint64_t DigestBytes(const protocol::Layout& layout);
// Digests of the pages of weights on swap, in the records of the job.
uint64_t RecordDigestBytes(const protocol::Layout& layout, const NodeOptions& options);

// Durable steps that a job retains: two if the job is over several nodes (DurableJob::before), otherwise one.
uint64_t DurableStepsKept(const SessionRequest& session);

}  // namespace forebay::daemon
