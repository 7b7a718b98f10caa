// SPDX-License-Identifier: Apache-2.0
// What a job that does not fit may do with less of: said in the hint of its refusal.
#pragma once

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "daemon/core/base/limits.h"
#include "daemon/core/base/session_request.h"
#include "daemon/core/plan/memory_plan.h"
#include "protocol/layout.h"

namespace forebay::daemon {

// Whether such a job would be made, on the node as it is.
using FitsFn =
    absl::FunctionRef<bool(const protocol::Layout& layout, const SessionRequest& request)>;

// The refusal of a new job with a hint that names what takes less: a smaller format of the states, no activations,
// one backward pass a step; each with the bytes of the smallest limit that it saves, and whether the job fits then.
// For want of DRAM without swap also the limits that do with it; for want of swap the limit that does without.
// Errors but E_DRAM_LIMIT and E_SWAP_NOSPC stay as they are.
//
// Limits  A new layout for each smaller format; none where that could hold the loop thread up.
absl::Status WithAdvice(const absl::Status& refusal, const protocol::Layout& layout,
                        const SessionRequest& request, const NodeOptions& options,
                        const NodeUse& use, FitsFn fits);

}  // namespace forebay::daemon
