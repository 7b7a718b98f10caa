// SPDX-License-Identifier: Apache-2.0
// The messages over UCX between a gateway, which is a client of the daemon on its node, and an agent, which serves a trainer on
// another node. Every message has the header below. The receiver checks the header, and every range in it, before use.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "protocol/wire.h"

namespace forebay::protocol {

// Raised by one with every change that an older peer would misread, of these structs or of remote.capnp.
inline constexpr uint32_t kRemoteVersion = 2;
inline constexpr uint32_t kRemoteMagic = 0x31524246;  // "FBR1" on a little-endian machine

// Bytes of a piece of weights or states that the gateway sends to the agent. Gradients travel in pieces of up to
// kGradPieceBytesMax.
inline constexpr uint64_t kRemotePieceBytes = uint64_t{256} << 10;
// Bytes of a piece of weights or states that the agent reads itself.
inline constexpr uint64_t kRemoteReadBytes = uint64_t{16} << 20;
inline constexpr uint32_t kRemotePiecesInFlight = 32;  // limit of each session
// Bits in tags. kAgentTag: a request of the agent itself; a trainer's command never has it. kGatewayTag: a command of the
// gateway itself to the daemon.
inline constexpr uint64_t kAgentTag = uint64_t{1} << 63;
inline constexpr uint64_t kGatewayTag = uint64_t{1} << 62;

using RemoteSecret = std::array<std::byte, 16>;  // secret of one session, exchanged over TLS

enum class RemoteKind : uint16_t {
  kNone = 0,
  // Agent: `command`, with the bytes that the daemon reads of it, for the range of the grad arena.
  kCommand = 1,
  // Agent: brings all weights that have changed; answered by a kCompletion of the command's tag. With shared
  // attachment alone.
  kSync = 2,
  // Gateway: `completion`; it counts when the first `pieces` pieces of the session have arrived.
  kCompletion = 3,
  // Gateway: the bytes of a range.
  kPiece = 4,
  // Gateway: a piece that the agent reads itself.
  kRead = 5,
  // Both: alive.
  kPing = 6,
  // Gateway: the daemon has ended the session; completion.flags is a ChannelState.
  kEnd = 7,
  // Gateway: the answer to a fetch of partition `completion.tag`, before the trainer has sent the fetch. It covers all
  // commands of the agent below `number`. The agent may use the answer once the first `pieces` pieces of the session have
  // arrived. The answer is void if the trainer has sent a command from `number` on that changes weights.
  kAhead = 8,
};

// Returns whether the command may change the weights of the rank that sends it.
inline bool MayChangeWeights(const Command& command) {
  switch (static_cast<Op>(command.op)) {
    case Op::kWriteInitial:
    case Op::kInitialDone:
    case Op::kStep:
    case Op::kDecide:
    case Op::kGoBack:
      return true;
    case Op::kWriteState:
      return command.kind == 0;  // masters
    default:
      return false;
  }
}

enum class RemoteRegion : uint16_t { kWeights = 0, kGradArena = 1 };

struct RemoteHeader {
  uint32_t magic = kRemoteMagic;
  uint16_t kind = 0;    // RemoteKind
  uint16_t region = 0;  // RemoteRegion
  uint64_t session = 0;
  RemoteSecret secret = {};
  // kCommand and kSync share one sequence 0, 1, 2, ...; kPiece and kRead share another. The receiver restores their order: UCX
  // may let one message overtake another. kAhead: see RemoteKind::kAhead.
  uint64_t number = 0;
  uint64_t offset_bytes = 0;
  uint64_t length_bytes = 0;
  uint64_t pieces = 0;  // number of pieces; set in kCompletion and kAhead
  // A Command or a Completion.
  std::array<std::byte, 64> entry = {};

  template <typename Entry>
  Entry As() const {
    static_assert(sizeof(Entry) == 64 && std::is_trivially_copyable_v<Entry>);
    Entry copy;
    std::memcpy(&copy, entry.data(), sizeof(copy));
    return copy;
  }
  template <typename Entry>
  void Set(const Entry& value) {
    static_assert(sizeof(Entry) == 64 && std::is_trivially_copyable_v<Entry>);
    std::memcpy(entry.data(), &value, sizeof(value));
  }
};
static_assert(sizeof(RemoteHeader) == 128 && std::is_trivially_copyable_v<RemoteHeader>);

}  // namespace forebay::protocol
