// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/blocks/undo_sizes.h"

#include "cpu_adam/update_kernel.h"
#include "protocol/optimizer.h"
#include "protocol/units.h"

namespace forebay::daemon {

uint64_t UndoAreaBytes(const protocol::LayoutSpec& spec) {
  return protocol::RoundUp(
      kUndoHeaderBytes + 2 * cpu_adam::SavedSlotBytes(spec.optimizer, {spec.format, spec.dtype}),
      protocol::kPageBytes);
}

uint64_t UndoBytes(const protocol::LayoutSpec& spec, uint64_t blocks, uint64_t block_elems,
                   uint64_t workers) {
  return workers * UndoAreaBytes(spec) +
         protocol::RoundUp(blocks * PartsOf(block_elems) * kUndoPartBytes, protocol::kPageBytes);
}

}  // namespace forebay::daemon
