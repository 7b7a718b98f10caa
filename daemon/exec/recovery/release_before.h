// SPDX-License-Identifier: Apache-2.0
// Jobs that a daemon of release 0.2.0 has handed over. That release wrote a ledger of all jobs beside their records. The next
// release removes this file.
#pragma once

#include <vector>

#include "daemon/exec/recovery/left_jobs.h"

namespace forebay::daemon {

// Adds the jobs of the ledger in `left` to `recorded`. A job has the form of the ledger if it has no record, or a record of
// another step. Logs the reason if there is a ledger and it cannot be read.
void AddHandedOver(const DescriptorsByName& left, std::vector<RecordedJob>& recorded);

}  // namespace forebay::daemon
