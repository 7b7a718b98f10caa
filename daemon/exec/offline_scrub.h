// SPDX-License-Identifier: Apache-2.0
// Scrubs the volume of a daemon that is stopped.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "daemon/exec/scrub.h"
#include "nvme/io/io_engine.h"
#include "nvme/swap_files.h"

namespace forebay::daemon {

// Reads everything that durable jobs have on these paths, with the sizes of their labels. The volume is locked meanwhile,
// and nothing is written.
//
// Limits   Blocks while all is read; takes memory for a few pieces of slots.
// Errors   of WithSizes and SwapSpace::Inspect. E_BUSY: a daemon runs on it.
//          E_SWAP_TIMEOUT  the disk has answered nothing for a minute.
absl::StatusOr<ScrubReport> ScrubPaths(const std::vector<nvme::PathOptions>& paths,
                                       nvme::IoEngine& engine);

}  // namespace forebay::daemon
