// SPDX-License-Identifier: Apache-2.0
// A job's memory plan as it is shown, term by term and rank by rank.
#pragma once

#include "daemon/core/base/views.h"
#include "daemon/core/blocks/placement.h"
#include "daemon/core/plan/memory_plan.h"
#include "protocol/layout.h"

namespace forebay::daemon {

// Bytes that one step moves to and from swap. `placement`: where the job's blocks are now; or plan.placement, where they are at
// attach.
StepTraffic StepTrafficOf(const protocol::Layout& layout, const MemoryPlan& plan,
                          const Placement& placement);

// What the job itself takes. `placement` of its blocks now, or the plan's first one.
JobPlan JobPlanOf(const protocol::Layout& layout, const MemoryPlan& plan,
                  const Placement& placement);

}  // namespace forebay::daemon
