// SPDX-License-Identifier: Apache-2.0
// Actions that update a job's record: the state from which another daemon continues the job if this daemon is killed
// (KeptRecord). A node that retains its jobs emits them (NodeOptions::keeps_jobs). And the types that they are made of.
#pragma once

#include <cstdint>
#include <memory>
#include <memory_resource>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "nvme/slot_map.h"
#include "protocol/layout.h"
#include "protocol/wire.h"

namespace forebay::daemon {

using JobId = uint64_t;      // unique within one daemon
using SessionId = uint64_t;  // unique within one daemon
using TaskId = uint64_t;     // names one asynchronous action until its TaskDone

struct DurableJob;  // durable_job.h

// XXH3-64 of each page of a block's plane of weights, in order. A fetch reads and verifies single pages.
using WeightsDigests = std::shared_ptr<const std::vector<uint64_t>>;

// A part of an arena.
struct StatePart {
  uint64_t offset_bytes = 0;
  uint64_t bytes = 0;
};

// Each action below takes effect at once, before the actions behind it.

// Records the whole job, between two steps. The actions below then record its changes.
struct RecordJob {
  std::shared_ptr<const DurableJob> job;     // without extra_states
  std::vector<StatePart> extra_states = {};  // in the step arena, by rank
  uint32_t sum_pages = 0;                    // number of pages of gradient sums; 0: not paged
};

// A block's bytes have another place: a swap slot, or DRAM.
struct RecordBlock {
  JobId job = 0;
  uint32_t block = 0;
  std::optional<nvme::Slot> slot = {};  // empty: DRAM, or zeros that were never written
  uint64_t checksum = 0;
  uint64_t written_step = 0;
  WeightsDigests weights_digests = {};
  // 0: the place counts at once. Otherwise the decided step that has written the block: the place counts when that step is
  // published.
  uint64_t step = 0;
  uint64_t overflows = 0;  // masters in the block that overflowed in that step
  // Slot of the step arena with the block's new weights, until RecordInstalled.
  std::optional<uint32_t> weights_slot = {};
};

// The block's new weights are in the weights arena.
struct RecordInstalled {
  JobId job = 0;
  uint32_t block = 0;
};

// The block is in a staging slot and is updated there. The RecordBlock of the step names the slot that it is written to.
struct RecordStaged {
  JobId job = 0;
  uint32_t block = 0;
  uint64_t step = 0;
  uint32_t staging_slot = 0;
};

// A page of gradient sums of the decided or prepared step has another place: a frame of the step arena, or a swap slot. Neither
// is set if the step needs the page no longer, or has no sums in it.
struct RecordSums {
  JobId job = 0;
  uint32_t page = 0;
  uint64_t step = 0;
  std::optional<uint32_t> frame = {};
  std::optional<nvme::Slot> slot = {};
  uint64_t checksum = 0;  // of the bytes in `slot`
  uint64_t spills = 0;    // times that the page was written to swap; in its identity
};

// A rank has delivered gradients to an attempt at the step after the newest committed one. If the daemon is killed now, older
// attempts have ended.
struct RecordAttempt {
  JobId job = 0;
  uint64_t step = 0;
  uint64_t attempt = 0;
};

// A decided step, as its update takes it.
struct StepOrder {
  uint64_t step = 0;
  float grad_scale = 1.0F;
  // Bounds that the scaled gradient's elements are clipped to; both 0: no bounds.
  float grad_min = 0.0F;
  float grad_max = 0.0F;
  std::pmr::vector<protocol::HyperParams> hyper_params = {};  // by parameter group
  std::pmr::vector<bool> params = {};                         // true: has a gradient, is updated

  StepOrder CopyIn(std::pmr::memory_resource* memory) const {
    return {.step = step,
            .grad_scale = grad_scale,
            .grad_min = grad_min,
            .grad_max = grad_max,
            .hyper_params = {hyper_params, memory},
            .params = {params, memory}};
  }
};

// A step of a job over several nodes is prepared: the values, beside the gradient sums, that its decision needs. RecordSums has
// recorded the place of each page of sums before, and records later moves. A page without a place then is not part of the step.
struct RecordPrepared {
  JobId job = 0;
  uint64_t step = 0;  // 0: the prepared step is abandoned
  uint64_t attempt = 0;
  protocol::StepRequest request = {};  // the same for each rank, except extra_state_bytes
  std::pmr::vector<protocol::HyperParams> hyper_params = {};
  StatePart float_sums = {};                      // as in RecordDecision
  std::pmr::vector<StatePart> extra_states = {};  // in the step arena, by rank
  std::vector<std::byte> summary = {};            // the node's, encoded
};

// The step is decided: bytes in DRAM change until the step is published. Records of this step that were emitted before this
// action count from here on.
struct RecordDecision {
  JobId job = 0;
  uint64_t step = 0;
  StepOrder order = {};
  // Part of the step arena with the gradient sums, if MemoryPlan::uses_float_sums; otherwise empty.
  StatePart float_sums = {};
  // Values that count when the step is published.
  std::pmr::vector<uint64_t> param_updates = {};  // by parameter
  std::pmr::vector<uint32_t> trace = {};
  std::pmr::vector<StatePart> extra_states = {};  // in the step arena, by rank
  // Values that calls of the step are answered with.
  double norm = 0;
  bool clipped = false;
  uint64_t overflowed = 0;              // masters in the step before, not reported yet
  std::vector<std::byte> summary = {};  // of all nodes, encoded; on one node empty
};

// A lease of a rank, in a job with weights on swap. If the daemon is killed, the leased weights stay at their offset.
struct KeptLease {
  uint64_t lease = 0;
  uint32_t rank = 0;
  uint32_t partition = 0;
  uint64_t offset_bytes = 0;  // in the weights arena

  bool operator==(const KeptLease&) const = default;
};
struct RecordLease {
  JobId job = 0;
  KeptLease lease;
};
struct RecordLeaseEnd {
  JobId job = 0;
  uint64_t lease = 0;
};
// Bytes that one lease takes in a record.
inline constexpr uint64_t kLeaseRecordBytes = 32;
// Maximum number of leases in a job's record.
inline uint64_t LeasesRecordedMax(const protocol::Layout& layout, uint64_t world_size) {
  return layout.partitions().size() + 64 * world_size;
}

// The norms of the decided LAMB step are known, and its blocks change from here on. `trust` is by parameter
// (UpdateSegment::trust).
struct RecordTrust {
  JobId job = 0;
  uint64_t step = 0;
  std::pmr::vector<float> trust = {};
};

// The step is published.
struct RecordStep {
  JobId job = 0;
  uint64_t step = 0;
  uint64_t overflowed = 0;  // masters
};

// A parameter's number of updates was set, between two steps.
struct RecordUpdates {
  JobId job = 0;
  uint32_t param = 0;
  uint64_t updates = 0;
};

// The job has failed: no daemon can continue it from the record.
struct DropRecord {
  JobId job = 0;
};

// A job over several nodes has returned to an older durable step, because another node has no newer one.
struct JobWentBack {
  std::string job;
  uint64_t from_step = 0;
  uint64_t to_step = 0;
};

// A job cannot continue the update in which the daemon before was killed. It continues from its durable step, or is lost if it
// has none.
struct UpdateNotResumed {
  std::string job;  // as root writes names
  uint64_t step = 0;
  absl::Status reason;
};

}  // namespace forebay::daemon
