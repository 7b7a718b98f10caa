// SPDX-License-Identifier: Apache-2.0
// What a swap path gives.
#pragma once

#include <algorithm>
#include <cstdint>

namespace forebay::nvme {

// Bytes a second.
struct PathRates {
  double read = 0;
  double write = 0;
  double mixed = 0;  // of reads and writes together, as many of each
  // The smallest requests, and the fewest at once, that read at 0.97 of the best rate.
  uint64_t request_bytes = 0;
  uint32_t depth = 0;
  double read_seconds = 0;  // of 1 MiB while nothing else is in flight

  // That keep the path busy: as many as were measured to, or as it reads while one of 1 MiB ends.
  uint64_t in_flight_bytes() const {
    return std::max(request_bytes * depth, static_cast<uint64_t>(read_seconds * read));
  }
};

}  // namespace forebay::nvme
