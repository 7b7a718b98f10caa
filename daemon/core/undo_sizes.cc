#include "daemon/core/undo_sizes.h"

#include "protocol/optimizer.h"
#include "protocol/units.h"

namespace forebay::daemon {

namespace {
constexpr uint64_t kHeaderBytes = 512;
constexpr uint64_t kAlignment = 64;
}  // namespace

uint64_t UndoAreaBytes(const protocol::LayoutSpec& spec) {
  uint64_t bytes = kHeaderBytes + kUndoElems * protocol::SizeBytes(spec.dtype);
  for (const protocol::Plane& plane :
       protocol::StatePlanes(spec.optimizer, spec.format, spec.dtype)) {
    bytes += protocol::RoundUp(protocol::PlaneBytes(plane, kUndoElems), kAlignment);
  }
  return protocol::RoundUp(bytes, protocol::kPageBytes);
}

uint64_t UndoBytes(const protocol::LayoutSpec& spec, uint64_t blocks, uint64_t block_elems,
                   uint64_t workers) {
  return workers * UndoAreaBytes(spec) +
         protocol::RoundUp(blocks * PartsOf(block_elems) * kUndoPartBytes, protocol::kPageBytes);
}

}  // namespace forebay::daemon
