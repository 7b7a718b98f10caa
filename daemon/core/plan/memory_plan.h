// SPDX-License-Identifier: Apache-2.0
// Admission: computes the memory that a job needs, and compares it with the free memory of the node.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/limits.h"
#include "daemon/core/base/node_options.h"
#include "daemon/core/base/session_request.h"
#include "daemon/core/blocks/block_map.h"
#include "daemon/core/blocks/placement.h"
#include "nvme/slot_map.h"
#include "protocol/layout.h"

namespace forebay::daemon {

// Memory that the node has granted so far.
struct NodeUse {
  // Bytes of DRAM that other jobs take once all blocks that are marked for eviction have been evicted.
  uint64_t jobs_dram_bytes = 0;
  // Part of jobs_dram_bytes: bytes of states that can move to swap. An estimate, from before the planned job has its slots.
  uint64_t movable_bytes = 0;
  // Bytes of the planned job's states in DRAM, for PlanWorld().
  uint64_t own_state_bytes = 0;
  // Bytes of weights of deleted jobs that a process still has open or mapped.
  uint64_t deleted_weights_bytes = 0;
  // Free swap slots of the node.
  const nvme::SlotMap* swap = nullptr;
  // The recovered job, null for a new job. Weights and blocks of a recovered job are in DRAM or on swap as in its durable or
  // retained step, and the swap slots of that step belong to the job.
  const DurableJob* recovered = nullptr;
};

// Returns the bytes that the node itself, other jobs and weights of deleted jobs hold.
uint64_t TakenBytes(const NodeOptions& options, const NodeUse& use);

// All arenas of a job, with their sizes and offsets.
struct MemoryPlan {
  uint64_t weights_bytes = 0;  // bytes of the weights arena
  // True for each partition whose weights are on swap. The weights of all other partitions are contiguous at the start of the
  // weights arena, and a cache with copies of weights on swap follows. Empty if all weights are in DRAM, where the layout
  // places them.
  std::vector<bool> weights_on_swap;
  uint64_t weights_cache_offset = 0;
  uint64_t weights_cache_bytes = 0;
  uint64_t weights_on_swap_bytes = 0;
  bool has_weights_on_swap() const { return !weights_on_swap.empty(); }

  // Step arena: accumulators, overflow, extra_state, new weights.
  protocol::DType sum_dtype = protocol::DType::kFloat32;  // type of the accumulators
  // Offset of each partition's sums in the step arena. If sums are paged, the offset counts through all pages.
  std::vector<uint64_t> accumulator_offsets;
  // Set if not all sums of a step fit in DRAM: sum_frames frames of the step arena hold pages of sums, and sum_slots swap slots
  // hold the other pages. sum_page_bytes is 0 if sums are not paged.
  uint64_t sum_page_bytes = 0;
  uint32_t sum_pages = 0;
  uint32_t sum_frames = 0;
  uint32_t sum_slots = 0;
  bool has_paged_sums() const { return sum_page_bytes > 0; }
  uint64_t sums_on_swap_bytes() const {  // maximum
    return uint64_t{sum_pages - std::min(sum_frames, sum_pages)} * sum_page_bytes;
  }
  uint64_t overflow_offset = 0;
  uint64_t piece_bytes = 0;         // bytes of the largest range that is delivered at once
  uint32_t overflow_slots = 0;      // kOverflowSlotsPerRank for each rank; 0 if sharded
  uint64_t extra_state_offset = 0;  // two slots per rank
  uint64_t extra_state_slot_bytes = 0;
  // Slots for new weights of early updates, for blocks whose weights are in DRAM. A slot holds the weights of one block.
  uint64_t early_weights_offset = 0;
  uint32_t early_weights_slots = 0;
  uint64_t early_weights_bytes = 0;
  uint64_t step_bytes = 0;
  // Range for float32 sums behind step_bytes, in a job whose sums have 16 bits. The range gets memory when a step first has a
  // further backward pass.
  uint64_t float_sums_offset = 0;
  uint64_t float_sums_bytes = 0;
  uint64_t step_capacity_bytes() const {  // bytes of the whole step arena; 0: step_bytes
    return float_sums_offset + float_sums_bytes;
  }

  // Arena of each session (gradients, the step region, activations, the trace), and its ring.
  SessionRequest session;
  uint64_t step_region_offset = 0;
  uint64_t step_region_bytes = 0;
  uint64_t trace_bytes = 0;
  uint64_t session_arena_bytes = 0;
  uint64_t ring_bytes = 0;
  // Bytes of the copies of the rank's and of rank 0's extra_state that the client reads at attach.
  uint64_t extra_state_copy_bytes = 0;

  // Blocks of states, which start in DRAM if they fit and otherwise on swap. A block has NodeOptions::block_elems elements, or
  // fewer if its planes do not fit in a staging slot.
  uint64_t block_elems = 0;
  Placement placement;
  // Bytes of a full block.
  uint64_t block_bytes = 0;

  // Number of parts in which the weights arena, without its cache, is saved for durable steps. Each part but the last has
  // swap_slot_bytes. 0 without durable steps.
  uint32_t weights_parts = 0;
  bool has_durable_steps() const {
    return session.durability.level != protocol::DurabilityLevel::kMemory;
  }
  StatePart WeightsPart(uint32_t part) const;
  uint64_t ledger_bytes = 0;  // maximum bytes of the job in the node's ledger

  // Swap slots for blocks, all of one size. Each swapped block has kSwapSlotsPerBlock, so that its next version can be written
  // before any block is published. Placement::slots_needed() gives the number with durable steps. swap_slot_bytes is 0 if no
  // block can be on swap.
  uint64_t swap_slot_bytes = 0;
  uint32_t swap_slots = 0;

  // Returns the bytes of all swap slots, for blocks and for pages of sums.
  uint64_t swap_bytes() const { return swap_slots * swap_slot_bytes + sum_slots * sum_page_bytes; }

  // Upper estimate of the heap bytes of the layout, of the tables computed from it, and of the sessions.
  uint64_t table_bytes = 0;

  // Bytes that count in the DRAM limit, without states in DRAM (Placement::state_bytes()).
  uint64_t fixed_bytes = 0;
  // Bytes of fixed_bytes that become free only when other jobs have moved blocks to swap. If missing_bytes is not 0, PlanJob()
  // has put all states on swap.
  uint64_t missing_bytes = 0;

  bool uses_float_sums = false;
  // Switches to float32 sums. fixed_bytes must include the memory of these sums already.
  void UseFloatSums(const protocol::Layout& layout);
  StatePart float_sums_part() const {
    return {.offset_bytes = float_sums_offset, .bytes = float_sums_bytes};
  }

  // Returns the offset of the summary in a session's arena, for a job over several nodes.
  uint64_t summary_offset(const protocol::Layout& layout) const;
  uint64_t extra_state_slot(uint32_t rank, uint32_t slot) const {
    return extra_state_offset + (uint64_t{rank} * 2 + slot) * extra_state_slot_bytes;
  }
};

// Returns the pages of sums that an update of the block reads, ascending. Called only if sums are paged.
std::vector<uint32_t> SumPagesOf(const MemoryPlan& plan, const BlockMap& map, uint32_t block);

// True if a recovered job has retained slots for all its pages of sums.
bool HasOwnSumSlots(const MemoryPlan& plan, const DurableJob* recovered);

// Returns the bytes from the start of a partition's gradient sums to the start of the next partition's sums.
uint64_t SumBytes(const protocol::PartitionPlace& partition, protocol::DType sum_dtype);

// Returns the bytes of a session's step region, which includes the extra_state_bytes that the session asked for.
uint64_t StepRegionBytes(const protocol::Layout& layout, const SessionRequest& session);

// Returns `grad_arena_bytes` of a reader, rounded up to whole pages.
uint64_t ReaderArenaBytes(uint64_t grad_arena_bytes);

// Checks a reader's request on its own. The free memory of the node is not checked.
//
// Errors  E_RANGE  the arena is smaller than a page or larger than kGradArenaBytesMax.
absl::Status CheckReaderRequest(uint64_t grad_arena_bytes);

// Checks a session's request on its own. The free memory of the node is not checked.
//
// Errors  E_RANGE        the gradients' part is smaller than kGradPiecesMin pieces.
//         E_EXTRA_STATE  extra_state_bytes is above kExtraStateBytesMax.
absl::Status CheckSessionRequest(const protocol::Layout& layout, const SessionRequest& request);

// Plans a job. If the limit leaves too little, the plan says how many bytes are missing: other jobs may free them. If other
// jobs cannot free enough for a sharded job, all states of the job are on swap, and its weights too, except groups that fit
// (tried in their order). If that is still not enough, gradient sums are paged, with as many frames as fit.
//
// Errors  E_DRAM_LIMIT  jobs cannot free enough DRAM, or the node has no swap; see DramLimitError.
//         E_SWAP_NOSPC  swap is too small for the bytes that do not fit in DRAM. Names needed and free bytes.
absl::StatusOr<MemoryPlan> PlanJob(const protocol::Layout& layout, const SessionRequest& request,
                                   const NodeOptions& options, const NodeUse& use);

// Returns the smallest DRAM limit with which the whole job fits in DRAM, in addition to the bytes that the node itself holds.
//
// Errors  of LeastLimitsOf.
absl::StatusOr<uint64_t> LimitWithoutSwap(const protocol::Layout& layout,
                                          const SessionRequest& request, const NodeOptions& options,
                                          const NodeUse& use);

// The smallest DRAM limits with which a job fits, in addition to the bytes that the node itself holds: with states on swap,
// with weights on swap too, and with gradients on swap too. A limit that would be no smaller, as the last two with shared
// attachment, equals the limit before it.
struct LeastLimits {
  uint64_t states_on_swap = 0;
  uint64_t weights_on_swap = 0;
  uint64_t gradients_on_swap = 0;  // weights_on_swap if blocks > kAdvisedBlocksMax
};

// Errors  of CheckSessionRequest; E_DRAM_LIMIT  the arena that a session needs is above kGradArenaBytesMax.
absl::StatusOr<LeastLimits> LeastLimitsOf(const protocol::Layout& layout,
                                          const SessionRequest& request, const NodeOptions& options,
                                          const NodeUse& use);

// Plans an existing job for sessions of another world size. Weights and blocks stay in their places, and the range for
// extra_state never shrinks. `use` has the use of other jobs, and own_state_bytes.
//
// Errors  E_DRAM_LIMIT  as PlanJob.
absl::StatusOr<MemoryPlan> PlanWorld(const protocol::Layout& layout, const MemoryPlan& job,
                                     const SessionRequest& request, const NodeOptions& options,
                                     const NodeUse& use);

// Returns the error of a job that does not fit. The error names the parts of the job's bytes, the limit, the bytes that other
// jobs hold, how many of these can move to swap, and a sufficient limit. `state_bytes_needed`: bytes of states that must be in
// DRAM.
absl::Status DramLimitError(const MemoryPlan& plan, const NodeOptions& options, const NodeUse& use,
                            uint64_t state_bytes_needed = 0);

}  // namespace forebay::daemon
