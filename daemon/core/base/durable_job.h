// SPDX-License-Identifier: Apache-2.0
// What a job needs to go on after the death of the daemon: values of one step, and the swap slots that hold
// its bytes. The ledger of the volume is these, encoded.
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

// Bytes in a slot, with what they are verified by.
struct DurableBytes {
  nvme::Slot slot;
  uint64_t checksum = 0;
  // Part of the checksum.
  uint64_t written_step = 0;
  WeightsDigests weights_digests = {};  // of a block with a plane of weights
};

struct DurableJob;

// Of a daemon that was killed when it had prepared a step of a job over several nodes, which was not decided.
struct KeptPrepared {
  uint64_t attempt = 0;
  protocol::StepRequest request = {};   // of each rank, but for its extra_state
  ExtraStates extra_states = {};        // by rank
  std::vector<std::byte> summary = {};  // of the node, encoded
};

// Of a daemon that was killed in the middle of an update: how far it came. Of blocks in DRAM, and of those in staging slots,
// UndoLog knows.
struct KeptUpdate {
  struct Block {
    std::optional<DurableBytes> written = {};
    uint64_t overflows = 0;  // of one that is written
    // Its new weights are there in the step arena, and may be installed or not.
    std::optional<uint32_t> weights_slot = {};
    // It is there, and not written.
    std::optional<uint32_t> staging_slot = {};
  };

  // A page of gradient sums that is still needed: in a frame of the step arena, or in a slot.
  struct Sums {
    uint32_t page = 0;
    std::optional<uint32_t> frame = {};
    std::optional<nvme::Slot> slot = {};
    uint64_t checksum = 0;  // of what is in the slot
    uint64_t spills = 0;
  };

  StepOrder order;
  StatePart float_sums = {};      // of RecordDecision
  std::vector<float> trust = {};  // of RecordTrust; of LAMB, empty: no block has changed
  std::vector<Block> blocks;
  std::vector<Sums> sums = {};
  // It is not decided: no block has changed, and of `order` step and hyper_params count.
  std::optional<KeptPrepared> prepared = {};
};

// Of a job that goes on with the next daemon, because one hands it over or is killed: its arenas stay as they are, and
// with them all that is not on swap. Never written to a disk.
struct KeptMemory {
  // By block of BlockMap: its states are in the state arena; and the last step that has changed those.
  std::vector<bool> resident;
  std::vector<uint64_t> written_steps;
  // Of the arenas; of the step arena, what has memory but for float32 sums that were made late.
  uint64_t weights_bytes = 0;
  uint64_t step_bytes = 0;
  // Of the limit, as the job is now.
  uint64_t dram_bytes = 0;
  // Of the ranks' sessions.
  SessionRequest session;
  // Of MemoryPlan.
  uint32_t early_weights_slots = 0;
  uint32_t sum_frames = 0;
  // At the next step: older ones are over.
  uint64_t attempt = 0;
  // For blocks, and for pages of gradient sums; nothing is in them.
  std::vector<nvme::Slot> spare_slots;
  std::vector<nvme::Slot> sum_slots;
  // Of a job with weights on swap: those that its ranks had when the daemon was killed, and have not said since that they
  // need no more.
  std::vector<KeptLease> leases = {};
  // Of a daemon that was killed: blocks on swap are where the job says, whatever is durable of it; and what is, null:
  // nothing. Of one that hands over, what the job says is durable.
  bool was_killed = false;
  std::shared_ptr<const DurableJob> durable = {};
  // Of a daemon that was killed: what calls of the step are answered with; masters that overflowed.
  double norm = 0;
  bool clipped = false;
  uint64_t overflowed = 0;
  // By which the nodes have decided the step of the job, encoded; empty: of one node, or nobody knows.
  std::vector<std::byte> summary = {};
  // The step of the job is decided, and is updated; its param_updates, blocks and `written_steps` are those of the step
  // before; or (KeptUpdate::prepared) the next one is prepared. Null: it is published.
  std::shared_ptr<const KeptUpdate> update = {};

  bool operator==(const KeptMemory&) const = default;
};

struct DurableJob {
  JobId id = 0;  // part of every checksum
  std::string name;
  uint32_t uid = 0;
  std::string run;  // token of the run that trained it
  protocol::Durability durability;
  std::shared_ptr<const protocol::Layout> layout;
  uint32_t world_size = 1;
  uint64_t block_elems = 0;
  uint64_t slot_bytes = 0;            // of all its slots
  std::vector<bool> weights_on_swap;  // by partition; empty: of none
  uint64_t step = 0;                  // published, with all before it (but see KeptMemory::update)
  std::vector<uint64_t> param_updates;  // by parameter: steps in which it had a gradient
  std::vector<uint32_t> trace;          // partitions, in the order in which a step fetches them
  ExtraStates extra_states;             // by rank
  // By block of BlockMap; empty: states that are all zeros and were never written.
  std::vector<std::optional<DurableBytes>> blocks;
  // The part of the weights arena that holds weights, from its beginning, cut at multiples of slot_bytes.
  std::vector<DurableBytes> weights;
  // Of a job that is handed over. With level memory it is all that entries in DRAM have: they name no slot then, and
  // `weights` is empty.
  std::optional<KeptMemory> kept = {};
  // Of a job over several nodes: the durable step before this one, which another node may not be beyond. It has the same
  // name, layout and sizes, and neither `kept` nor one before it. Null: none.
  std::shared_ptr<const DurableJob> before = {};

  // Those that it names, and what is durable of it; with the step before.
  std::vector<nvme::Slot> Slots() const;
  // Without the step before: what a ledger keeps. The ledger before it kept the others, and the job does.
  std::vector<nvme::Slot> NamedSlots() const;
  uint64_t slots() const;
  // These and spare ones: all that are the job's for blocks and parts of the weights.
  std::vector<nvme::Slot> BlockSlots() const;
  // These and those for pages of gradient sums: all that are the job's.
  std::vector<nvme::Slot> AllSlots() const;
  // Takes them out of a list.
  void RemoveOwn(std::vector<nvme::Slot>& slots) const;
};

// A durable step as the next one keeps it.
std::shared_ptr<const DurableJob> AsBefore(const std::shared_ptr<const DurableJob>& job);
// `job`, or the one before it, if it is of that step; null: neither is.
std::shared_ptr<const DurableJob> OfStep(const std::shared_ptr<const DurableJob>& job,
                                         uint64_t step);

// Null: of no job, or of one that comes back from its disk.
inline const KeptMemory* KeptOf(const DurableJob* job) {
  return job != nullptr && job->kept ? &*job->kept : nullptr;
}

// What a ledger says of a job that comes back; null: nothing.
std::shared_ptr<const DurableJob> InLedger(const std::shared_ptr<const DurableJob>& job);

// What a ledger says of a job, in numbers.
struct LedgerCounts {
  uint64_t entries = 0;            // blocks and parts of the weights
  uint64_t digest_pages = 0;       // of planes of weights
  uint64_t extra_state_bytes = 0;  // of all ranks
};
// What it takes of NodeOptions::ledger_bytes_max; estimated from above.
uint64_t LedgerBytes(const protocol::Layout& layout, const LedgerCounts& counts);
uint64_t LedgerBytes(const DurableJob& job);

struct DurableNode {
  JobId last_job = 0;       // ids up to this one were given out
  uint64_t last_lease = 0;  // likewise; of what is handed over
  std::vector<std::shared_ptr<const DurableJob>> jobs;
};

// Every slot that the jobs name (NamedSlots), in the order of jobs, blocks and weights.
std::vector<nvme::Slot> SlotsOf(const DurableNode& node);

// "2 jobs: gpt at step 41, 1000:bert at step 7", names as root writes them; empty: there are none.
std::string DescribeJobs(const DurableNode& node);

}  // namespace forebay::daemon
