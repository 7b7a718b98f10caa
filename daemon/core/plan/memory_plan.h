// SPDX-License-Identifier: Apache-2.0
// Admission: the memory that a job needs, term by term, against the memory that the node has left.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/core/base/events.h"
#include "daemon/core/base/limits.h"
#include "daemon/core/base/session_request.h"
#include "daemon/core/blocks/block_map.h"
#include "daemon/core/blocks/placement.h"
#include "nvme/slot_map.h"
#include "protocol/layout.h"

namespace forebay::daemon {

// Memory that the node has granted so far.
struct NodeUse {
  // DRAM of other jobs, after the blocks that are marked to leave DRAM have left it.
  uint64_t jobs_dram_bytes = 0;
  // The part of jobs_dram_bytes that is states which can move to swap; estimated before this job has its slots.
  uint64_t movable_bytes = 0;
  // PlanWorld: states of the planned job in DRAM.
  uint64_t own_state_bytes = 0;
  // Weights of deleted jobs that a process still has open or mapped.
  uint64_t deleted_weights_bytes = 0;
  // Free swap slots of the node.
  const nvme::SlotMap* swap = nullptr;
  // The job is recovered: its weights and blocks are in DRAM or on swap as in its durable or retained step, and its slots there
  // are its own. Null: a new job.
  const DurableJob* recovered = nullptr;
};

// Returns the bytes that the node itself, other jobs and weights of deleted jobs hold.
uint64_t TakenBytes(const NodeOptions& options, const NodeUse& use);

// All arenas of a job, with their sizes and offsets.
struct MemoryPlan {
  uint64_t weights_bytes = 0;  // of the weights arena
  // Partitions whose weights are on swap. Their cache, with copies of some of them, is at the end of the weights arena, behind
  // the weights that are in DRAM end to end. Empty: all weights are in DRAM, placed as in the layout.
  std::vector<bool> weights_on_swap;
  uint64_t weights_cache_offset = 0;
  uint64_t weights_cache_bytes = 0;
  uint64_t weights_on_swap_bytes = 0;
  bool has_weights_on_swap() const { return !weights_on_swap.empty(); }

  // Step arena: accumulators, overflow, extra_state, new weights.
  protocol::DType sum_dtype = protocol::DType::kFloat32;  // of the accumulators
  // By partition: offset of its sums in the step arena. If sums are paged: offset through all pages.
  std::vector<uint64_t> accumulator_offsets;
  // Set if not all sums of a step fit in DRAM: sum_frames frames of the step arena hold pages of sums, the other pages are on
  // swap, in slots of their own. sum_page_bytes 0: sums are not paged.
  uint64_t sum_page_bytes = 0;
  uint32_t sum_pages = 0;
  uint32_t sum_frames = 0;
  uint32_t sum_slots = 0;
  bool has_paged_sums() const { return sum_page_bytes > 0; }
  uint64_t sums_on_swap_bytes() const {  // at most
    return uint64_t{sum_pages - std::min(sum_frames, sum_pages)} * sum_page_bytes;
  }
  uint64_t overflow_offset = 0;
  uint64_t piece_bytes = 0;         // bytes of the largest range that is delivered
  uint32_t overflow_slots = 0;      // kOverflowSlotsPerRank for each rank; 0 if sharded
  uint64_t extra_state_offset = 0;  // two slots per rank
  uint64_t extra_state_slot_bytes = 0;
  // Slots for new weights of early updates, for blocks whose weights are in DRAM. A slot has room for one block's weights.
  uint64_t early_weights_offset = 0;
  uint32_t early_weights_slots = 0;
  uint64_t early_weights_bytes = 0;
  uint64_t step_bytes = 0;
  // Room for float32 sums behind step_bytes, in a job whose sums have 16 bits. It gets memory with the first further backward
  // pass of a step.
  uint64_t float_sums_offset = 0;
  uint64_t float_sums_bytes = 0;
  uint64_t step_capacity_bytes() const {  // of the whole step arena; 0: step_bytes
    return float_sums_offset + float_sums_bytes;
  }

  // Arena of each session (gradients, the step region, activations, the trace), and its ring.
  SessionRequest session;
  uint64_t step_region_offset = 0;
  uint64_t step_region_bytes = 0;
  uint64_t trace_bytes = 0;
  uint64_t session_arena_bytes = 0;
  uint64_t ring_bytes = 0;
  // Copies of the rank's and of rank 0's extra_state at attach, for the client to read.
  uint64_t extra_state_copy_bytes = 0;

  // States: blocks that fit in DRAM start there, the others on swap. A block has NodeOptions::block_elems elements, or fewer if
  // its planes do not fit in a staging slot.
  uint64_t block_elems = 0;
  Placement placement;
  // Bytes of a full block.
  uint64_t block_bytes = 0;

  // With durable steps: number of parts in which the weights arena is saved, without its cache. Each part but the last has
  // swap_slot_bytes.
  uint32_t weights_parts = 0;
  bool has_durable_steps() const {
    return session.durability.level != protocol::DurabilityLevel::kMemory;
  }
  StatePart WeightsPart(uint32_t part) const;
  uint64_t ledger_bytes = 0;  // maximum bytes of the job in the node's ledger

  // Swap slots for blocks, all of one size: kSwapSlotsPerBlock for each swapped block, so that its next version can be written
  // before any block is published. With durable steps see Placement::slots_needed(). swap_slot_bytes 0: no block can be on
  // swap.
  uint64_t swap_slot_bytes = 0;
  uint32_t swap_slots = 0;

  // Bytes of all swap slots, for blocks and for pages of sums.
  uint64_t swap_bytes() const { return swap_slots * swap_slot_bytes + sum_slots * sum_page_bytes; }

  // Heap bytes of the layout, of the tables made from it, and of the sessions. An upper estimate.
  uint64_t table_bytes = 0;

  // Bytes that count in the limit, without states in DRAM (see placement).
  uint64_t fixed_bytes = 0;
  // Part of fixed_bytes that becomes free only when other jobs have moved blocks to swap. If it is not 0, PlanJob has put all
  // states on swap.
  uint64_t missing_bytes = 0;

  bool uses_float_sums = false;
  // Switches to float32 sums. fixed_bytes must include their memory already.
  void UseFloatSums(const protocol::Layout& layout);
  StatePart float_sums_part() const {
    return {.offset_bytes = float_sums_offset, .bytes = float_sums_bytes};
  }

  // Job over several nodes: offset of the summary in a session's arena.
  uint64_t summary_offset(const protocol::Layout& layout) const;
  uint64_t extra_state_slot(uint32_t rank, uint32_t slot) const {
    return extra_state_offset + (uint64_t{rank} * 2 + slot) * extra_state_slot_bytes;
  }
};

// Returns the pages, ascending, that an update of the block reads sums from. Only if sums are paged.
std::vector<uint32_t> SumPagesOf(const MemoryPlan& plan, const BlockMap& map, uint32_t block);

// True if a recovered job has retained slots for all its pages of sums.
bool HasOwnSumSlots(const MemoryPlan& plan, const DurableJob* recovered);

SessionRequest SessionRequestOf(const AttachRequested& request);

// Bytes of the largest range of a partition that is delivered at once.
uint64_t PieceBytes(const protocol::Layout& layout);
// Bytes from the start of a partition's gradient sums to the start of the next partition's.
uint64_t SumBytes(const protocol::PartitionPlace& partition, protocol::DType sum_dtype);

// Bytes of the step region of a session with the room for extra_state that it asked for.
uint64_t StepRegionBytes(const protocol::Layout& layout, const SessionRequest& session);

// `grad_arena_bytes` of a reader, rounded up to whole pages.
uint64_t ReaderArenaBytes(uint64_t grad_arena_bytes);

// Checks a reader's request on its own. The memory that the node has left is not checked.
//
// Errors  E_RANGE  its arena is below a page or above kGradArenaBytesMax.
absl::Status CheckReaderRequest(uint64_t grad_arena_bytes);

// Checks a session's request on its own. The memory that the node has left is not checked.
//
// Errors  E_RANGE        the gradients' part is below kGradPiecesMin pieces.
//         E_EXTRA_STATE  above kExtraStateBytesMax.
absl::Status CheckSessionRequest(const protocol::Layout& layout, const SessionRequest& request);

// Plans a job. If the limit leaves too little, the plan says how many bytes are missing: other jobs may free them. If they
// cannot free enough for the weights of a sharded job, its weights are on swap, except the groups that fit (tried in their
// order), and so are all its states. If that is still not enough, gradient sums are paged, in as many frames as fit.
//
// Errors  E_DRAM_LIMIT  no job can make so much room, or there is no swap; see DramLimitError.
//         E_SWAP_NOSPC  swap is too small for what does not fit in DRAM: needed and free bytes.
absl::StatusOr<MemoryPlan> PlanJob(const protocol::Layout& layout, const SessionRequest& request,
                                   const NodeOptions& options, const NodeUse& use);

// Returns the smallest limit with which all of a job is in DRAM, beside the bytes that the node holds.
//
// Errors  of LeastLimitsOf.
absl::StatusOr<uint64_t> LimitWithoutSwap(const protocol::Layout& layout,
                                          const SessionRequest& request, const NodeOptions& options,
                                          const NodeUse& use);

// The smallest limits with which a job fits, beside the bytes that the node holds, if swap has room for its states; for its
// weights too; for its gradients too. A limit that would be no smaller (with shared attachment the last two) equals the one
// before it.
struct LeastLimits {
  uint64_t states_on_swap = 0;
  uint64_t weights_on_swap = 0;
  uint64_t gradients_on_swap = 0;  // above kAdvisedBlocksMax blocks: weights_on_swap
};

// Errors  of CheckSessionRequest; E_DRAM_LIMIT  what a session asks for is above kGradArenaBytesMax.
absl::StatusOr<LeastLimits> LeastLimitsOf(const protocol::Layout& layout,
                                          const SessionRequest& request, const NodeOptions& options,
                                          const NodeUse& use);

// Plans an existing job for sessions of another world size. Weights and blocks stay in their places, and room for extra_state
// never shrinks. `use` is the use of other jobs, with own_state_bytes.
//
// Errors  E_DRAM_LIMIT  as PlanJob.
absl::StatusOr<MemoryPlan> PlanWorld(const protocol::Layout& layout, const MemoryPlan& job,
                                     const SessionRequest& request, const NodeOptions& options,
                                     const NodeUse& use);

// Returns the error of a job that does not fit: the terms of its sum, the limit, the bytes that other jobs hold, the part of
// them that can move to swap, and a sufficient limit. `state_bytes_needed`: states that must be in DRAM.
absl::Status DramLimitError(const MemoryPlan& plan, const NodeOptions& options, const NodeUse& use,
                            uint64_t state_bytes_needed = 0);

}  // namespace forebay::daemon
