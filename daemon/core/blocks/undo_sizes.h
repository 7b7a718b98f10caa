// SPDX-License-Identifier: Apache-2.0
// How much memory it takes to undo what a daemon that is killed has in hand (UndoLog).
#pragma once

#include <cstdint>

#include "protocol/layout.h"

namespace forebay::daemon {

// Work on many elements is cut into parts of so many, which may be done at once: the result is the same, bit for bit.
inline constexpr uint64_t kPartElems = uint64_t{1} << 19;

constexpr uint64_t PartsOf(uint64_t elems) { return (elems + kPartElems - 1) / kPartElems; }

// Of what one worker has in hand: what it is, then two slots of cpu_adam::SavedElems. And of the progress of one part.
inline constexpr uint64_t kUndoHeaderBytes = 512;
uint64_t UndoAreaBytes(const protocol::LayoutSpec& spec);
inline constexpr uint64_t kUndoPartBytes = 64;

// Of a job with blocks of so many elements, on a node with so many workers.
uint64_t UndoBytes(const protocol::LayoutSpec& spec, uint64_t blocks, uint64_t block_elems,
                   uint64_t workers);

}  // namespace forebay::daemon
