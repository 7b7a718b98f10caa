// SPDX-License-Identifier: Apache-2.0
// Values that the core shows to status and plans: of sessions, jobs, plans, swap paths and the node.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "daemon/core/base/events.h"
#include "protocol/durability.h"
#include "protocol/layout.h"

namespace forebay::daemon {

// What statistics may know of one session.
struct SessionView {
  SessionId id = 0;
  uint32_t uid = 0;
  bool reader = false;  // has no rank
  uint32_t rank = 0;
  bool attached = false;  // AnswerAttach was given
  bool fenced = false;    // every command gets E_RANK_LOST or E_FENCED
  uint64_t leases = 0;
  uint64_t commands_in_flight = 0;
};

// Moves of blocks between DRAM and swap, and off marked paths.
struct ResidencyCounters {
  uint64_t evicted = 0;
  uint64_t promoted = 0;
  uint64_t relocated = 0;
  uint64_t failed = 0;
};

// Fetches of weights that are on swap.
struct WeightsCounters {
  uint64_t fetches = 0;  // that were answered
  // Of these, with weights that were in DRAM or on their way when they came.
  uint64_t fetches_ahead = 0;
  uint64_t read_bytes = 0;
};

// Pages of gradient sums that went to swap and came back, in bytes.
struct SumsCounters {
  uint64_t read_bytes = 0;
  uint64_t written_bytes = 0;
};

// Swap bytes of a step in which every parameter has a gradient, in one backward pass.
struct StepTraffic {
  uint64_t read_bytes = 0;  // states and weights for the update; weights for forward and backward
  uint64_t written_bytes = 0;
  uint64_t gradient_bytes = 0;  // written and read besides, at most: sums that find no frame
  uint64_t durable_bytes = 0;   // written besides where the step becomes durable: what is in DRAM
};

// What statistics may know of one job; the names are those of JobStatus in protocol/forebay.capnp.
struct JobView {
  std::string name;
  JobId id = 0;
  uint32_t uid = 0;
  std::shared_ptr<const protocol::Layout> layout;  // dtype, optimizer, format, groups
  std::vector<SessionView> sessions;               // that have not been closed, by rank
  uint64_t generation = 0;
  std::optional<uint32_t> detached_rank;  // the first that has detached in good order since
  uint64_t committed_step = 0;
  uint64_t published_step = 0;  // the same, or the one before
  protocol::Durability durability = {};
  uint64_t durable_step = 0;  // the newest that the daemon's death leaves; 0: none
  uint32_t world_size = 0;
  uint64_t params = 0;            // elements
  uint64_t trainable_params = 0;  // of these, those that are not frozen
  uint64_t state_bytes = 0;       // weights and states of the parameters, padding left out
  uint32_t blocks = 0;
  uint32_t resident_blocks = 0;
  uint64_t resident_bytes = 0;         // DRAM of states, of blocks that move too
  uint64_t weights_on_swap_bytes = 0;  // of partitions that are there; 0: all are in DRAM
  uint64_t weights_cache_bytes = 0;    // DRAM for copies of them
  WeightsCounters weights;
  ResidencyCounters moves;
  uint64_t leases = 0;
  uint64_t update_reads = 0;
  uint64_t update_reads_prefetched = 0;
  // Blocks that were read ahead and gave their slot away: they are read again.
  uint64_t reclaimed_reads = 0;
  uint64_t state_read_bytes = 0;
  uint64_t state_written_bytes = 0;
  uint64_t last_step_reads = 0;
  uint64_t last_step_reads_prefetched = 0;
  uint64_t last_step_read_bytes = 0;
  uint64_t last_step_written_bytes = 0;
  uint64_t last_update_bytes = 0;  // of both, from the decision on
  // Blocks that were updated before the decision of their step: taken by it, or in vain.
  uint64_t early_updates = 0;
  uint64_t dropped_updates = 0;
  uint64_t last_step_early_updates = 0;
  uint64_t restored_bytes = 0;  // of a job that comes back: read from swap, of so many
  uint64_t to_restore_bytes = 0;
  bool ready = false;   // initial parameters are written
  absl::Status failed;  // OK while the job is well
  // Taken from the limit: arenas and resident blocks; 0: it waits for room.
  uint64_t dram_bytes = 0;
  uint64_t swap_bytes = 0;  // its slots on swap
  // Gradient sums that are paged: DRAM for them, and what does not fit; 0: all are in DRAM.
  uint64_t sum_frames_bytes = 0;
  uint64_t sums_on_swap_bytes = 0;
  SumsCounters sums;
  StepTraffic step_traffic;
  uint64_t new_weights_bytes = 0;  // DRAM for those of early updates
  // OK, or the failed write that the running step, a gradient or a durable step waits for: with path and errno.
  absl::Status swap_wait;
  std::vector<uint32_t> trace;
};

// Of a sharded job's plan, what one rank's partitions take; the names are those of RankPlan there.
struct RankPlan {
  uint32_t rank = 0;
  uint64_t weights = 0;
  uint64_t weights_cache = 0;
  uint64_t states = 0;
  uint64_t sums = 0;
  uint64_t weights_on_swap = 0;
  uint64_t states_on_swap = 0;
  uint64_t largest_partition = 0;
};

// What making a job takes, in bytes; the names are those of JobPlan in protocol/forebay.capnp.
struct JobPlan {
  uint64_t weights = 0;
  uint64_t weights_cache = 0;
  uint64_t states = 0;
  uint64_t sums = 0;
  uint64_t extra_state = 0;
  uint64_t sessions = 0;
  uint64_t tables = 0;
  uint64_t node = 0;
  uint64_t others = 0;
  uint64_t limit = 0;
  uint64_t missing = 0;
  uint64_t weights_on_swap = 0;
  uint32_t blocks = 0;
  uint32_t resident_blocks = 0;
  uint64_t swap = 0;
  uint64_t step_read = 0;
  uint64_t step_written = 0;
  uint64_t durable_written = 0;
  uint64_t durable_every = 0;
  uint64_t all_in_dram = 0;
  uint64_t new_weights = 0;
  uint64_t sums_on_swap = 0;
  uint64_t grad_arena = 0;
  uint64_t step_region = 0;
  uint64_t activations = 0;
  uint64_t trace = 0;
  uint64_t ring = 0;
  uint64_t extra_state_copy = 0;
  std::vector<RankPlan> ranks;
};

// What statistics may know of a swap path.
struct SwapPathView {
  uint64_t used_bytes = 0;
  double share = 0;  // of new writes, where all paths work
  // Bytes a second, of its last transfers or as measured; 0: not known.
  double read_rate = 0;
  double write_rate = 0;
  // Of its last transfers alone; 0: too few so far.
  double current_read_rate = 0;
  double current_write_rate = 0;
  bool marked = false;  // it fails: it gets writes where no other path has room
};

// Bytes the state machine has promised; the kernel's own count must agree.
struct NodeView {
  uint64_t dram_limit_bytes = 0;
  // node_bytes, all jobs, and weights of deleted jobs that a process still uses.
  uint64_t dram_used_bytes = 0;
  uint64_t swap_capacity_bytes = 0;
  uint64_t swap_used_bytes = 0;
  std::vector<SwapPathView> swap_paths;
  uint32_t staging_slots = 0;
  uint32_t staging_slots_used = 0;
};

}  // namespace forebay::daemon
