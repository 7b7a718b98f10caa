// SPDX-License-Identifier: Apache-2.0
// Layouts for tests: shared and sharded.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "protocol/layout.h"

namespace forebay::testing {

// A float32 layout in which each group has one parameter of the given number of elements. All parameters are in parameter group
// 0. MakeLayoutOfParams makes one parameter for each number of a group.
std::shared_ptr<const protocol::Layout> MakeLayout(const std::vector<uint64_t>& group_elems);

std::shared_ptr<const protocol::Layout> MakeLayoutOfParams(
    const std::vector<std::vector<uint64_t>>& param_elems,
    protocol::DType dtype = protocol::DType::kFloat32);

// The dimension along which a sharded layout cuts a parameter. kRows cuts like torch.chunk on dimension 0: the last shards may
// be shorter or empty. kColumns gives each owner a strided box.
enum class ShardCut { kRows, kColumns };

struct ShardedParam {
  uint64_t rows = 0;
  uint64_t columns = 1;
  ShardCut cut = ShardCut::kRows;
  bool trainable = true;
};

struct ShardedLayoutOptions {
  uint32_t ranks = 2;
  // Number of ranks on this node, the first of them `first_rank`, in a job over several nodes. 0: all ranks are on this node.
  uint32_t node_ranks = 0;
  uint32_t first_rank = 0;
  protocol::DType dtype = protocol::DType::kFloat32;
  std::optional<protocol::DType> grad_dtype = {};
  protocol::Format format = protocol::Format::kFp32;
};

// Parameters by group, each cut over the ranks. A rank without an element of a group has no partition
// of it.
std::shared_ptr<const protocol::Layout> MakeShardedLayout(
    const std::vector<std::vector<ShardedParam>>& groups, const ShardedLayoutOptions& options = {});

}  // namespace forebay::testing
