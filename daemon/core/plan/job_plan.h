// SPDX-License-Identifier: Apache-2.0
// A job's memory plan as it is shown, term by term and rank by rank.
#pragma once

#include "daemon/core/base/views.h"
#include "daemon/core/blocks/placement.h"
#include "daemon/core/plan/memory_plan.h"
#include "protocol/layout.h"

namespace forebay::daemon {

// `placement` of blocks now; that of the plan is the first one.
StepTraffic StepTrafficOf(const protocol::Layout& layout, const MemoryPlan& plan,
                          const Placement& placement);

// What the job itself takes. `placement` of its blocks now, or the plan's first one.
JobPlan JobPlanOf(const protocol::Layout& layout, const MemoryPlan& plan,
                  const Placement& placement);

}  // namespace forebay::daemon
