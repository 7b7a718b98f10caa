// SPDX-License-Identifier: Apache-2.0
// Sizes of the memory that undoes what a killed daemon had in hand (UndoLog).
#pragma once

#include <cstdint>

#include "protocol/layout.h"

namespace forebay::daemon {

// Elements of one part. Work on many elements is cut into parts, which may be done at once: the result is the same, bit for
// bit.
inline constexpr uint64_t kPartElems = uint64_t{1} << 19;

constexpr uint64_t PartsOf(uint64_t elems) { return (elems + kPartElems - 1) / kPartElems; }

// The undo area of a worker: a header of kUndoHeaderBytes with what the worker has in hand, then two slots of
// cpu_adam::SavedElems. kUndoPartBytes is the size of the progress of one part.
inline constexpr uint64_t kUndoHeaderBytes = 512;
uint64_t UndoAreaBytes(const protocol::LayoutSpec& spec);
inline constexpr uint64_t kUndoPartBytes = 64;

// Bytes of the undo log of a job with so many blocks of `block_elems` elements, on a node with so many workers.
uint64_t UndoBytes(const protocol::LayoutSpec& spec, uint64_t blocks, uint64_t block_elems,
                   uint64_t workers);

}  // namespace forebay::daemon
