// SPDX-License-Identifier: Apache-2.0
// Reads everything that the durable jobs of a stopped volume have on swap, and says what is damaged.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/core/base/durable_job.h"
#include "nvme/io/io_engine.h"
#include "nvme/slot_map.h"
#include "nvme/swap_files.h"
#include "nvme/volume.h"

namespace forebay::daemon {

// A slot that the ledger names and that cannot be read, or does not hold what was written to it.
struct DamagedSlot {
  std::string what;  // DurableContent::Name
  nvme::Slot slot;
  std::string path;                 // of its file or device
  std::vector<std::string> params;  // that have elements in it
  absl::Status status;
};

struct ScrubbedJob {
  std::shared_ptr<const DurableJob> job;
  uint64_t slots = 0;
  uint64_t bytes = 0;
  double seconds = 0;
  std::vector<DamagedSlot> damaged;
};

struct ScrubReport {
  // Of the ledger that was read; 0: nothing was ever committed.
  nvme::RecoveryReport recovery;
  std::vector<ScrubbedJob> jobs;

  // Every job comes back as its newest durable step left it. A copy that is damaged where another one is whole
  // changes nothing in that.
  bool is_clean() const;
};

// Slots that the newest ledger does not name are not read: they hold nothing.
//
// Limits   Blocks while all is read; takes memory for a few slots.
// Errors   E_CORRUPT       of DecodeLedgerOf.
//          E_DRAM_LIMIT, E_MEMLOCK  no memory to read into.
//          E_SWAP_TIMEOUT  the disk has answered nothing for a minute.
absl::StatusOr<ScrubReport> ScrubVolume(nvme::Volume& volume, nvme::IoEngine& engine);

// The same of the volume on these paths, with the sizes of its labels. It is locked meanwhile, and nothing is written.
//
// Errors  of WithSizes, FindVolume, Volume::Open and ScrubVolume. E_BUSY: a daemon runs on it.
absl::StatusOr<ScrubReport> ScrubPaths(const std::vector<nvme::PathOptions>& paths,
                                       nvme::IoEngine& engine);

}  // namespace forebay::daemon
