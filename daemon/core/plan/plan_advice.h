// SPDX-License-Identifier: Apache-2.0
// Advice for a job that does not fit: settings that take less memory, named in the hint of its refusal.
#pragma once

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "daemon/core/base/limits.h"
#include "daemon/core/base/session_request.h"
#include "daemon/core/plan/memory_plan.h"
#include "protocol/layout.h"

namespace forebay::daemon {

// True if a job with this layout and request would be granted, on the node as it is now.
using FitsFn =
    absl::FunctionRef<bool(const protocol::Layout& layout, const SessionRequest& request)>;

// Returns the refusal of a new job with a hint that names settings which take less: a smaller format of the states, no
// activations, one backward pass a step, no extra_state. For each: the bytes by which it lowers the smallest sufficient limit,
// and whether the job fits then. If DRAM is too small and the node has no swap, the hint also names the limits that are
// sufficient with swap; if swap is too small, the limit that is sufficient without. Errors other than E_DRAM_LIMIT and
// E_SWAP_NOSPC are returned unchanged.
//
// Limits  Creates a new layout for each smaller format, but none if that could hold the loop thread up.
absl::Status WithAdvice(const absl::Status& refusal, const protocol::Layout& layout,
                        const SessionRequest& request, const NodeOptions& options,
                        const NodeUse& use, FitsFn fits);

}  // namespace forebay::daemon
