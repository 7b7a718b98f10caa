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

// One session, for statistics.
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
  uint64_t gradient_bytes = 0;  // at most, of sums without a frame; also as many read
  uint64_t durable_bytes = 0;   // of data in DRAM, also written if the step becomes durable
};

// One job, for statistics. The fields are named as in JobStatus of protocol/forebay.capnp.
struct JobView {
  std::string name;
  JobId id = 0;
  uint32_t uid = 0;
  std::shared_ptr<const protocol::Layout> layout;  // dtype, optimizer, format, groups
  std::vector<SessionView> sessions;               // not closed yet, by rank
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
  uint64_t resident_bytes = 0;         // DRAM of states, those of blocks that are moving included
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
  uint64_t last_update_bytes = 0;  // read and written from the decision on
  // Blocks that were updated before the decision of their step: all of them, and those whose update was discarded.
  uint64_t early_updates = 0;
  uint64_t dropped_updates = 0;
  uint64_t last_step_early_updates = 0;
  // Restore of a recovered job: bytes that have been read from swap, and bytes to read in all.
  uint64_t restored_bytes = 0;
  uint64_t to_restore_bytes = 0;
  bool ready = false;   // initial parameters are written
  absl::Status failed;  // OK while the job is well
  // DRAM that the job takes of the limit: arenas and resident blocks. 0: the job waits for room.
  uint64_t dram_bytes = 0;
  uint64_t swap_bytes = 0;  // all slots of the job
  // Paged gradient sums: DRAM of their frames, and maximum bytes on swap. Both 0: all sums are in DRAM.
  uint64_t sum_frames_bytes = 0;
  uint64_t sums_on_swap_bytes = 0;
  SumsCounters sums;
  StepTraffic step_traffic;
  uint64_t new_weights_bytes = 0;  // DRAM for new weights of early updates
  // OK, or the error of a failed write that the running step, a gradient or a durable step waits for. It names path and errno.
  absl::Status swap_wait;
  std::vector<uint32_t> trace;
};

// Bytes that the partitions of one rank take, in the plan of a sharded job. The fields are named as in RankPlan of
// protocol/forebay.capnp.
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

// Bytes that creating a job takes. The fields are named as in JobPlan of protocol/forebay.capnp.
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

// One swap path, for statistics.
struct SwapPathView {
  uint64_t used_bytes = 0;
  double share = 0;  // of new writes, if all paths work
  // Bytes a second, by the path's last transfers or as measured. 0: not known.
  double read_rate = 0;
  double write_rate = 0;
  // Bytes a second, by the path's last transfers alone. 0: too few transfers so far.
  double current_read_rate = 0;
  double current_write_rate = 0;
  bool marked = false;  // it fails: it gets writes only if no other path has room
};

// Memory and swap that the state machine has granted on this node. The kernel's own count must agree.
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
