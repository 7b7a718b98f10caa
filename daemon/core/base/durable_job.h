// SPDX-License-Identifier: Apache-2.0
// Values that a job needs to continue after its daemon has ended: the values of one step, and the swap slots that hold the
// bytes of the step. The volume's ledger encodes these values, without DurableJob::kept and DurableNode::last_lease.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "daemon/core/base/events.h"
#include "daemon/core/base/session_request.h"
#include "nvme/slot_map.h"
#include "protocol/durability.h"
#include "protocol/layout.h"
#include "protocol/wire.h"

namespace forebay::daemon {

// A swap slot, and the values against which the bytes in the slot are verified.
struct DurableBytes {
  nvme::Slot slot;
  uint64_t checksum = 0;
  // Step that wrote the bytes. The checksum covers this number too.
  uint64_t written_step = 0;
  WeightsDigests weights_digests = {};  // set if the block has a plane of weights
};

struct DurableJob;

// A step of a job over several nodes that was prepared, but not decided, when the daemon was killed.
struct KeptPrepared {
  uint64_t attempt = 0;
  protocol::StepRequest request = {};   // equal on all ranks, but for extra_state_bytes
  ExtraStates extra_states = {};        // by rank
  std::vector<std::byte> summary = {};  // encoded summary of this node
};

// Progress of a step whose update or decision was pending when the daemon was killed. UndoLog has the progress within blocks in
// DRAM and in staging slots.
struct KeptUpdate {
  struct Block {
    std::optional<DurableBytes> written = {};
    uint64_t overflows = 0;  // masters that overflowed in this step, if `written` is set
    // Slot of the step arena that holds the block's new weights. The weights arena may have these weights already.
    std::optional<uint32_t> weights_slot = {};
    // Staging slot that holds the block, if its new bytes are not on swap yet.
    std::optional<uint32_t> staging_slot = {};
  };

  // A page of gradient sums that the update still needs. It is in a frame of the step arena, or in a swap slot.
  struct Sums {
    uint32_t page = 0;
    std::optional<uint32_t> frame = {};
    std::optional<nvme::Slot> slot = {};
    uint64_t checksum = 0;  // checksum of the bytes in `slot`
    // Number of times that the page was written to swap. The page's checksum covers this number too.
    uint64_t spills = 0;
  };

  StepOrder order;
  StatePart float_sums = {};      // RecordDecision::float_sums
  std::vector<float> trust = {};  // RecordTrust::trust; LAMB: empty if no block has changed
  std::vector<Block> blocks;
  std::vector<Sums> sums = {};
  // Set if the step is prepared, but not decided. No block has changed then, and only `step` and `hyper_params` of `order` are
  // set.
  std::optional<KeptPrepared> prepared = {};
};

// Memory of a job that is retained for the next daemon when this daemon stops or is killed: its arenas, with all bytes that are
// not on swap. A KeptMemory is never written to a disk.
struct KeptMemory {
  // Two lists by block of BlockMap: true if the states are in the state arena; the last step that changed them.
  std::vector<bool> resident;
  std::vector<uint64_t> written_steps;
  // Bytes of the weights arena, and of the step arena without float32 sums that were created late.
  uint64_t weights_bytes = 0;
  uint64_t step_bytes = 0;
  // Bytes of the node's DRAM limit that the job takes.
  uint64_t dram_bytes = 0;
  // The request that all ranks' sessions have in common.
  SessionRequest session;
  // Copies of MemoryPlan::early_weights_slots and MemoryPlan::sum_frames.
  uint32_t early_weights_slots = 0;
  uint32_t sum_frames = 0;
  // The open attempt at the next step. Older attempts have ended.
  uint64_t attempt = 0;
  // Free slots for blocks, and slots for pages of gradient sums. Some sum_slots hold pages if `update` is set.
  std::vector<nvme::Slot> spare_slots;
  std::vector<nvme::Slot> sum_slots;
  // Leases of ranks, on weights in a job with weights on swap, that have not ended.
  std::vector<KeptLease> leases = {};
  // The durable step; null: none. DurableJob::blocks has the current slots, whether durable or not.
  std::shared_ptr<const DurableJob> durable = {};
  // False if the job has no record yet, because a daemon of the previous release has handed it over.
  bool has_record = true;
  // Values that the answers to calls of the job's step carry: the gradient norm, whether the gradient was clipped, and the
  // number of masters that overflowed.
  double norm = 0;
  bool clipped = false;
  uint64_t overflowed = 0;
  // Encoded summary with which the nodes decided the job's step. Empty if the job is on one node, or if it is not known.
  std::vector<std::byte> summary = {};
  // Null if the job's step is published. Otherwise the job's step is decided, but not published: param_updates, blocks and
  // `written_steps` have the values of the step before. If KeptUpdate::prepared is set, the next step is prepared instead.
  std::shared_ptr<const KeptUpdate> update = {};

  bool operator==(const KeptMemory&) const = default;
};

struct DurableJob {
  JobId id = 0;  // every checksum covers the id too
  std::string name;
  uint32_t uid = 0;
  std::string run;  // token of the run that trained it
  protocol::Durability durability;
  std::shared_ptr<const protocol::Layout> layout;
  uint32_t world_size = 1;
  uint64_t block_elems = 0;
  uint64_t slot_bytes = 0;              // size of a slot for a block or a part of the weights
  std::vector<bool> weights_on_swap;    // by partition; empty: all weights are in DRAM
  uint64_t step = 0;                    // published step, or decided one (KeptMemory::update)
  std::vector<uint64_t> param_updates;  // by parameter: number of steps with a gradient
  std::vector<uint32_t> trace;          // partitions, in the order in which a step fetches them
  ExtraStates extra_states;             // by rank
  // Slots of blocks, by block of BlockMap. An empty entry means that the block's states are zeros that were never written, or
  // that only DRAM has the block's bytes (`kept`).
  std::vector<std::optional<DurableBytes>> blocks;
  // Slots of the parts of the weights arena, which is cut at multiples of slot_bytes. Bytes at the end of the arena that only
  // cache weights from swap have no part.
  std::vector<DurableBytes> weights;
  // Set if the memory of the job is retained. Then blocks in DRAM have no slot, and `weights` is empty: only the retained
  // arenas have the bytes of these blocks and of the weights.
  std::optional<KeptMemory> kept = {};
  // The durable step before this one, in a job over several nodes: another node may have no newer step. Name, layout and sizes
  // equal those of this DurableJob, and `kept` and `before` of the older step are empty. Null if the job has no older step.
  std::shared_ptr<const DurableJob> before = {};

  // Returns `step`, or the step before if `step` is decided and not published.
  uint64_t published_step() const {
    return kept && kept->update != nullptr && !kept->update->prepared ? step - 1 : step;
  }
  // Returns the slots that hold bytes of this step, of kept->durable and of `before`. Each slot is listed once.
  std::vector<nvme::Slot> Slots() const;
  // Returns Slots() without the slots of `before`: the slots that a ledger of this step names. The previous ledger names the
  // slots of `before`.
  std::vector<nvme::Slot> NamedSlots() const;
  uint64_t slots() const;
  // Returns Slots() and the spare slots: all slots that the job has for blocks and for parts of the weights.
  std::vector<nvme::Slot> BlockSlots() const;
  // Returns BlockSlots() and the slots for pages of gradient sums: all slots of the job.
  std::vector<nvme::Slot> AllSlots() const;
  // Removes the job's slots (AllSlots()) from `slots`.
  void RemoveOwn(std::vector<nvme::Slot>& slots) const;
};

// Returns a copy of `job` whose `before` is null. The next durable step of the job has this copy as DurableJob::before.
std::shared_ptr<const DurableJob> AsBefore(const std::shared_ptr<const DurableJob>& job);
// Returns `job` or its `before`, whichever is at `step`. Null if neither is.
std::shared_ptr<const DurableJob> OfStep(const std::shared_ptr<const DurableJob>& job,
                                         uint64_t step);

// Returns the retained memory of `job`. Null if there is no job, or if the job is restored from its disk.
inline const KeptMemory* KeptOf(const DurableJob* job) {
  return job != nullptr && job->kept ? &*job->kept : nullptr;
}

// Returns the step that the ledger names for a job that a daemon has recovered. Null if the ledger does not name the job.
std::shared_ptr<const DurableJob> InLedger(const std::shared_ptr<const DurableJob>& job);

// Sizes that determine how many bytes a job takes in the ledger.
struct LedgerCounts {
  uint64_t entries = 0;            // blocks and parts of the weights
  uint64_t digest_pages = 0;       // pages of weights on swap that have a digest
  uint64_t extra_state_bytes = 0;  // extra_state of all ranks together
};
// Returns an upper estimate of the bytes that one job takes of NodeOptions::ledger_bytes_max.
uint64_t LedgerBytes(const protocol::Layout& layout, const LedgerCounts& counts);
uint64_t LedgerBytes(const DurableJob& job);

struct DurableNode {
  JobId last_job = 0;       // JobIds up to this one have been used
  uint64_t last_lease = 0;  // lease ids up to this one have been used; not in the ledger
  std::vector<std::shared_ptr<const DurableJob>> jobs;
};

// Returns every slot that the jobs name (NamedSlots()), in the order of jobs, blocks and weights.
std::vector<nvme::Slot> SlotsOf(const DurableNode& node);

// Returns names and steps of the jobs: "2 jobs: gpt at step 41, 1000:bert at step 7". Names are in the form in which root
// writes them. Returns "" if the node has no jobs.
std::string DescribeJobs(const DurableNode& node);

}  // namespace forebay::daemon
