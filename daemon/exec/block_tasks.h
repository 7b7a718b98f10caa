// SPDX-License-Identifier: Apache-2.0
// What workers do to bytes: one pure function per action of the state machine.
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

// Identity of a block's bytes in its checksum; `nonce` is another for every opening of the volume.
nvme::Identity MakeIdentity(const BlockIdentity& identity, uint64_t nonce);

// Where a plane starts within a block, and the size of all planes: each starts on a multiple of
// kPageBytes.
uint64_t PlaneOffsetBytes(std::span<const protocol::Plane> planes, size_t plane,
                          uint64_t block_elems);
uint64_t BlockBytes(std::span<const protocol::Plane> planes, uint64_t block_elems);

// Where a job's weights and the planes of one of its blocks are, and what they hold.
struct StateMemory {
  std::span<std::byte> weights;  // weights arena
  std::span<std::byte> block;    // all planes of the block, that of weights behind the others
  protocol::Optimizer optimizer = protocol::Optimizer::kAdamW;
  protocol::Format format = protocol::Format::kFp32;
  protocol::DType dtype = protocol::DType::kFloat32;  // of the weights
};

// Memory that an update touches. The block is updated in place.
struct UpdateMemory {
  StateMemory states;
  std::span<const std::byte> accumulators;  // step arena
  std::span<std::byte> new_weights = {};    // step arena, of an early update
  // Of an update that another daemon goes on with where this one is killed (UpdateBlock::is_recorded); null: none does.
  UndoLog* undo = nullptr;
  UndoneArena block_arena = UndoneArena::kStates;  // of states.block, and where it is there
  uint64_t block_offset_bytes = 0;
};

// Elements [begin, end) of a block or of a group.
struct ElemRange {
  uint64_t begin = 0;
  uint64_t end = 0;
};

static_assert(kPartElems % cpu_adam::kSumChunkElems == 0);

// What an update has found.
struct UpdateFound {
  uint64_t overflows = 0;                 // masters that became non-finite
  std::vector<cpu_adam::LambSums> norms;  // UpdatePass::kNorms: by segment
};

// Updates those elements of the block that lie in `range`, which begins at a multiple of kTileElems;
// of kPartElems where norms are summed. What an undo log has as done is left alone, and counted.
UpdateFound RunUpdate(const UpdateBlock& action, ElemRange range, const UpdateMemory& memory);

// The result of a block from those of its ranges; lists come from `memory`.
TaskDone JoinUpdate(std::span<const UpdateFound> found,
                    std::pmr::memory_resource* memory = std::pmr::get_default_resource());

// Elements whose states stay in the second-level cache between update and checksum.
inline constexpr uint64_t kTileElems = uint64_t{1} << 13;
static_assert(kPartElems % kTileElems == 0 && kTileElems % protocol::kScaleElems == 0);

// Updates a whole block, in ranges whose pages are digested while they are in the cache. The result has
// the checksum of the block under `identity_after`, where the pass changes it.
TaskDone RunUpdateForSwap(const UpdateBlock& action, const UpdateMemory& memory, uint64_t nonce);

void RunCopies(std::span<const BytesCopy> copies, std::span<const std::byte> from,
               std::span<std::byte> to);

// A copy of each part, in their order.
ExtraStates RunKeepExtraStates(std::span<const StatePart> parts, std::span<const std::byte> step);
// As many as there are places for.
void RunRestoreExtraStates(const RestoreExtraStates& action, std::span<std::byte> step);

// Checks swapped bytes before they are used: against identity and checksum of the block ledger
// (`expected`), or, where the block has no slot yet, that they are zeros.
//
// Errors  E_CORRUPT  names path, offset and identity, or the block that should be zeros.
absl::Status VerifyBlock(const std::optional<nvme::ExpectedContent>& expected,
                         const BlockIdentity& identity, std::span<const std::byte> bytes);

// What an addition has found.
struct AddedGradients {
  uint64_t culprit = 0;         // 1 + the first source that is not finite; 0: all are
  cpu_adam::SquareSum squares;  // of the sums
};

// sources -> accumulator, for the elements in `range` (it begins at a multiple of kSumChunkElems; all
// spans are whole), in one pass over memory. Ends early where a source or a sum is not finite: then
// `squares` is not either.
AddedGradients RunAddGradients(const AddGradients& action, ElemRange range,
                               std::span<const std::span<const std::byte>> sources,
                               std::span<std::byte> accumulator);

// The squares of an accumulator's elements in `range`, which begins at a multiple of kSumChunkElems.
cpu_adam::SquareSum RunSumGradient(protocol::DType sum_dtype, ElemRange range,
                                   std::span<const std::byte> accumulator);

// Elements of one state as float32, into the client's bytes, which may have any alignment of 4.
void RunDecodeState(const DecodeState& action, const StateMemory& memory, std::span<std::byte> to);

// Bytes of the client, of `action.dtype` -> masters and weights, of a frozen parameter weights alone, or a moment.
// False, and nothing is changed, where one is not finite, rounds to infinity or is a square below 0; a client that
// changes its bytes meanwhile may find some of them set.
bool RunSetState(const SetState& action, const StateMemory& memory,
                 std::span<const std::byte> from);

// The checksum of a whole block, and the digests of its plane of weights if it has one.
TaskDone DigestBlock(const BlockIdentity& identity, uint64_t nonce, uint64_t states_elems,
                     const StateMemory& memory);

// Verified pages of a plane of weights -> weights arena.
//
// Errors  E_CORRUPT  names path and offset.
absl::Status RunLoadWeights(const LoadWeights& action, std::string_view path,
                            std::span<const std::byte> from, std::span<std::byte> weights);

// client's bytes -> weights. False where the first `checked_bytes` of the copy are not finite.
bool RunCopyInitial(protocol::DType dtype, std::span<const std::byte> from, std::span<std::byte> to,
                    uint64_t checked_bytes);

}  // namespace forebay::daemon
