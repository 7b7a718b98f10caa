// SPDX-License-Identifier: Apache-2.0
// The measured rates of a swap path.
#pragma once

#include <algorithm>
#include <cstdint>

namespace forebay::nvme {

// Rates in bytes a second.
struct PathRates {
  double read = 0;
  double write = 0;
  double mixed = 0;  // reads and writes together, as many of each
  // The smallest requests, and the fewest at once, that read at 0.97 of the best rate.
  uint64_t request_bytes = 0;
  uint32_t depth = 0;
  double read_seconds = 0;  // duration of a read of 1 MiB without other requests in flight

  // Bytes in flight that keep the path busy: as many as were measured, or as many as it reads during one request of 1 MiB.
  uint64_t in_flight_bytes() const {
    return std::max(request_bytes * depth, static_cast<uint64_t>(read_seconds * read));
  }
};

}  // namespace forebay::nvme
