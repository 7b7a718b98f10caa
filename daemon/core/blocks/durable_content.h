// SPDX-License-Identifier: Apache-2.0
// Expected content of the slots of a durable job, and the parameters in each.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/core/base/durable_job.h"
#include "daemon/core/base/events.h"
#include "daemon/core/blocks/block_ledger.h"
#include "daemon/core/blocks/block_map.h"
#include "nvme/slot_map.h"
#include "protocol/layout.h"

namespace forebay::daemon {

// Bytes of the weights arena without the cache: weights of the partitions whose weights are not on swap. The saved bytes are
// rounded up to a page.
uint64_t WeightsInDram(const protocol::Layout& layout, const std::vector<bool>& weights_on_swap);

// Offset of each partition's weights in the weights arena, in bytes; 0 for weights on swap.
std::vector<uint64_t> WeightsOffsets(const protocol::Layout& layout,
                                     const std::vector<bool>& weights_on_swap);

// Part number `part` of the arena's first `weights_bytes`, cut at multiples of `slot_bytes`.
StatePart WeightsPart(uint64_t weights_bytes, uint64_t slot_bytes, uint32_t part);

// Identity of an entry of a job with so many blocks (DurableContent).
BlockIdentity EntryIdentity(JobId job, uint32_t blocks, uint32_t entry, uint64_t written_step);
// Returns a name such as "block 3" or "part 0 of the weights".
std::string EntryName(uint32_t blocks, uint32_t entry);

// Returns the entry of a ledger for a version; nothing if the version has no slot.
std::optional<DurableBytes> BytesOf(const BlockLedger::Version& version);

// Says what each swap slot of one durable job must hold. Entry i is block i; the parts of the weights arena follow the blocks.
class DurableContent {
 public:
  // `job`: as DecodeLedger() returns it.
  explicit DurableContent(std::shared_ptr<const DurableJob> job);

  // Replaces the job by the same job at another step.
  void Replace(std::shared_ptr<const DurableJob> job) { job_ = std::move(job); }
  const std::shared_ptr<const DurableJob>& job() const { return job_; }

  struct Expected {
    nvme::Slot slot;
    uint64_t bytes = 0;  // from the start of the slot
    BlockIdentity identity;
    uint64_t checksum = 0;

    bool operator==(const Expected&) const = default;
  };

  uint32_t entries() const;
  // Returns what the slot of an entry must hold; nothing: zeros that were never written.
  std::optional<Expected> At(uint32_t entry) const;
  std::string Name(uint32_t entry) const { return EntryName(map_.blocks(), entry); }
  // Returns the names of the parameters with elements in the entry, in the order of the layout.
  std::vector<std::string> Params(uint32_t entry) const;

 private:
  bool is_part(uint32_t entry) const { return entry >= map_.blocks(); }
  StatePart PartOf(uint32_t entry) const {
    return WeightsPart(weights_bytes_, job_->slot_bytes, entry - map_.blocks());
  }

  std::shared_ptr<const DurableJob> job_;
  BlockMap map_;
  std::vector<uint64_t> weights_offsets_;  // by partition
  uint64_t weights_bytes_ = 0;
};

}  // namespace forebay::daemon
