// SPDX-License-Identifier: Apache-2.0
// Values that status and plan requests show: statistics of sessions, jobs, swap paths and the node, and a job's memory plan.
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

// Statistics of one session.
struct SessionView {
  SessionId id = 0;
  uint32_t uid = 0;
  bool reader = false;  // has no rank
  uint32_t rank = 0;
  bool attached = false;  // AnswerAttach was emitted with OK
  bool fenced = false;    // every command gets E_RANK_LOST or E_FENCED
  uint64_t leases = 0;
  uint64_t commands_in_flight = 0;
};

// Counts moves of blocks between DRAM and swap, and off marked swap paths.
struct ResidencyCounters {
  uint64_t evicted = 0;
  uint64_t promoted = 0;
  uint64_t relocated = 0;
  uint64_t failed = 0;
};

// Counts fetches of weights that are on swap.
struct WeightsCounters {
  uint64_t fetches = 0;  // answered fetches
  // Fetches whose weights were in DRAM, or were being read, when the fetch arrived.
  uint64_t fetches_ahead = 0;
  uint64_t read_bytes = 0;
};

// Bytes of pages of gradient sums that were read from swap and written to swap.
struct SumsCounters {
  uint64_t read_bytes = 0;
  uint64_t written_bytes = 0;
};

// Swap bytes of a step in which every parameter has a gradient, in one backward pass.
struct StepTraffic {
  uint64_t read_bytes = 0;  // states and weights for the update; weights for forward and backward
  uint64_t written_bytes = 0;
  uint64_t gradient_bytes = 0;  // maximum of gradient sums written; as many are read
  uint64_t durable_bytes = 0;   // data in DRAM that a durable step writes too
};

// Statistics of one job. JobStatus of protocol/forebay.capnp has fields with these names.
struct JobView {
  std::string name;
  JobId id = 0;
  uint32_t uid = 0;
  std::shared_ptr<const protocol::Layout> layout;  // dtype, optimizer, format, groups
  std::vector<SessionView> sessions;               // open sessions, by rank
  uint64_t generation = 0;
  std::optional<uint32_t> detached_rank;  // lowest rank that has detached and not attached since
  uint64_t committed_step = 0;
  uint64_t published_step = 0;  // committed_step, or the step before it
  protocol::Durability durability = {};
  uint64_t durable_step = 0;  // newest step that outlives the daemon's death; 0: none
  uint32_t world_size = 0;
  uint64_t params = 0;            // elements
  uint64_t trainable_params = 0;  // elements that are not frozen
  uint64_t state_bytes = 0;       // weights and states of the parameters without padding
  uint32_t blocks = 0;
  uint32_t resident_blocks = 0;
  uint64_t resident_bytes = 0;         // DRAM of states, moving blocks included
  uint64_t weights_on_swap_bytes = 0;  // weights of partitions that are on swap
  uint64_t weights_cache_bytes = 0;    // DRAM for copies of weights that are on swap
  WeightsCounters weights;
  ResidencyCounters moves;
  uint64_t leases = 0;
  uint64_t update_reads = 0;
  uint64_t update_reads_prefetched = 0;
  // Blocks that were read ahead, lost their staging slot, and are read again.
  uint64_t reclaimed_reads = 0;
  uint64_t state_read_bytes = 0;
  uint64_t state_written_bytes = 0;
  uint64_t last_step_reads = 0;
  uint64_t last_step_reads_prefetched = 0;
  uint64_t last_step_read_bytes = 0;
  uint64_t last_step_written_bytes = 0;
  uint64_t last_update_bytes = 0;  // bytes read and written after the decision
  // Number of block updates that ran before their step was decided, and number of these updates that were discarded.
  uint64_t early_updates = 0;
  uint64_t dropped_updates = 0;
  uint64_t last_step_early_updates = 0;
  // Progress of restoring a recovered job: bytes that have been read from swap, and total bytes to read.
  uint64_t restored_bytes = 0;
  uint64_t to_restore_bytes = 0;
  bool ready = false;   // initial parameters are written
  absl::Status failed;  // OK, or the error because of which the job failed
  // Bytes of the DRAM limit that the job takes, for arenas and resident blocks. 0 if the job still waits for DRAM.
  uint64_t dram_bytes = 0;
  uint64_t swap_bytes = 0;  // bytes of all swap slots of the job
  // Bytes of DRAM for frames of paged gradient sums, and maximum bytes of such sums on swap. Both 0 if all sums are in DRAM.
  uint64_t sum_frames_bytes = 0;
  uint64_t sums_on_swap_bytes = 0;
  SumsCounters sums;
  StepTraffic step_traffic;
  uint64_t new_weights_bytes = 0;  // DRAM for new weights of early updates
  // OK, or the error of a failed write that the running step, a gradient or a durable step waits for. It names path and errno.
  absl::Status swap_wait;
  std::vector<uint32_t> trace;
};

// Bytes that the partitions of one rank take, in the plan of a sharded job. RankPlan of protocol/forebay.capnp has fields with
// these names.
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

// Bytes that creating a job takes. JobPlan of protocol/forebay.capnp has fields with these names.
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

// Statistics of one swap path.
struct SwapPathView {
  uint64_t used_bytes = 0;
  double share = 0;  // share of new writes, 0 to 1, if all paths work
  // Bytes a second, from the path's last transfers or from an earlier measurement. 0 if the rate is not known.
  double read_rate = 0;
  double write_rate = 0;
  // Bytes a second, from the path's last transfers alone. 0 if the path has had too few transfers.
  double current_read_rate = 0;
  double current_write_rate = 0;
  bool marked = false;  // the path fails: no writes go to it while another has room
};

// Memory and swap that the state machine has granted on this node. The kernel's own count must agree.
struct NodeView {
  uint64_t dram_limit_bytes = 0;
  // Sum of NodeOptions::node_bytes, the DRAM of all jobs, and weights of deleted jobs that a process still uses.
  uint64_t dram_used_bytes = 0;
  uint64_t swap_capacity_bytes = 0;
  uint64_t swap_used_bytes = 0;
  std::vector<SwapPathView> swap_paths;
  uint32_t staging_slots = 0;
  uint32_t staging_slots_used = 0;
};

}  // namespace forebay::daemon
