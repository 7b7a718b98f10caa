// SPDX-License-Identifier: Apache-2.0
// Options that the daemon or a test passes to the node's state machine.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/base/durable_job.h"
#include "nvme/path_rates.h"
#include "nvme/slot_map.h"
#include "protocol/durability.h"

namespace forebay::daemon {

struct NodeOptions {
  uint64_t dram_limit_bytes = 0;
  // Memory of the daemon itself (private memory, and staging for swap). It counts in the limit.
  uint64_t node_bytes = 0;
  uint32_t staging_slots = 0;
  uint64_t staging_slot_bytes = 0;
  // Space of the swap paths. Empty: the node has no swap.
  nvme::SlotMap swap = {};
  // Measured rates of the swap paths, by path. The list may be shorter than the list of paths.
  std::vector<std::optional<nvme::PathRates>> swap_rates = {};
  // Default durability, for jobs whose request names no durability.
  protocol::Durability durability = {};
  // Reason why no job of this node can have another level than kMemory. OK: every level is possible.
  absl::Status not_durable = {};
  // Jobs that the daemon has recovered: from the volume's ledger, or from the retained memory of the previous daemon.
  DurableNode recovered = {};
  // True if all bytes on swap are lost with the daemon, because its files have no names.
  bool loses_swap = false;
  // True if arenas and records of jobs outlive a daemon that is killed.
  bool keeps_jobs = false;
  // Maximum size of the ledger in bytes.
  uint64_t ledger_bytes_max = 0;
  // Elements of a block of states; a multiple of kStatesAlignElems.
  uint64_t block_elems = uint64_t{1} << 20;
  // Maximum concurrent UpdateBlocks.
  uint32_t workers = 1;
  // Maximum share of dram_limit_bytes for one job, in percent, 1 to 100; and the quotas of all jobs of one uid together (0: no
  // quota). See GrantPolicy.
  uint32_t job_percent = 100;
  uint64_t uid_dram_bytes = 0;
  uint64_t uid_swap_bytes = 0;

  // Switches that disable a protection, for tests alone. The daemon never sets these switches.
  bool disable_fence_for_test = false;        // commands of stale sessions are executed
  bool disable_range_check_for_test = false;  // offsets and lengths of commands are not checked
};

}  // namespace forebay::daemon
