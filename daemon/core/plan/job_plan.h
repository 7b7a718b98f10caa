// SPDX-License-Identifier: Apache-2.0
// Computes the parts of a job's memory plan that the client sees, in total and for each rank.
#pragma once

#include "daemon/core/base/views.h"
#include "daemon/core/blocks/placement.h"
#include "daemon/core/plan/memory_plan.h"
#include "protocol/layout.h"

namespace forebay::daemon {

// Returns the bytes that one step moves to and from swap. `placement` is the current placement of the job's blocks, or
// plan.placement, their placement at attach.
StepTraffic StepTrafficOf(const protocol::Layout& layout, const MemoryPlan& plan,
                          const Placement& placement);

// Returns the bytes that the job itself takes. `placement`: see StepTrafficOf(). The caller sets JobPlan::node, others, limit,
// missing and all_in_dram.
JobPlan JobPlanOf(const protocol::Layout& layout, const MemoryPlan& plan,
                  const Placement& placement);

}  // namespace forebay::daemon
