// What workers do to bytes: one pure function per action of the state machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "absl/status/status.h"
#include "daemon/events.h"
#include "nvme/checksum.h"
#include "nvme/volume.h"
#include "protocol/dtype.h"
#include "protocol/layout.h"

namespace forebay::daemon {

// Identity of a block's bytes in its checksum; `nonce` is another for every opening of the volume.
nvme::Identity MakeIdentity(const BlockIdentity& identity, uint64_t nonce);

// Where a plane starts within a block, and the size of all planes: each starts on a multiple of
// kPageBytes.
uint64_t PlaneOffsetBytes(std::span<const protocol::Plane> planes, size_t plane,
                          uint64_t block_elems);
uint64_t BlockBytes(std::span<const protocol::Plane> planes, uint64_t block_elems);

// Memory an update touches, and what the job's states are. The block is updated in place.
struct UpdateMemory {
  std::span<std::byte> image;               // image arena
  std::span<const std::byte> accumulators;  // step arena, float32
  std::span<std::byte> block;               // all planes of the block
  protocol::Optimizer optimizer = protocol::Optimizer::kAdamW;
  protocol::Format format = protocol::Format::kFp32;
};

// Masters that became non-finite.
uint64_t RunUpdate(const UpdateBlock& action, const UpdateMemory& memory);

// What swapped bytes must be before they are used: `expected` of the volume with identity and
// checksum of the state machine's table, or nothing for zeros that were never written.
//
// Errors  E_CORRUPT  names path, extent and identity, or the block whose zeros are none.
absl::Status VerifyBlock(const std::optional<nvme::ExpectedContent>& expected,
                         const BlockIdentity& identity, std::span<const std::byte> bytes);

// contribution -> accumulator. False, and nothing added, where the contribution is not finite.
bool RunAddGradient(const AddGradient& action, std::span<const std::byte> contribution,
                    std::span<std::byte> accumulator);

// In double, in an order that depends on nothing; NaN where an element is not finite.
double RunSumGroup(std::span<const std::byte> accumulator);

// client's bytes -> image. False where the copy is not finite.
bool RunCopyInitial(protocol::DType dtype, std::span<const std::byte> from,
                    std::span<std::byte> to);

}  // namespace forebay::daemon
