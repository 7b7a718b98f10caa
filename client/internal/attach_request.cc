// SPDX-License-Identifier: Apache-2.0
#include "client/internal/attach_request.h"

#include <capnp/message.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "client/environment.h"
#include "client/internal/session_parts.h"
#include "protocol/durability.h"
#include "protocol/forebay.capnp.h"
#include "protocol/units.h"
#include "protocol/wire.h"

namespace forebay::client::internal {
namespace {

// Number of pieces in the gradient arena. With shared attachment a gradient waits for lower ranks. With sharded attachment no
// gradient waits: one piece is filled while another is in flight.
constexpr uint64_t kPiecesInSharedArena = 4;
constexpr uint64_t kPiecesInShardedArena = 2;
constexpr uint64_t kGroupsOnTheirWay = 3;
// Largest piece of a reader's reads of states.
constexpr uint64_t kReaderArenaBytes = protocol::kMiB;

// Returns the bytes of a gradient arena with room for three layers, so that a GPU does not wait for room. While the GPU computes
// the gradients of one layer, those of a second layer are copied and those of a third are added. The largest group is usually the
// embedding, whose gradients come last. So the arena has room for three times the second largest group, or for the largest.
uint64_t ArenaBytesOnGpu(const protocol::Layout& layout) {
  std::vector<uint64_t> bytes(layout.groups().size() + 1);  // bytes of each group's largest shard
  for (uint32_t i = 0; i < layout.partitions().size(); ++i) {
    uint64_t& of_group = bytes[layout.partitions()[i].group];
    of_group = std::max(of_group, layout.gradient_bytes(i));
  }
  std::ranges::sort(bytes, std::greater());
  return std::max(bytes[0], kGroupsOnTheirWay * bytes[1]);
}

kj::StringPtr TextOf(const std::string& text) { return {text.c_str(), text.size()}; }

uint64_t GradArenaBytes(const AttachOptions& options, const protocol::Layout& layout) {
  if (options.memory.grad_arena_bytes != 0) return options.memory.grad_arena_bytes;
  if (options.reader) return kReaderArenaBytes;
  if (layout.is_shared()) return layout.largest_piece_bytes() * kPiecesInSharedArena;
  const uint64_t on_gpu = options.is_on_gpu ? ArenaBytesOnGpu(layout) : 0;
  if (on_gpu > protocol::kGradPieceBytesMax * kPiecesInShardedArena) return on_gpu;
  return layout.largest_piece_bytes() * kPiecesInShardedArena;
}

}  // namespace

AttachRequest MakeAttachRequest(const AttachOptions& options, const protocol::Layout& layout) {
  const std::string run = RunToken(options.run);
  capnp::MallocMessageBuilder message;
  auto request = message.initRoot<schema::AttachRequest>();
  request.setJob(TextOf(options.job));
  request.setReader(options.reader);
  request.setRank(options.rank);
  request.setWorldSize(options.world_size);
  request.setWorldRanks(options.nodes.world_ranks);
  request.setRun(TextOf(run));
  request.setResume(options.resume);
  request.setAccumulate(options.accumulate);
  request.setGradArenaBytes(GradArenaBytes(options, layout));
  if (!options.reader) {
    const bool is_writable = options.device != nullptr && !options.device->registers_read_only();
    request.setWritableWeights(is_writable);
    request.setEarlyUpdates(options.early_updates);
    request.setExtraStateBytes(options.memory.extra_state_bytes);
    request.setActivationBytes(options.memory.activation_bytes);
    request.setTrace(options.trace);
    if (options.durability.level) {
      request.setDurability(protocol::FormatDurability(*options.durability.level).c_str());
    }
  }
  return Clone(request.asReader());
}

AttachRequest MakeReattachRequest(const AttachRequest& first, const SessionBefore& before) {
  capnp::MallocMessageBuilder message;
  message.setRoot(*first);
  auto request = message.getRoot<schema::AttachRequest>();
  request.setReattach(true);
  request.setGradArena(before.grad_arena_inode);
  request.setNewestTag(before.newest_tag);
  request.setExchanges(before.exchanges);
  const std::span<const std::string> answer = before.exchanged;
  const size_t answer_bytes =
      std::accumulate(answer.begin(), answer.end(), size_t{0},
                      [](size_t sum, const std::string& one) { return sum + one.size(); });
  if (!answer.empty() && answer_bytes <= protocol::kExchangedBytesMax) {
    auto exchanged = request.initExchanged(static_cast<unsigned>(answer.size()));
    for (unsigned i = 0; i < exchanged.size(); ++i) {
      exchanged.set(i, {reinterpret_cast<const kj::byte*>(answer[i].data()), answer[i].size()});
    }
  }
  auto leases = request.initHeldLeases(static_cast<unsigned>(before.held_leases.size()));
  for (unsigned i = 0; i < leases.size(); ++i) leases.set(i, before.held_leases[i]);
  return Clone(request.asReader());
}

}  // namespace forebay::client::internal
