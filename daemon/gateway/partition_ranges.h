// SPDX-License-Identifier: Apache-2.0
// Bytes of a partition's weights that change with a step, and bytes that change only if they are written.
#pragma once

#include <cstdint>
#include <vector>

#include "protocol/layout.h"

namespace forebay::gateway {

struct WeightsRange {
  uint64_t offset_bytes = 0;  // offset from the start of the partition
  uint64_t size_bytes = 0;
  bool is_trainable = false;

  bool operator==(const WeightsRange&) const = default;
};

// Returns the ranges of a whole partition in order. Neighbours of one kind are one range.
std::vector<WeightsRange> RangesOf(const protocol::Layout& layout, uint32_t partition);

// Place and version of a partition's weights in a session's window.
struct WeightsVersion {
  uint64_t offset_bytes = 0;  // offset of the partition in the weights arena
  uint64_t step = 0;
  uint64_t writes = 0;

  bool operator==(const WeightsVersion&) const = default;
};

}  // namespace forebay::gateway
