// SPDX-License-Identifier: Apache-2.0
// Cuts groups into equal parts, one for each rank. Loops without FSDP2 attach with such a layout.
#pragma once

#include <cstdint>

#include "protocol/layout.h"

namespace forebay::client {

// Elements in each rank's part of a group, a multiple of 64: whole cache lines of any type. The last ranks' parts may hold
// fewer elements of the group, or none.
uint64_t FlatShardElems(uint64_t group_elems, uint32_t world_size);

// The spec of a sharded job: rank r holds elements [r * n, (r + 1) * n) of each group, whose parameters lie
// end to end, with n = FlatShardElems().
//
// Errors  none: Layout::Create checks the result.
protocol::LayoutSpec ShardFlat(protocol::LayoutSpec spec, uint32_t world_size);

// The ranks of one node, of a job over several.
struct NodeRanks {
  uint32_t first = 0;
  uint32_t count = 0;
};

// The layout of one node's ranks in a job of `world_ranks` ranks. Owners are numbered from the node's first rank, as in
// AttachOptions::rank.
protocol::LayoutSpec ShardFlatOfNode(protocol::LayoutSpec spec, uint32_t world_ranks,
                                     const NodeRanks& own);

}  // namespace forebay::client
