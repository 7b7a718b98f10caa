#include "client/internal/attach_call.h"

#include <optional>

#include "client/environment.h"
#include "client/internal/attachment_state.h"
#include "protocol/units.h"

namespace forebay::client::internal {
namespace {

// A shared gradient waits for lower ranks, a sharded one for nobody: one piece fills, one travels.
constexpr uint64_t kPiecesInSharedArena = 4;
constexpr uint64_t kPiecesInShardedArena = 2;
constexpr uint64_t kReaderArenaBytes = protocol::kMiB;  // states are read in pieces of this

uint64_t GradArenaBytes(const AttachOptions& options, const protocol::Layout& layout) {
  if (options.grad_arena_bytes != 0) return options.grad_arena_bytes;
  if (options.reader) return kReaderArenaBytes;
  return PieceBytes(layout) * (layout.is_shared() ? kPiecesInSharedArena : kPiecesInShardedArena);
}

}  // namespace

AttachCall MakeAttachCall(const AttachOptions& options, const protocol::Layout& layout,
                          std::span<const std::byte> encoded) {
  return {.job = options.job,
          .reader = options.reader,
          .rank = options.rank,
          .world_size = options.world_size,
          .run = RunToken(options.run),
          .resume = options.resume,
          .accumulate = options.accumulate,
          .early_updates = options.early_updates && !options.reader,
          .grad_arena_bytes = GradArenaBytes(options, layout),
          .extra_state_bytes = options.reader ? 0 : options.extra_state_bytes,
          .activation_bytes = options.reader ? 0 : options.activation_bytes,
          .trace = options.trace && !options.reader,
          .durability = options.reader ? std::nullopt : options.durability,
          .layout = encoded};
}

}  // namespace forebay::client::internal
