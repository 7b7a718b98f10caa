// SPDX-License-Identifier: Apache-2.0
// Limits of the node's state machine, and the options that the daemon or a test passes to it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/base/durable_job.h"
#include "nvme/path_rates.h"
#include "nvme/slot_map.h"
#include "protocol/durability.h"

namespace forebay::daemon {

inline constexpr uint32_t kWorldRanksMax = 1 << 20;  // ranks on all nodes

inline constexpr uint32_t kJobsMax = 1024;
inline constexpr uint32_t kJobNameBytesMax = 200;
inline constexpr uint32_t kRunTokenBytesMax = 200;
inline constexpr uint32_t kLeasesPerSessionMax = 4096;

// Maximum bytes of one session's gradient arena, and maximum bytes of its activations. kWorldMax times this value fits in 64
// bits.
inline constexpr uint64_t kGradArenaBytesMax = uint64_t{1} << 46;

// Minimum number of pieces (MemoryPlan::piece_bytes) in a gradient arena: the client fills one piece while the daemon adds
// another to the gradient sums.
inline constexpr uint32_t kGradPiecesMin = 2;
// Maximum number of pieces that a rank may have in the overflow area of the step arena.
inline constexpr uint32_t kOverflowSlotsPerRank = 2;

// Maximum updates of resident blocks in flight for each worker, if only resident blocks are still to be updated. One update
// runs and one waits, so that the worker need not wait for the loop.
inline constexpr uint32_t kUpdatesPerWorker = 2;

// Size of the weights cache: for each owner, this many times its largest partition with weights on swap. One partition is used
// while the next one is read.
inline constexpr uint32_t kCachedPartitionsPerOwner = 2;

// Number of staging slots that reads of states before a step's decision leave free, in a job with weights on swap. Loads of
// weights use these slots.
inline constexpr uint32_t kStagingSlotsForWeights = 2;

// Minimum number of concurrent state reads from one path. PathTable raises the number if the measured latency of the path is
// high. Two reads keep most paths busy, and a fetch of weights waits for few reads.
inline constexpr uint32_t kReadsPerPath = 2;

// Maximum elements of a page of gradient sums, if not all sums fit in DRAM, and the number of frames that are freed before a
// page needs one.
inline constexpr uint64_t kSumPageElemsMax = uint64_t{1} << 19;
inline constexpr uint32_t kSpareSumFrames = 4;

// Maximum blocks of a refused job for which the error's hint names the DRAM limit that the job needs with gradients on swap.
// Computing that limit takes a list of all blocks.
inline constexpr uint64_t kAdvisedBlocksMax = uint64_t{1} << 20;

// Number of slots for each swapped block: one holds the current version, the next step writes to the other.
inline constexpr uint32_t kSwapSlotsPerBlock = 2;

// Number of slots for each block, on swap or in DRAM, in a job with durable steps: two for the last two durable steps, and one
// for the step that is being written. Level epoch adds a slot for the current step, which is newer than the newest durable
// step.
inline constexpr uint32_t kSwapSlotsPerBlockAtStep = 3;
inline constexpr uint32_t kSwapSlotsPerBlockAtEpoch = 4;
// Number of slots for each part of the weights arena, in a job with durable steps. The arena itself is in DRAM.
inline constexpr uint32_t kSwapSlotsPerWeightsPart = 3;

// Maximum number of concurrent writes to one path that save parts of arenas for a durable step.
inline constexpr uint32_t kSavesPerPath = 2;

// State reads and block moves that may run before a step's decision, if all ranks called that step before the previous
// step was published.
inline constexpr uint32_t kTurnsBetweenSteps = 8;

// Options of the memory pool for objects that live for one step. Allocations larger than largest_required_pool_block come from
// the heap.
inline constexpr std::pmr::pool_options kStepMemoryOptions = {
    .max_blocks_per_chunk = 256, .largest_required_pool_block = size_t{1} << 20};

// Bytes of DRAM that stay free for readers when blocks return to DRAM: a reader's arena has 1 MiB. At most 1/64 of the DRAM
// limit stays free.
inline constexpr uint64_t kReadersRoomBytes = uint64_t{4} << 20;

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
