// SPDX-License-Identifier: Apache-2.0
// Actions that say what another daemon finds of a job where this one is killed (KeptRecord), of a node that keeps its jobs
// so (NodeOptions::keeps_jobs); and what they are made of.
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

using JobId = uint64_t;      // never used again within one daemon
using SessionId = uint64_t;  // likewise
using TaskId = uint64_t;     // names one asynchronous action until its TaskDone

struct DurableJob;  // durable_job.h

// XXH3-64 of each page of a block's plane of weights, in order: a fetch reads and verifies single pages.
using WeightsDigests = std::shared_ptr<const std::vector<uint64_t>>;

// Part of a state arena.
struct StatePart {
  uint64_t offset_bytes = 0;
  uint64_t bytes = 0;
};

// Each is done at once, before the actions behind it.

// The job as it is, between two steps. From here on the record follows what changes.
struct RecordJob {
  std::shared_ptr<const DurableJob> job;     // without extra_states
  std::vector<StatePart> extra_states = {};  // in the step arena, by rank
  uint32_t sum_pages = 0;                    // of gradient sums that are paged
};

// Where a block's bytes are: another slot, or DRAM.
struct RecordBlock {
  JobId job = 0;
  uint32_t block = 0;
  std::optional<nvme::Slot> slot = {};  // empty: DRAM, or zeros that were never written
  uint64_t checksum = 0;
  uint64_t written_step = 0;
  WeightsDigests weights_digests = {};
  // The step that is decided and has written it: it counts with that, once that is published. 0: at once.
  uint64_t step = 0;
  uint64_t overflows = 0;  // masters in it, of that step
  // Its new weights are in this slot of the step arena, until RecordInstalled.
  std::optional<uint32_t> weights_slot = {};
};

struct RecordInstalled {
  JobId job = 0;
  uint32_t block = 0;
};

// The block is in a staging slot, and is updated there, until a RecordBlock of the step says where it was written.
struct RecordStaged {
  JobId job = 0;
  uint32_t block = 0;
  uint64_t step = 0;
  uint32_t staging_slot = 0;
};

// Where a page of gradient sums of the step that is decided is: in a frame of the step arena, or in a slot. Neither: all
// its blocks are updated.
struct RecordSums {
  JobId job = 0;
  uint32_t page = 0;
  uint64_t step = 0;
  std::optional<uint32_t> frame = {};
  std::optional<nvme::Slot> slot = {};
  uint64_t checksum = 0;  // of what is in the slot
  uint64_t spills = 0;    // part of its identity
};

// A rank has delivered gradients to an attempt at the step behind the newest committed one, which this one follows: if
// the daemon is killed now, older attempts are over.
struct RecordAttempt {
  JobId job = 0;
  uint64_t step = 0;
  uint64_t attempt = 0;
};

// A step after the decision.
struct StepOrder {
  uint64_t step = 0;
  float grad_scale = 1.0F;
  // Of the scaled gradient's elements; both 0: none.
  float grad_min = 0.0F;
  float grad_max = 0.0F;
  std::pmr::vector<protocol::HyperParams> hyper_params = {};  // by parameter group
  std::pmr::vector<bool> params = {};  // that have a gradient; others are left alone

  StepOrder CopyIn(std::pmr::memory_resource* memory) const {
    return {.step = step,
            .grad_scale = grad_scale,
            .grad_min = grad_min,
            .grad_max = grad_max,
            .hyper_params = {hyper_params, memory},
            .params = {params, memory}};
  }
};

// A step of a job over several nodes is prepared: what its decision needs beside the gradient sums, which are recorded
// too. From here on RecordSums says where those are; a page that is not needed then is no part of it.
struct RecordPrepared {
  JobId job = 0;
  uint64_t step = 0;  // 0: what was prepared is given up
  uint64_t attempt = 0;
  protocol::StepRequest request = {};  // of each rank, but for its extra_state
  std::pmr::vector<protocol::HyperParams> hyper_params = {};
  StatePart float_sums = {};                      // as in RecordDecision
  std::pmr::vector<StatePart> extra_states = {};  // in the step arena, by rank
  std::vector<std::byte> summary = {};            // of the node, encoded
};

// The step is decided: bytes in DRAM change until it is published. What is recorded of the step before this counts from
// here on.
struct RecordDecision {
  JobId job = 0;
  uint64_t step = 0;
  StepOrder order = {};
  // Part of the step arena with its gradient sums, where these became float32 after the job was recorded; else nothing.
  StatePart float_sums = {};
  // As they are from its publication on.
  std::pmr::vector<uint64_t> param_updates = {};  // by parameter
  std::pmr::vector<uint32_t> trace = {};
  std::pmr::vector<StatePart> extra_states = {};  // in the step arena, by rank
  // What its calls are answered with.
  double norm = 0;
  bool clipped = false;
  uint64_t overflowed = 0;              // masters in the step before, not reported yet
  std::vector<std::byte> summary = {};  // of the world, encoded; of a job on one node empty
};

// A rank of a job with weights on swap has a lease: what it reads stays where it is where the daemon is killed.
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
inline constexpr uint64_t kLeaseRecordBytes = 32;
inline uint64_t LeasesRecordedMax(const protocol::Layout& layout, uint64_t world_size) {
  return layout.partitions().size() + 64 * world_size;
}

// The norms of the step that is decided are known, from here on its blocks change: by parameter (UpdateSegment::trust). Of
// LAMB.
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

// Between two steps: how many updates a parameter has had is another number now.
struct RecordUpdates {
  JobId job = 0;
  uint32_t param = 0;
  uint64_t updates = 0;
};

// The job cannot go on: it has failed.
struct DropRecord {
  JobId job = 0;
};

// A job over several nodes is as its disk has it: another node has no newer step.
struct JobWentBack {
  std::string job;
  uint64_t from_step = 0;
  uint64_t to_step = 0;
};

// A job that the daemon before was killed in the middle of an update of cannot go on with it: it is as its disk has it,
// or is no more.
struct UpdateNotResumed {
  std::string job;  // as root writes names
  uint64_t step = 0;
  absl::Status reason;
};

}  // namespace forebay::daemon
