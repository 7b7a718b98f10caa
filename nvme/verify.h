// SPDX-License-Identifier: Apache-2.0
// Verification of bytes that were read from swap, against their checksum.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "absl/status/status.h"
#include "nvme/checksum.h"
#include "nvme/slot_map.h"

namespace forebay::nvme {

// The content that a slot must hold. A value, so that it can be passed to a worker.
struct ExpectedContent {
  Slot slot = {};
  // Name of the slot's path. The text lives as long as the volume.
  std::string_view path;
  Identity identity{};
  uint64_t checksum = 0;
};

// Expected digests of whole pages of a slot, computed when the pages were written.
struct ExpectedPages {
  Slot slot = {};
  std::string_view path;
  uint64_t offset_bytes = 0;  // offset of the first page in the slot
  std::span<const uint64_t> digests;
};

// Returns OK if `bytes` are the expected pages. Threads and errors are those of Verify() below.
absl::Status Verify(const ExpectedPages& expected, std::span<const std::byte> bytes);

// Returns OK if `bytes` are the expected content.
//
// Threads  Pure; call it on a worker, after the read and before the first use.
// Errors   E_CORRUPT  names path, offset and identity (hex).
absl::Status Verify(const ExpectedContent& expected, std::span<const std::byte> bytes);

// Verifies bytes that were read in pieces, by the digests of all their pages, in order. Threads and errors are those of
// Verify() above.
absl::Status VerifyDigests(const ExpectedContent& expected, std::span<const uint64_t> digests);

}  // namespace forebay::nvme
