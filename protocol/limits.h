// SPDX-License-Identifier: Apache-2.0
// Maxima of what clients send: of a layout and its partitions, of a session, of what it commits with a step. Those of a node
// are in daemon/core/base/limits.h.
#pragma once

#include <cstddef>
#include <cstdint>

namespace forebay::protocol {

// | constant                  | unit              | why this limit                                             |
// | ------------------------- | ----------------- | ---------------------------------------------------------- |
// | kGroupsMax                | groups            | of a layout: bounds its tables                             |
// | kParamsMax                | parameters        | of a layout: bounds its tables                             |
// | kWorldMax                 | ranks of a node   | bounds the tables of a step                                |
// | kParamGroupsMax           | groups            | of torch's optimizer: a record has a row for each          |
// | kDimsMax                  | dimensions        | of a parameter's shape                                     |
// | kGroupElemsMax            | elements          | of a group: 16 GiB in float32                              |
// | kNameBytesMax             | bytes             | of a parameter's name                                      |
// | kLayoutBytesMax           | bytes             | of an encoded layout                                       |
// | kOwnersMax, kReplicasMax  | ranks             | that own parts of a group, and copies of a part            |
// | kPartitionsMax            | partitions        | of a layout: bounds the tables of leases and weights       |
// | kBoxesMax                 | boxes             | of all partitions, the parts of parameters that they hold  |
// | kSessionWaitMsMax         | milliseconds      | Node.hello, sessionWaitMs: an hour                         |
// | kExtraStateBytesMax       | bytes of a rank   | a record holds it as one Data, which has less than 512 MiB |
// | kRemoteExtraStateBytesMax | bytes of a rank   | an answer to a rank on another node carries it, and rank   |
// |                           |                   | 0's                                                        |
// | kExchangeBytesMax         | bytes of a rank   | that ranks exchange through the daemon                     |
// | kExchangedBytesMax        | bytes, all ranks  | the same, in a reattach                                    |
inline constexpr uint32_t kGroupsMax = 16384;
inline constexpr uint32_t kParamsMax = 1 << 20;
inline constexpr uint32_t kWorldMax = 1024;
inline constexpr uint32_t kParamGroupsMax = 4096;
inline constexpr uint32_t kDimsMax = 8;
inline constexpr uint64_t kGroupElemsMax = uint64_t{1} << 32;
inline constexpr uint32_t kNameBytesMax = 64 << 10;
inline constexpr uint64_t kLayoutBytesMax = uint64_t{64} << 20;
inline constexpr uint32_t kOwnersMax = 1024;
inline constexpr uint32_t kReplicasMax = 1024;
inline constexpr uint32_t kPartitionsMax = 1 << 20;
inline constexpr uint32_t kBoxesMax = 1 << 22;
inline constexpr uint32_t kSessionWaitMsMax = 3'600'000;
inline constexpr uint64_t kExtraStateBytesMax = uint64_t{480} << 20;
inline constexpr uint64_t kRemoteExtraStateBytesMax = uint64_t{16} << 20;
inline constexpr size_t kExchangeBytesMax = 4096;
inline constexpr size_t kExchangedBytesMax = 256 << 10;

}  // namespace forebay::protocol
