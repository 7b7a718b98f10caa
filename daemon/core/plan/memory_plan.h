// SPDX-License-Identifier: Apache-2.0
// Admission: what a job needs, term by term, against what the node has left.
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

// What the node has promised so far.
struct NodeUse {
  // Of other jobs, when the blocks that leave DRAM have left it.
  uint64_t jobs_dram_bytes = 0;
  // Of these, states that can move to swap, by what is known before this job has its slots.
  uint64_t movable_bytes = 0;
  // Of the job itself, where it exists.
  uint64_t own_state_bytes = 0;
  // Weights of deleted jobs that a process still has open or mapped.
  uint64_t deleted_weights_bytes = 0;
  // What is free on swap.
  const nvme::SlotMap* swap = nullptr;
  // The job comes back: its weights and blocks are where its durable step has them, and so many slots are its own.
  const DurableJob* recovered = nullptr;
};

// What the node, other jobs and weights of deleted jobs hold.
uint64_t TakenBytes(const NodeOptions& options, const NodeUse& use);

// Every arena of a job, its sizes and its offsets.
struct MemoryPlan {
  uint64_t weights_bytes = 0;  // of the arena
  // Partitions whose weights are on swap, and the part of the arena that has copies of some of them: behind the
  // others, which lie there end to end. Empty: all are in DRAM, as the layout has them.
  std::vector<bool> weights_on_swap;
  uint64_t weights_cache_offset = 0;
  uint64_t weights_cache_bytes = 0;
  uint64_t weights_on_swap_bytes = 0;
  bool has_weights_on_swap() const { return !weights_on_swap.empty(); }

  // Step arena: accumulators, overflow, extra_state.
  protocol::DType sum_dtype = protocol::DType::kFloat32;  // of the accumulators
  // By partition: into the step arena, or, where sums are paged, through the pages.
  std::vector<uint64_t> accumulator_offsets;
  // Where not all sums of a step fit in DRAM: so many frames of the step arena hold pages of them, the
  // other pages are on swap, in slots of their own. Page size 0: they are not paged.
  uint64_t sum_page_bytes = 0;
  uint32_t sum_pages = 0;
  uint32_t sum_frames = 0;
  uint32_t sum_slots = 0;
  bool has_paged_sums() const { return sum_page_bytes > 0; }
  uint64_t sums_on_swap_bytes() const {  // at most
    return uint64_t{sum_pages - std::min(sum_frames, sum_pages)} * sum_page_bytes;
  }
  uint64_t overflow_offset = 0;
  uint64_t piece_bytes = 0;         // of the largest range that is delivered
  uint32_t overflow_slots = 0;      // kOverflowSlotsPerRank for each rank; sharded: none
  uint64_t extra_state_offset = 0;  // two slots per rank
  uint64_t extra_state_slot_bytes = 0;
  // Where early updates put new weights of blocks whose weights are in DRAM: each slot has room for a block's.
  uint64_t early_weights_offset = 0;
  uint32_t early_weights_slots = 0;
  uint64_t early_weights_bytes = 0;
  uint64_t step_bytes = 0;
  // Behind it, of a job whose sums have 16 bits: float32 sums. They get memory with the first
  // further backward pass of a step.
  uint64_t float_sums_offset = 0;
  uint64_t float_sums_bytes = 0;
  uint64_t step_capacity_bytes() const {  // of the step arena in all; 0: step_bytes
    return float_sums_offset + float_sums_bytes;
  }

  // Of each session: gradients, the step region, activations, the trace; and its ring.
  SessionRequest session;
  uint64_t step_region_offset = 0;
  uint64_t step_region_bytes = 0;
  uint64_t trace_bytes = 0;
  uint64_t session_arena_bytes = 0;
  uint64_t ring_bytes = 0;
  // The rank's extra_state and rank 0's as they were at attach, for the client to read.
  uint64_t extra_state_copy_bytes = 0;

  // States: blocks that fit are in DRAM at first, the rest on swap. A block has as many elements as the
  // options say, or as its planes leave room for in a staging slot.
  uint64_t block_elems = 0;
  Placement placement;
  // Of a full block.
  uint64_t block_bytes = 0;

  // With durable steps, the weights arena as far as it is no cache is saved in so many parts, of swap_slot_bytes
  // each but for the last.
  uint32_t weights_parts = 0;
  bool has_durable_steps() const {
    return session.durability.level != protocol::DurabilityLevel::kMemory;
  }
  StatePart WeightsPart(uint32_t part) const;
  uint64_t ledger_bytes = 0;  // of the node's ledger, at most

  // Slots of one size: kSwapSlotsPerBlock for each swapped block, so that the next version of each can
  // be written before any is published; with durable steps see Placement::slots_needed(). 0: no block can be on swap.
  uint64_t swap_slot_bytes = 0;
  uint32_t swap_slots = 0;

  // Of slots on swap, for blocks and pages of sums.
  uint64_t swap_bytes() const { return swap_slots * swap_slot_bytes + sum_slots * sum_page_bytes; }

  // Heap that the layout, the tables made from it and the sessions take; estimated from above.
  uint64_t table_bytes = 0;

  // What counts in the limit, but for states in DRAM: they are the placement's.
  uint64_t fixed_bytes = 0;
  // Of these, what is not free until other jobs have moved blocks to swap. Then all states are on swap.
  uint64_t missing_bytes = 0;

  bool uses_float_sums = false;
  // The sums are float32 from now on. Their memory counts in fixed_bytes already.
  void UseFloatSums(const protocol::Layout& layout);
  StatePart float_sums_part() const {
    return {.offset_bytes = float_sums_offset, .bytes = float_sums_bytes};
  }

  // In a session's arena, of a job over several nodes.
  uint64_t summary_offset(const protocol::Layout& layout) const;
  uint64_t extra_state_slot(uint32_t rank, uint32_t slot) const {
    return extra_state_offset + (uint64_t{rank} * 2 + slot) * extra_state_slot_bytes;
  }
};

// The pages that an update of the block reads sums from, ascending. Of paged sums.
std::vector<uint32_t> SumPagesOf(const MemoryPlan& plan, const BlockMap& map, uint32_t block);

// Whether a job that comes back has slots for its pages of sums from before.
bool HasOwnSumSlots(const MemoryPlan& plan, const DurableJob* recovered);

SessionRequest SessionRequestOf(const AttachRequested& request);

// Bytes of the largest range of a partition.
uint64_t PieceBytes(const protocol::Layout& layout);
// What the sum of a partition's gradients takes, up to the next one's.
uint64_t SumBytes(const protocol::PartitionPlace& partition, protocol::DType sum_dtype);

// Step region of a session that asked for `extra_state_bytes`.
uint64_t StepRegionBytes(const protocol::Layout& layout, const SessionRequest& session);

// A reader's arena of `grad_arena_bytes` on whole pages.
uint64_t ReaderArenaBytes(uint64_t grad_arena_bytes);

// Checks what a reader asks for, whatever the node has left.
//
// Errors  E_RANGE  its arena is below a page or above kGradArenaBytesMax.
absl::Status CheckReaderRequest(uint64_t grad_arena_bytes);

// Checks what a session asks for, whatever the node has left.
//
// Errors  E_RANGE        the gradients' part is below kGradPiecesMin pieces.
//         E_EXTRA_STATE  above kExtraStateBytesMax.
absl::Status CheckSessionRequest(const protocol::Layout& layout, const SessionRequest& request);

// Where the limit leaves too little, the plan says how much is missing: others may make room. Where that is
// not enough for the weights of a job that is attached sharded, they are on swap but for those that fit:
// groups in their order. So are all its states then; and where even that is not enough, gradient sums are
// paged, in as many frames as fit.
//
// Errors  E_DRAM_LIMIT  no job can make so much room, or there is no swap; see DramLimitError.
//         E_SWAP_NOSPC  swap is too small for what does not fit in DRAM: needed and free bytes.
absl::StatusOr<MemoryPlan> PlanJob(const protocol::Layout& layout, const SessionRequest& request,
                                   const NodeOptions& options, const NodeUse& use);

// The smallest limit in which all of a job is in DRAM, beside what the node holds. Errors: of LeastLimitsOf.
absl::StatusOr<uint64_t> LimitWithoutSwap(const protocol::Layout& layout,
                                          const SessionRequest& request, const NodeOptions& options,
                                          const NodeUse& use);

// The smallest limits that a job fits in beside what the node holds. On swap, which has room: states; its weights too;
// its gradients too. One that is of no use, as of shared attachment the last two, is the one before it.
struct LeastLimits {
  uint64_t states_on_swap = 0;
  uint64_t weights_on_swap = 0;
  uint64_t gradients_on_swap = 0;  // of more than kAdvisedBlocksMax blocks the one before it
};

// Errors  of CheckSessionRequest; E_DRAM_LIMIT  what a session asks for is above kGradArenaBytesMax.
absl::StatusOr<LeastLimits> LeastLimitsOf(const protocol::Layout& layout,
                                          const SessionRequest& request, const NodeOptions& options,
                                          const NodeUse& use);

// The plan of a job that exists for sessions of another world size: weights and blocks stay where they
// are. Room for extra_state never shrinks. `use` is that of other jobs.
//
// Errors  E_DRAM_LIMIT  as PlanJob.
absl::StatusOr<MemoryPlan> PlanWorld(const protocol::Layout& layout, const MemoryPlan& job,
                                     const SessionRequest& request, const NodeOptions& options,
                                     const NodeUse& use);

// The terms of a sum that does not fit, the limit, what other jobs hold and how much of it they can
// move to swap, and the limit that would do. `state_bytes_needed`: of states that must be in DRAM.
absl::Status DramLimitError(const MemoryPlan& plan, const NodeOptions& options, const NodeUse& use,
                            uint64_t state_bytes_needed = 0);

}  // namespace forebay::daemon
