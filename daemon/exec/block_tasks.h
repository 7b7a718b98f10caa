// SPDX-License-Identifier: Apache-2.0
// Work of workers on bytes of arenas: one function for each action of the state machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <optional>
#include <span>
#include <string_view>

#include "absl/status/status.h"
#include "cpu_adam/lamb.h"
#include "cpu_adam/square_sum.h"
#include "daemon/core/base/events.h"
#include "daemon/core/blocks/undo_sizes.h"
#include "daemon/exec/recovery/undo_log.h"
#include "nvme/checksum.h"
#include "nvme/verify.h"
#include "protocol/dtype.h"
#include "protocol/layout.h"

namespace forebay::daemon {

// Identity of a block's bytes in its checksum. `nonce`: SwapSpace::nonce() of the volume.
nvme::Identity MakeIdentity(const BlockIdentity& identity, uint64_t nonce);

// Offset of a plane within a block, and size of all planes of a block. Each plane starts on a multiple of kPageBytes.
uint64_t PlaneOffsetBytes(std::span<const protocol::Plane> planes, size_t plane,
                          uint64_t block_elems);
uint64_t BlockBytes(std::span<const protocol::Plane> planes, uint64_t block_elems);

// Memory of a job's weights and of one of the job's blocks, with the formats of the weights and the block.
struct StateMemory {
  std::span<std::byte> weights;  // weights arena
  std::span<std::byte> block;    // all planes of the block; weights are the last plane
  protocol::Optimizer optimizer = protocol::Optimizer::kAdamW;
  protocol::Format format = protocol::Format::kFp32;
  protocol::DType dtype = protocol::DType::kFloat32;  // type of the weights
};

// Memory that an update touches. The block is updated in place. UpdatePass::kWeights reads the block, and writes to the weights
// arena alone.
struct UpdateMemory {
  StateMemory states;
  std::span<const std::byte> accumulators;  // step arena
  std::span<std::byte> new_weights = {};    // in the step arena; set for an early update
  // Undo log from which another daemon resumes the update if this daemon is killed (UpdateBlock::is_recorded). Null if the
  // update is not recorded.
  UndoLog* undo = nullptr;
  UndoneArena block_arena = UndoneArena::kStates;  // arena of states.block
  uint64_t block_offset_bytes = 0;
};

// Elements [begin, end) of a block or of a group.
struct ElemRange {
  uint64_t begin = 0;
  uint64_t end = 0;
};

static_assert(kPartElems % cpu_adam::kSumChunkElems == 0);

// Result of an update.
struct UpdateFound {
  uint64_t overflows = 0;                 // masters that became non-finite
  std::vector<cpu_adam::LambSums> norms;  // UpdatePass::kNorms: by segment
};

// Updates the elements of the block in `range`, which begins at a multiple of kTileElems, or of kPartElems if norms are summed.
// Skips elements that the undo log counts as done; the result includes their overflows.
UpdateFound RunUpdate(const UpdateBlock& action, ElemRange range, const UpdateMemory& memory);

// Joins the results of all ranges of a block. `memory` allocates the lists of the result.
TaskDone JoinUpdate(std::span<const UpdateFound> found,
                    std::pmr::memory_resource* memory = std::pmr::get_default_resource());

// Elements whose states stay in the second-level cache between update and checksum.
inline constexpr uint64_t kTileElems = uint64_t{1} << 13;
static_assert(kPartElems % kTileElems == 0 && kTileElems % protocol::kScaleElems == 0);

// Updates a whole block range by range, and digests the pages of each range while they are in the cache. The result has the
// checksum of the block under `identity_after` if the pass changes the block.
TaskDone RunUpdateForSwap(const UpdateBlock& action, const UpdateMemory& memory, uint64_t nonce);

void RunCopies(std::span<const BytesCopy> copies, std::span<const std::byte> from,
               std::span<std::byte> to);

// Returns a copy of each part, in the order of `parts`.
ExtraStates RunKeepExtraStates(std::span<const StatePart> parts, std::span<const std::byte> step);
// Copies the extra_state of each rank for which the action has an offset.
void RunRestoreExtraStates(const RestoreExtraStates& action, std::span<std::byte> step);

// Checks bytes from swap before they are used. Compares them with identity and checksum of the block ledger (`expected`). If
// the block has no slot yet, the bytes must be zeros.
//
// Errors  E_CORRUPT  names path, offset and identity, or the block that should be zeros.
absl::Status VerifyBlock(const std::optional<nvme::ExpectedContent>& expected,
                         const BlockIdentity& identity, std::span<const std::byte> bytes);

// Result of an addition.
struct AddedGradients {
  // 1 + index of the first source that is not finite; 0 if all are finite.
  uint64_t culprit = 0;
  cpu_adam::SquareSum squares;  // squares of the sums
};

// Adds the sources to the accumulator, or sets it to their sum (action.assign), in one pass over memory. `range` begins at a
// multiple of kSumChunkElems; all spans are whole. Ends early if a source or a sum is not finite; `squares` is then not finite
// either.
AddedGradients RunAddGradients(const AddGradients& action, ElemRange range,
                               std::span<const std::span<const std::byte>> sources,
                               std::span<std::byte> accumulator);

// Returns the sum of squares of the accumulator's elements in `range`, which begins at a multiple of kSumChunkElems.
cpu_adam::SquareSum RunSumGradient(protocol::DType sum_dtype, ElemRange range,
                                   std::span<const std::byte> accumulator);

// Writes elements of one state as float32 into the client's bytes, which may have any alignment of 4.
void RunDecodeState(const DecodeState& action, const StateMemory& memory, std::span<std::byte> to);

// Sets elements of one state from bytes of the client in `action.dtype`: masters and weights, the weights alone of a frozen
// parameter, or a moment. Returns false and changes nothing if an element is not finite, rounds to infinity, or is a square
// below 0. A client that changes its bytes during the call may find some elements set.
bool RunSetState(const SetState& action, const StateMemory& memory,
                 std::span<const std::byte> from);

// Returns the checksum of a whole block, and the digests of its plane of weights if it has one.
TaskDone DigestBlock(const BlockIdentity& identity, uint64_t nonce, uint64_t states_elems,
                     const StateMemory& memory);

// Verifies pages of a plane of weights and copies them to the weights arena.
//
// Errors  E_CORRUPT  names path and offset.
absl::Status RunLoadWeights(const LoadWeights& action, std::string_view path,
                            std::span<const std::byte> from, std::span<std::byte> weights);

// Copies the client's bytes to the weights. Returns false if an element in the first `checked_bytes` of the copy is not finite.
bool RunCopyInitial(protocol::DType dtype, std::span<const std::byte> from, std::span<std::byte> to,
                    uint64_t checked_bytes);

}  // namespace forebay::daemon
