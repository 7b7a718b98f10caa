// SPDX-License-Identifier: Apache-2.0
// The view of a job's memory plan, term by term and rank by rank.
#pragma once

#include "daemon/core/base/views.h"
#include "daemon/core/blocks/placement.h"
#include "daemon/core/plan/memory_plan.h"
#include "protocol/layout.h"

namespace forebay::daemon {

// Returns the bytes that one step moves to and from swap. `placement`: the job's blocks now, or plan.placement (the blocks at
// attach).
StepTraffic StepTrafficOf(const protocol::Layout& layout, const MemoryPlan& plan,
                          const Placement& placement);

// Returns the terms that the job itself takes. `placement` as in StepTrafficOf. The caller sets node, others, limit, missing
// and all_in_dram.
JobPlan JobPlanOf(const protocol::Layout& layout, const MemoryPlan& plan,
                  const Placement& placement);

}  // namespace forebay::daemon
