// SPDX-License-Identifier: Apache-2.0
#include "client/flat_shards.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "protocol/units.h"

namespace forebay::client {

uint64_t FlatShardElems(uint64_t group_elems, uint32_t world_size) {
  constexpr uint64_t kAlignElems = 64;
  if (world_size == 0) return 0;
  const uint64_t elems = (group_elems + world_size - 1) / world_size;
  return protocol::RoundUp(elems, kAlignElems);
}

protocol::LayoutSpec ShardFlat(protocol::LayoutSpec spec, uint32_t world_size) {
  spec.partitions.clear();
  const auto elems_of = [](const protocol::ParamSpec& param) {
    return std::accumulate(param.shape.begin(), param.shape.end(), uint64_t{1},
                           std::multiplies<>());
  };
  const auto params = static_cast<uint32_t>(spec.params.size());
  for (uint32_t first = 0, last = 0; first < params; first = last) {
    const uint32_t group = spec.params[first].group;
    uint64_t group_elems = 0;
    for (last = first; last < params && spec.params[last].group == group; ++last) {
      group_elems += elems_of(spec.params[last]);
    }
    const uint64_t shard = FlatShardElems(group_elems, world_size);
    // Ranks behind the group's end have nothing of it.
    for (uint32_t rank = 0; rank < world_size && rank * shard < group_elems; ++rank) {
      const uint64_t shard_begin = rank * shard;
      const uint64_t shard_end = shard_begin + shard;
      protocol::PartitionSpec partition{.group = group, .owner = rank, .replica = 0, .boxes = {}};
      uint64_t param_begin = 0;
      for (uint32_t param = first; param < last; ++param) {
        const uint64_t param_end = param_begin + elems_of(spec.params[param]);
        const uint64_t begin = std::max(shard_begin, param_begin);
        const uint64_t end = std::min(shard_end, param_end);
        if (begin < end) {
          partition.boxes.push_back({.param = param,
                                     .first_elem = begin - param_begin,
                                     .run_elems = end - begin,
                                     .stride_elems = end - begin});
        }
        param_begin = param_end;
      }
      if (!partition.boxes.empty()) spec.partitions.push_back(std::move(partition));
    }
  }
  return spec;
}

protocol::LayoutSpec ShardFlatOfNode(protocol::LayoutSpec spec, uint32_t world_ranks,
                                     const NodeRanks& own) {
  spec = ShardFlat(std::move(spec), world_ranks);
  std::erase_if(spec.partitions, [&](const protocol::PartitionSpec& partition) {
    return partition.owner < own.first || partition.owner - own.first >= own.count;
  });
  for (protocol::PartitionSpec& partition : spec.partitions) partition.owner -= own.first;
  spec.is_part = true;
  spec.first_rank = own.first;
  return spec;
}

}  // namespace forebay::client
