// SPDX-License-Identifier: Apache-2.0
// Copies bytes that the destination may already hold, such as a model's buffers from an older step.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "protocol/units.h"

namespace forebay::protocol {

// Makes `to` begin with `from`. A page that `to` already holds is read and not written: 2 bytes of memory traffic for each
// byte, instead of 3. The comparison of another page ends at its first byte that differs. Returns the number of bytes that were
// written.
inline uint64_t CopyChanged(std::span<const std::byte> from, std::span<std::byte> to) {
  uint64_t written_bytes = 0;
  for (size_t at = 0; at < from.size(); at += kPageBytes) {
    const auto page = from.subspan(at, std::min<size_t>(kPageBytes, from.size() - at));
    if (std::memcmp(to.data() + at, page.data(), page.size()) == 0) continue;
    std::memcpy(to.data() + at, page.data(), page.size());
    written_bytes += page.size();
  }
  return written_bytes;
}

}  // namespace forebay::protocol
