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

// Returns the bytes of weights of partitions whose weights are in DRAM: the weights arena without its cache. A saved copy is
// rounded up to a page.
uint64_t WeightsInDram(const protocol::Layout& layout, const std::vector<bool>& weights_on_swap);

// Returns the byte offset of each partition's weights in the weights arena, 0 for weights on swap.
std::vector<uint64_t> WeightsOffsets(const protocol::Layout& layout,
                                     const std::vector<bool>& weights_on_swap);

// Returns part number `part` of the first `weights_bytes` of the weights arena, which are cut at multiples of `slot_bytes`.
StatePart WeightsPart(uint64_t weights_bytes, uint64_t slot_bytes, uint32_t part);

// Returns the identity of the bytes of an entry, as DurableContent numbers entries, in a job with `blocks` blocks.
BlockIdentity EntryIdentity(JobId job, uint32_t blocks, uint32_t entry, uint64_t written_step);
// Returns a name such as "block 3" or "part 0 of the weights".
std::string EntryName(uint32_t blocks, uint32_t entry);

// Returns the ledger entry for a version, or nullopt if the version has no slot.
std::optional<DurableBytes> BytesOf(const BlockLedger::Version& version);

// Computes the expected content of each swap slot of one durable job. Entry i is block i; the parts of the weights arena follow
// the blocks.
class DurableContent {
 public:
  // `job` is a result of DecodeLedger().
  explicit DurableContent(std::shared_ptr<const DurableJob> job);

  // Replaces the job by the same job at another step.
  void Replace(std::shared_ptr<const DurableJob> job) { job_ = std::move(job); }
  const std::shared_ptr<const DurableJob>& job() const { return job_; }

  struct Expected {
    nvme::Slot slot;
    uint64_t bytes = 0;  // number of bytes at the start of the slot
    BlockIdentity identity;
    uint64_t checksum = 0;

    bool operator==(const Expected&) const = default;
  };

  uint32_t entries() const;
  // Returns the expected content of an entry's slot, or nullopt if the entry has zeros that were never written.
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
