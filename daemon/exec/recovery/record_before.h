// SPDX-License-Identifier: Apache-2.0
// Records of version 7, which a daemon of release 0.2.0 wrote. The next release removes this file.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "daemon/exec/recovery/kept_record.h"
#include "protocol/os/unique_fd.h"

namespace forebay::daemon {

// True if the memfd has a record of release 0.2.0.
bool IsRecordBefore(const protocol::UniqueFd& fd);

// Returns a record of this release with the same job and the same undo log. The memfd does not change.
//
// Errors  E_CORRUPT     the record is damaged.
//         E_JOB_FAILED  the record was dropped.
//         The errors of KeptRecord::Make().
absl::StatusOr<std::unique_ptr<KeptRecord>> ConvertRecord(const protocol::UniqueFd& fd);

}  // namespace forebay::daemon
