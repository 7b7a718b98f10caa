// SPDX-License-Identifier: Apache-2.0
// Byte sizes as people write and read them. IEC units only.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace forebay::protocol {

inline constexpr uint64_t kKiB = uint64_t{1} << 10;
inline constexpr uint64_t kMiB = uint64_t{1} << 20;
inline constexpr uint64_t kGiB = uint64_t{1} << 30;
inline constexpr double kGb = 1e9;  // unit of rates: GB/s
// bytes of a page; also the alignment of every O_DIRECT transfer
inline constexpr uint64_t kPageBytes = 4096;
inline constexpr uint64_t kHugePageBytes = 2 * kMiB;

constexpr uint64_t RoundUp(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// "412.0 GiB", "371 B": one decimal from KiB on.
std::string FormatBytes(uint64_t size_bytes);

// Reads "4096", "64KiB", "1.5 GiB", "2TiB"; a unit is B, KiB, MiB, GiB or TiB in any case.
//
// Errors  kInvalidArgument  not a size, negative, or above 2^62; the message repeats the text.
absl::StatusOr<uint64_t> ParseBytes(std::string_view text);

}  // namespace forebay::protocol
