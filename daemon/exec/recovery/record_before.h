// SPDX-License-Identifier: Apache-2.0
// Records of version 7, which a daemon of release 0.2.0 wrote. The next release removes this file.
#pragma once

#include "absl/status/statusor.h"
#include "protocol/os/unique_fd.h"

namespace forebay::daemon {

// True if the memfd has a record of release 0.2.0.
bool IsRecordBefore(const protocol::UniqueFd& fd);

// Returns a memfd with a record of this release that has the same job and the same undo log. The memfd `fd` does not change.
//
// Errors  E_CORRUPT     the record is damaged.
//         E_JOB_FAILED  the record was dropped.
//         The errors of KeptRecord::Make().
absl::StatusOr<protocol::UniqueFd> ConvertRecord(const protocol::UniqueFd& fd);

}  // namespace forebay::daemon
