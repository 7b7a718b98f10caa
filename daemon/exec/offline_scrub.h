// SPDX-License-Identifier: Apache-2.0
// Scrubs the volume of a daemon that is stopped.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "daemon/exec/scrub.h"
#include "nvme/io/io_engine.h"
#include "nvme/swap_files.h"

namespace forebay::daemon {

// Reads and verifies all slots of durable jobs on these paths. The sizes of the paths come from their labels. Locks the volume
// during the scrub, and writes nothing.
//
// Limits   Blocks until all slots are read. Uses memory for a few pieces of slots.
// Errors   of WithSizes and SwapSpace::Inspect. E_BUSY: a daemon uses the volume.
//          E_SWAP_TIMEOUT  the disk has answered nothing for a minute.
absl::StatusOr<ScrubReport> ScrubPaths(const std::vector<nvme::PathOptions>& paths,
                                       nvme::IoEngine& engine);

}  // namespace forebay::daemon
