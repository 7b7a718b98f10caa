// SPDX-License-Identifier: Apache-2.0
// Maxima of what clients send: of a layout and its partitions, of a session, of what it commits with a step. Those of a node
// are in daemon/core/base/limits.h.
#pragma once

#include <cstddef>
#include <cstdint>

namespace forebay::protocol {

// A layout.
inline constexpr uint32_t kGroupsMax = 16384;
inline constexpr uint32_t kParamsMax = 1 << 20;
inline constexpr uint32_t kWorldMax = 1024;
inline constexpr uint32_t kParamGroupsMax = 4096;
inline constexpr uint32_t kDimsMax = 8;
inline constexpr uint64_t kGroupElemsMax = uint64_t{1} << 32;
inline constexpr uint32_t kNameBytesMax = 64 << 10;
inline constexpr uint64_t kLayoutBytesMax = uint64_t{64} << 20;

// The partitions of a layout.
inline constexpr uint32_t kOwnersMax = 1024;
inline constexpr uint32_t kReplicasMax = 1024;
inline constexpr uint32_t kPartitionsMax = 1 << 20;
inline constexpr uint32_t kBoxesMax = 1 << 22;

inline constexpr uint32_t kSessionWaitMsMax = 3'600'000;  // Node.hello, sessionWaitMs

// The limits of one rank. A record holds extra_state as one Data, which has less than 512 MiB. A rank on another node gets it
// in an answer, with rank 0's.
inline constexpr uint64_t kExtraStateBytesMax = uint64_t{480} << 20;
inline constexpr uint64_t kRemoteExtraStateBytesMax = uint64_t{16} << 20;

inline constexpr size_t kExchangeBytesMax = 4096;        // bytes of one rank
inline constexpr size_t kExchangedBytesMax = 256 << 10;  // bytes of all ranks, in a reattach

}  // namespace forebay::protocol
