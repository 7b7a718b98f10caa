// SPDX-License-Identifier: Apache-2.0
// What the slots of a durable job must hold, and which parameters that is.
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

// Of the weights arena as far as it is no cache: of the partitions whose weights are not on swap. What is saved of it
// is rounded up to a page.
uint64_t WeightsInDram(const protocol::Layout& layout, const std::vector<bool>& weights_on_swap);

// Where each partition's weights begin in the weights arena; of those on swap nowhere: 0.
std::vector<uint64_t> WeightsOffsets(const protocol::Layout& layout,
                                     const std::vector<bool>& weights_on_swap);

// Of the arena's first `weights_bytes`, cut at multiples of `slot_bytes`.
StatePart WeightsPart(uint64_t weights_bytes, uint64_t slot_bytes, uint32_t part);

// Of an entry of a job with so many blocks: see DurableContent.
BlockIdentity EntryIdentity(JobId job, uint32_t blocks, uint32_t entry, uint64_t written_step);
// "block 3", "part 0 of the weights".
std::string EntryName(uint32_t blocks, uint32_t entry);

// What a ledger says of a version; nothing where it has no slot.
std::optional<DurableBytes> BytesOf(const BlockLedger::Version& version);

// Says what each swap slot of one durable job must hold. Entry i is block i; the parts of the weights arena follow the blocks.
class DurableContent {
 public:
  // `job`: as DecodeLedger() returns it.
  explicit DurableContent(std::shared_ptr<const DurableJob> job);

  // The same job at another step.
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
  // Nothing: zeros that were never written.
  std::optional<Expected> At(uint32_t entry) const;
  std::string Name(uint32_t entry) const { return EntryName(map_.blocks(), entry); }
  // Of the parameters with elements in it, in the order of the layout.
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
