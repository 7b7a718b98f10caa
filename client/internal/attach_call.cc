// SPDX-License-Identifier: Apache-2.0
#include "client/internal/attach_call.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <vector>

#include "client/environment.h"
#include "client/internal/attachment_state.h"
#include "protocol/units.h"

namespace forebay::client::internal {
namespace {

// Pieces in the arena. With shared attachment a gradient waits for lower ranks. With sharded attachment no gradient waits: one
// piece is filled while one is in flight.
constexpr uint64_t kPiecesInSharedArena = 4;
constexpr uint64_t kPiecesInShardedArena = 2;
constexpr uint64_t kGroupsOnTheirWay = 3;
constexpr uint64_t kReaderArenaBytes = protocol::kMiB;  // bytes of a piece of state read

// Bytes of the gradient arena that keep a GPU busy. The processor asks for room ahead of the GPU: while the GPU computes one
// layer, the gradients of a second layer are copied and those of a third are added up. The largest group is usually the
// embedding's, whose gradients come last.
uint64_t ArenaBytesOnGpu(const protocol::Layout& layout) {
  std::vector<uint64_t> bytes(layout.groups().size() + 1);  // largest shard of each group
  for (uint32_t i = 0; i < layout.partitions().size(); ++i) {
    uint64_t& of_group = bytes[layout.partitions()[i].group];
    of_group = std::max(of_group, layout.gradient_bytes(i));
  }
  std::ranges::sort(bytes, std::greater());
  return std::max(bytes[0], kGroupsOnTheirWay * bytes[1]);
}

uint64_t GradArenaBytes(const AttachOptions& options, const protocol::Layout& layout) {
  if (options.grad_arena_bytes != 0) return options.grad_arena_bytes;
  if (options.reader) return kReaderArenaBytes;
  if (layout.is_shared()) return PieceBytes(layout) * kPiecesInSharedArena;
  const uint64_t on_gpu = options.is_on_gpu ? ArenaBytesOnGpu(layout) : 0;
  if (on_gpu > protocol::kGradPieceBytesMax * kPiecesInShardedArena) return on_gpu;
  return PieceBytes(layout) * kPiecesInShardedArena;
}

}  // namespace

AttachCall MakeAttachCall(const AttachOptions& options, const protocol::Layout& layout,
                          std::span<const std::byte> encoded) {
  return {.job = options.job,
          .reader = options.reader,
          .rank = options.rank,
          .world_size = options.world_size,
          .world_ranks = options.nodes.world_ranks,
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
