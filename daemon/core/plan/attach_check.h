// SPDX-License-Identifier: Apache-2.0
// Checks of an attach request that do not depend on existing jobs. Admission, the check if the job fits, is in memory_plan.h
// and grant_policy.h.
#pragma once

#include "absl/status/status.h"
#include "daemon/core/base/events.h"

namespace forebay::daemon {

// Errors  E_OPTION       the run token is too long or has characters that are not printable.
//         E_RANK         the rank, or the owner of a partition, is not in the world.
//         E_UNSUPPORTED  replicas; gradients of several backward passes with shared attachment.
//         Those of CheckSessionRequest and CheckReaderRequest.
absl::Status CheckAttachRequest(const AttachRequested& request);

}  // namespace forebay::daemon
