// SPDX-License-Identifier: Apache-2.0
// Copies to a device from memory that it cannot reach by itself, through a small buffer that it can.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpu/device.h"

namespace forebay::gpu {

// A ring of pinned slots for copies from memory that the device cannot reach by itself. CUDA's own copy from such memory waits
// for the stream's earlier work, and so for work that should run concurrently. A copy through the ring waits for free slots
// alone.
//
// Threads  One at a time.
class PinnedRing {
 public:
  static constexpr size_t kSlotBytes = size_t{2} << 20;
  static constexpr size_t kSlots = 8;

  // Errors  E_UNSUPPORTED  the device reaches no memory of the host's.
  //         E_LIMIT        no memory.
  static absl::StatusOr<std::unique_ptr<PinnedRing>> Create(Device& device);

  PinnedRing(const PinnedRing&) = delete;
  PinnedRing& operator=(const PinnedRing&) = delete;
  ~PinnedRing();  // its copies must have ended, or the device has failed

  // Begins to copy as many of the first bytes as the free slots can hold. Returns their number, 0 if every slot is in flight.
  // The copies in flight no longer read `from`.
  //
  // Errors  E_DEVICE
  absl::StatusOr<size_t> Begin(Stream& stream, std::span<std::byte> to,
                               std::span<const std::byte> from);

 private:
  explicit PinnedRing(std::span<std::byte> bytes) : bytes_(bytes) {}

  std::span<std::byte> bytes_;
  std::unique_ptr<HostRegistration> registration_;
  std::array<std::shared_ptr<const Event>, kSlots> copied_;  // last copy of each slot; null: free
  size_t next_ = 0;
};

}  // namespace forebay::gpu
