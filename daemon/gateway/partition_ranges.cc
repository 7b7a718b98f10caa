// SPDX-License-Identifier: Apache-2.0
#include "daemon/gateway/partition_ranges.h"

namespace forebay::gateway {

std::vector<WeightsRange> RangesOf(const protocol::Layout& layout, uint32_t partition) {
  const uint64_t width = protocol::SizeBytes(layout.spec().dtype);
  std::vector<WeightsRange> ranges;
  for (const protocol::BoxPlace& place : layout.boxes_of(partition)) {
    const bool is_trainable = layout.params()[place.box.param].trainable;
    const uint64_t size_bytes = place.box.elems() * width;
    if (!ranges.empty() && ranges.back().is_trainable == is_trainable) {
      ranges.back().size_bytes += size_bytes;
    } else {
      ranges.push_back({.offset_bytes = place.partition_elem * width,
                        .size_bytes = size_bytes,
                        .is_trainable = is_trainable});
    }
  }
  return ranges;
}

}  // namespace forebay::gateway
