// SPDX-License-Identifier: Apache-2.0
// Named maxima of the state machine, and the options that the daemon or a test gives it.
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

inline constexpr uint32_t kWorldRanksMax = 1 << 20;  // of all nodes

inline constexpr uint32_t kJobsMax = 1024;
inline constexpr uint32_t kJobNameBytesMax = 200;
inline constexpr uint32_t kRunTokenBytesMax = 200;
inline constexpr uint32_t kLeasesPerSessionMax = 4096;

// Of one session, for gradients. Times kWorldMax no sum overflows.
inline constexpr uint64_t kGradArenaBytesMax = uint64_t{1} << 46;

// A gradient arena is a pool of pieces (MemoryPlan::piece_bytes): one is filled while one is added.
inline constexpr uint32_t kGradPiecesMin = 2;
// Pieces that a rank may have in the overflow.
inline constexpr uint32_t kOverflowSlotsPerRank = 2;

// Updates of resident blocks in flight where no others are left: one that runs and one that waits,
// so that no worker waits for the loop.
inline constexpr uint32_t kUpdatesPerWorker = 2;

// Of the largest partition whose weights are on swap, for each of its owners: one is used while the next is
// read.
inline constexpr uint32_t kCachedPartitionsPerOwner = 2;

// Of a job with weights on swap, before a step is decided: slots that states which are read ahead leave free.
inline constexpr uint32_t kStagingSlotsForWeights = 2;

// Of one path: reads of states that are under way at once, unless its measured latency asks for more
// (PathTable). Two keep most busy, and a fetch of weights waits for few of them.
inline constexpr uint32_t kReadsPerPath = 2;

// Gradient sums that do not all fit in DRAM: the largest page of them; and frames that are made free ahead of need.
inline constexpr uint64_t kSumPageElemsMax = uint64_t{1} << 19;
inline constexpr uint32_t kSpareSumFrames = 4;

// Of a job that is refused: with more blocks the hint leaves out what takes a list of them.
inline constexpr uint64_t kAdvisedBlocksMax = uint64_t{1} << 20;

// Of each block on swap: one that is current, one that the next step is written to.
inline constexpr uint32_t kSwapSlotsPerBlock = 2;

// Slots of each block, on swap or in DRAM, of a job with durable steps: two for the last two durable steps, and
// one for the step that is being written. At level epoch one more, for the blocks of the current step, which is newer
// than the newest durable step.
inline constexpr uint32_t kSwapSlotsPerBlockAtStep = 3;
inline constexpr uint32_t kSwapSlotsPerBlockAtEpoch = 4;
// Of a part of its weights arena, which is in DRAM.
inline constexpr uint32_t kSwapSlotsPerWeightsPart = 3;

// Parts of arenas that are written to one path at once for a durable step.
inline constexpr uint32_t kSavesPerPath = 2;

// State reads and block moves that may run before a step's decision, if all ranks called that step before the previous
// step was published.
inline constexpr uint32_t kTurnsBetweenSteps = 8;

// Of memory that a step takes and gives back: a list that is longer comes from the heap.
inline constexpr std::pmr::pool_options kStepMemoryOptions = {
    .max_blocks_per_chunk = 256, .largest_required_pool_block = size_t{1} << 20};

// Blocks that come back to DRAM leave so much for readers, whose arenas have 1 MiB; at most a 64th part of the limit.
inline constexpr uint64_t kReadersRoomBytes = uint64_t{4} << 20;

struct NodeOptions {
  uint64_t dram_limit_bytes = 0;
  // Staging, ledger: allocated at start and counted in the limit.
  uint64_t node_bytes = 0;
  uint32_t staging_slots = 0;
  uint64_t staging_slot_bytes = 0;
  // Space of the swap paths; none: no swap.
  nvme::SlotMap swap = {};
  // What its paths gave when they were measured; may be shorter.
  std::vector<std::optional<nvme::PathRates>> swap_rates = {};
  // Of jobs that do not say.
  protocol::Durability durability = {};
  // Why no job of this node can have another level than kMemory; OK: it can.
  absl::Status not_durable = {};
  // What the ledger of its volume says, and the daemon before has handed over.
  DurableNode recovered = {};
  // What is on swap is lost with the daemon: its files have no names.
  bool loses_swap = false;
  // Arenas and records of jobs outlive a daemon that is killed.
  bool keeps_jobs = false;
  // Of the ledger, at most.
  uint64_t ledger_bytes_max = 0;
  // A multiple of kStatesAlignElems.
  uint64_t block_elems = uint64_t{1} << 20;
  // UpdateBlocks that run at once.
  uint32_t workers = 1;
  // What one job may take of dram_limit_bytes, 1 to 100; what the jobs of one uid may take together, 0: no
  // quota (GrantPolicy).
  uint32_t job_percent = 100;
  uint64_t uid_dram_bytes = 0;
  uint64_t uid_swap_bytes = 0;

  // Tests alone: what goes wrong without the protection. The daemon never sets them.
  bool disable_fence_for_test = false;        // commands of stale sessions are executed
  bool disable_range_check_for_test = false;  // offsets and lengths of commands are not checked
};

}  // namespace forebay::daemon
