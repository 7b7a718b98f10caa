// SPDX-License-Identifier: Apache-2.0
// Advice for a job that does not fit: the hint of its refusal names settings that take less memory.
#pragma once

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "daemon/core/base/node_options.h"
#include "daemon/core/base/session_request.h"
#include "daemon/core/plan/memory_plan.h"
#include "protocol/layout.h"

namespace forebay::daemon {

// True if a job with this layout and request would be granted, on the node as it is now.
using FitsFn =
    absl::FunctionRef<bool(const protocol::Layout& layout, const SessionRequest& request)>;

// Returns the refusal of a new job with a hint that names settings which take less: a smaller format of the states, no
// activations, one backward pass a step, no extra_state. For each setting the hint has the bytes by which the setting lowers
// the smallest sufficient limit, and says if the job then fits. If DRAM is too small and the node has no swap, the hint also
// names the limits that are sufficient with swap; if swap is too small, the limit that is sufficient without swap. Errors other
// than E_DRAM_LIMIT and E_SWAP_NOSPC are returned unchanged.
//
// Limits  Creates a new layout for each smaller format, but none if creating it could take the loop thread too long.
absl::Status WithAdvice(const absl::Status& refusal, const protocol::Layout& layout,
                        const SessionRequest& request, const NodeOptions& options,
                        const NodeUse& use, FitsFn fits);

}  // namespace forebay::daemon
