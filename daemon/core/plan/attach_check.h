// SPDX-License-Identifier: Apache-2.0
// Checks an attach request as far as no job is needed. Admission (does the job fit?) is in memory_plan.h and grant_policy.h.
#pragma once

#include "absl/status/status.h"
#include "daemon/core/base/events.h"

namespace forebay::daemon {

// Errors  E_OPTION       its run token has other characters than printable ones, or too many.
//         E_RANK         no rank of its world; partitions of such a rank.
//         E_UNSUPPORTED  replicas; gradients of several backward passes with shared attachment.
//         Those of CheckSessionRequest and CheckReaderRequest.
absl::Status CheckAttachRequest(const AttachRequested& request);

}  // namespace forebay::daemon
