// SPDX-License-Identifier: Apache-2.0
// Actions that update a job's record: the state from which another daemon continues the job if this daemon is killed
// (KeptRecord). Only a node with NodeOptions::keeps_jobs emits these actions. Also declares the types of their fields.
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

// XXH3-64 digests of the pages of a block's plane of weights, in order. A fetch reads and verifies single pages.
using WeightsDigests = std::shared_ptr<const std::vector<uint64_t>>;

// Byte range of an arena.
struct StatePart {
  uint64_t offset_bytes = 0;
  uint64_t bytes = 0;
};

// An action of this file takes effect at once, before the actions that were emitted after the action.

// Records the whole job, between two steps. The actions below then record its changes. The last one records a job that stops.
struct RecordJob {
  std::shared_ptr<const DurableJob> job;     // extra_states of the DurableJob is empty
  std::vector<StatePart> extra_states = {};  // ranges of the step arena, by rank
  uint32_t sum_pages = 0;  // number of pages of gradient sums; 0 if the sums are not paged
  // True if the job has a record, which stays valid if the new record cannot be created.
  bool has_record = false;
};

// Records that a block's bytes have moved to a swap slot or to DRAM.
struct RecordBlock {
  JobId job = 0;
  uint32_t block = 0;
  std::optional<nvme::Slot> slot = {};  // nullopt: in DRAM, or zeros that were never written
  uint64_t checksum = 0;
  uint64_t written_step = 0;
  WeightsDigests weights_digests = {};
  // 0 if the new place is valid at once. Otherwise the decided step that has written the block: the new place is valid once
  // that step is published.
  uint64_t step = 0;
  uint64_t overflows = 0;  // number of masters in the block that overflowed in `step`
  // Slot of the step arena that holds the block's new weights until RecordInstalled.
  std::optional<uint32_t> weights_slot = {};
};

// Records that the block's new weights have been copied to the weights arena.
struct RecordInstalled {
  JobId job = 0;
  uint32_t block = 0;
};

// Records that a block was read into a staging slot, in which the block is updated. A RecordBlock of the same step later names
// the swap slot to which the updated block was written.
struct RecordStaged {
  JobId job = 0;
  uint32_t block = 0;
  uint64_t step = 0;
  uint32_t staging_slot = 0;
};

// Records that a page of gradient sums of the decided or prepared step has moved to a frame of the step arena or to a swap
// slot. `frame` and `slot` are both nullopt if the step no longer needs the page, or if the page holds no sums.
struct RecordSums {
  JobId job = 0;
  uint32_t page = 0;
  uint64_t step = 0;
  std::optional<uint32_t> frame = {};
  std::optional<nvme::Slot> slot = {};
  uint64_t checksum = 0;  // checksum of the bytes in `slot`
  uint64_t spills = 0;    // number of writes of the page to swap; the checksum covers it
};

// Records that a rank has delivered gradients to an attempt at the step after the newest committed step. If the daemon is
// killed after this, older attempts at the step have ended.
struct RecordAttempt {
  JobId job = 0;
  uint64_t step = 0;
  uint64_t attempt = 0;
};

// Parameters of a decided step that its update takes.
struct StepOrder {
  uint64_t step = 0;
  float grad_scale = 1.0F;
  // Bounds to which elements of the scaled gradient are clipped. Both are 0 if elements are not clipped.
  float grad_min = 0.0F;
  float grad_max = 0.0F;
  std::pmr::vector<protocol::HyperParams> hyper_params = {};  // one entry for each group
  std::pmr::vector<bool> params = {};  // by parameter: true if it has a gradient and is updated

  StepOrder CopyIn(std::pmr::memory_resource* memory) const {
    return {.step = step,
            .grad_scale = grad_scale,
            .grad_min = grad_min,
            .grad_max = grad_max,
            .hyper_params = {hyper_params, memory},
            .params = {params, memory}};
  }
};

// Records that a step of a job over several nodes is prepared, and the values other than gradient sums that deciding the step
// needs. Earlier RecordSums have recorded the place of each page of sums; later ones record moves. A page without a recorded
// place is not part of the step.
struct RecordPrepared {
  JobId job = 0;
  uint64_t step = 0;  // 0: the prepared step is abandoned
  uint64_t attempt = 0;
  protocol::StepRequest request = {};  // equal on all ranks, but for extra_state_bytes
  std::pmr::vector<protocol::HyperParams> hyper_params = {};
  StatePart float_sums = {};                      // see RecordDecision::float_sums
  std::pmr::vector<StatePart> extra_states = {};  // ranges of the step arena, by rank
  std::vector<std::byte> summary = {};            // encoded summary of this node
};

// Records that a step is decided. Its update changes bytes in DRAM until the step is published. Records of this step that were
// emitted before this action become valid now.
struct RecordDecision {
  JobId job = 0;
  uint64_t step = 0;
  StepOrder order = {};
  // Range of the step arena with the gradient sums, if MemoryPlan::uses_float_sums. Otherwise 0 bytes.
  StatePart float_sums = {};
  // Values that become valid when the step is published.
  std::pmr::vector<uint64_t> param_updates = {};  // number of updates, by parameter
  std::pmr::vector<uint32_t> trace = {};
  std::pmr::vector<StatePart> extra_states = {};  // ranges of the step arena, by rank
  // Values that the answers to calls of the step carry.
  double norm = 0;
  bool clipped = false;
  uint64_t overflowed = 0;              // overflowed masters of the step before, unreported
  std::vector<std::byte> summary = {};  // encoded, of all nodes; empty for one node
};

// A lease of a rank on weights, in a job with weights on swap. If the daemon is killed, the next daemon leaves the leased
// weights at the same offset.
struct KeptLease {
  uint64_t lease = 0;
  uint32_t rank = 0;
  uint32_t partition = 0;
  uint64_t offset_bytes = 0;  // offset in the weights arena

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
// Maximum number of leases in a job's record.
inline uint64_t LeasesRecordedMax(const protocol::Layout& layout, uint64_t world_size) {
  return layout.partitions().size() + 64 * world_size;
}

// Records that the norms of the decided LAMB step are known, so that the step's blocks change after this action. `trust` has
// UpdateSegment::trust of each parameter.
struct RecordTrust {
  JobId job = 0;
  uint64_t step = 0;
  std::pmr::vector<float> trust = {};
};

// Records that a step is published.
struct RecordStep {
  JobId job = 0;
  uint64_t step = 0;
  uint64_t overflowed = 0;  // number of masters that overflowed
};

// Records that a client has set a parameter's number of updates, between two steps.
struct RecordUpdates {
  JobId job = 0;
  uint32_t param = 0;
  uint64_t updates = 0;
};

// Deletes the record of a failed job, so that no daemon continues the job.
struct DropRecord {
  JobId job = 0;
};

// Reports that a job over several nodes has returned to an older durable step, because another node has no newer durable step.
struct JobWentBack {
  std::string job;
  uint64_t from_step = 0;
  uint64_t to_step = 0;
};

// Reports that a job cannot continue the update during which the previous daemon was killed. The job continues from its durable
// step. A job without a durable step is lost.
struct UpdateNotResumed {
  std::string job;  // name in the form in which root writes it
  uint64_t step = 0;
  absl::Status reason;
};

}  // namespace forebay::daemon
