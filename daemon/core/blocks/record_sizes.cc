// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/blocks/record_sizes.h"

#include <algorithm>

#include "protocol/units.h"

namespace forebay::daemon {

uint64_t RecordSizes::half_bytes() const {
  constexpr uint64_t kAlignment = 64;
  return protocol::RoundUp(base_bytes + step_bytes + entry_bytes, kAlignment);
}

RecordSizes SizesOf(const RecordCounts& counts) {
  constexpr uint64_t kPartBytes = 16;
  const uint64_t of_nodes = counts.ranks * kPartBytes + counts.summary_bytes;
  const uint64_t groups = counts.param_group_rows * kHyperParamsEntryBytes;
  const uint64_t decision = kValuesEntryBytes + of_nodes + counts.params * sizeof(uint64_t) +
                            counts.partitions * sizeof(uint32_t);
  const uint64_t order = kValuesEntryBytes + groups + counts.params / 8;
  const uint64_t prepared = counts.summary_bytes == 0 ? 0 : kValuesEntryBytes + groups + of_nodes;
  const uint64_t trust = counts.has_trust ? kValuesEntryBytes + counts.params * sizeof(float) : 0;
  const uint64_t places = counts.blocks * kPlaceEntryBytes + counts.digests * sizeof(uint64_t);
  const uint64_t place = kPlaceEntryBytes + counts.block_digests * sizeof(uint64_t);
  return {
      // The decision and RecordStep of the published step, RecordAttempt, and what changes between two steps.
      .base_bytes = decision + 2 * kSmallEntryBytes + places +
                    (counts.params + counts.leases) * kSmallEntryBytes,
      // RecordStaged of a block counts until the block is written, RecordInstalled after that.
      .step_bytes = decision + order + prepared + trust + places +
                    counts.blocks * kSmallEntryBytes + counts.sum_pages * kPlaceEntryBytes,
      .entry_bytes = std::max(prepared, place),
  };
}

uint64_t RecordIndexBytes(const RecordCounts& counts) {
  constexpr uint64_t kBlockBytes = 48;
  constexpr uint64_t kPairBytes = 16;
  return counts.blocks * kBlockBytes + (counts.sum_pages + counts.leases) * kPairBytes +
         counts.params * sizeof(uint64_t);
}

}  // namespace forebay::daemon
