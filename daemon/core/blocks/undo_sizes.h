// SPDX-License-Identifier: Apache-2.0
// Sizes of the undo log (UndoLog), from which the next daemon undoes the unfinished work of a killed daemon's workers.
#pragma once

#include <cstdint>

#include "protocol/layout.h"

namespace forebay::daemon {

// Number of elements in one part. Work on many elements is cut into parts, which workers may do at once with the same result,
// bit for bit.
inline constexpr uint64_t kPartElems = uint64_t{1} << 19;

constexpr uint64_t PartsOf(uint64_t elems) { return (elems + kPartElems - 1) / kPartElems; }

// UndoAreaBytes() is the size of a worker's undo area: a header of kUndoHeaderBytes that describes the worker's current work,
// then two slots of cpu_adam::SavedElems. kUndoPartBytes is the size of the progress record of one part.
inline constexpr uint64_t kUndoHeaderBytes = 512;
uint64_t UndoAreaBytes(const protocol::LayoutSpec& spec);
inline constexpr uint64_t kUndoPartBytes = 64;

// Returns the bytes of the undo log of a job with `blocks` blocks of `block_elems` elements, on a node with `workers` workers.
uint64_t UndoBytes(const protocol::LayoutSpec& spec, uint64_t blocks, uint64_t block_elems,
                   uint64_t workers);

}  // namespace forebay::daemon
