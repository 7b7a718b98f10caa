// SPDX-License-Identifier: Apache-2.0
#include "tests/support/layouts.h"

#include <algorithm>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "protocol/os/check.h"

namespace forebay::testing {
namespace {

// The shard of a parameter that rank `rank` owns. Returns nullopt if the rank owns no element.
std::optional<protocol::BoxSpec> ShardOf(uint32_t param, const ShardedParam& shape, uint64_t ranks,
                                         uint64_t rank) {
  const bool by_rows = shape.cut == ShardCut::kRows;
  const uint64_t cut_elems = by_rows ? shape.rows : shape.columns;
  const uint64_t chunk_elems = (cut_elems + ranks - 1) / ranks;
  const uint64_t begin = std::min(rank * chunk_elems, cut_elems);
  const uint64_t count = std::min(begin + chunk_elems, cut_elems) - begin;
  if (count == 0) return std::nullopt;
  if (by_rows || count == shape.columns) {
    const uint64_t elems = by_rows ? count * shape.columns : shape.rows * count;
    return protocol::BoxSpec{.param = param,
                             .first_elem = begin * shape.columns,
                             .run_elems = elems,
                             .stride_elems = elems,
                             .runs = 1};
  }
  return protocol::BoxSpec{.param = param,
                           .first_elem = begin,
                           .run_elems = count,
                           .stride_elems = shape.rows == 1 ? count : shape.columns,
                           .runs = shape.rows};
}

}  // namespace

std::shared_ptr<const protocol::Layout> MakeLayout(const std::vector<uint64_t>& group_elems) {
  std::vector<std::vector<uint64_t>> param_elems;
  for (const uint64_t elems : group_elems) param_elems.push_back({elems});
  return MakeLayoutOfParams(param_elems);
}

std::shared_ptr<const protocol::Layout> MakeLayoutOfParams(
    const std::vector<std::vector<uint64_t>>& param_elems, protocol::DType dtype) {
  protocol::LayoutSpec spec;
  spec.dtype = dtype;
  for (uint32_t group = 0; group < param_elems.size(); ++group) {
    for (const uint64_t elems : param_elems[group]) {
      spec.params.push_back({.name = absl::StrCat("p", spec.params.size()),
                             .shape = {elems},
                             .group = group,
                             .param_group = 0});
    }
    spec.group_names.push_back(absl::StrCat("g", group));
  }
  absl::StatusOr<protocol::Layout> layout = protocol::Layout::Create(std::move(spec));
  FOREBAY_CHECK(layout.ok());
  return std::make_shared<const protocol::Layout>(*std::move(layout));
}

std::shared_ptr<const protocol::Layout> MakeShardedLayout(
    const std::vector<std::vector<ShardedParam>>& groups, const ShardedLayoutOptions& options) {
  protocol::LayoutSpec spec;
  spec.dtype = options.dtype;
  spec.grad_dtype = options.grad_dtype;
  spec.format = options.format;
  spec.is_part = options.node_ranks != 0;
  spec.first_rank = options.first_rank;
  for (uint32_t group = 0; group < groups.size(); ++group) {
    const auto first_param = static_cast<uint32_t>(spec.params.size());
    for (const ShardedParam& param : groups[group]) {
      spec.params.push_back({.name = absl::StrCat("p", spec.params.size()),
                             .shape = {param.rows, param.columns},
                             .group = group,
                             .param_group = 0,
                             .trainable = param.trainable});
    }
    const uint32_t here = options.node_ranks == 0 ? options.ranks : options.node_ranks;
    for (uint32_t rank = options.first_rank; rank < options.first_rank + here; ++rank) {
      protocol::PartitionSpec partition{
          .group = group, .owner = rank - options.first_rank, .replica = 0, .boxes = {}};
      for (uint32_t i = 0; i < groups[group].size(); ++i) {
        const auto box = ShardOf(first_param + i, groups[group][i], options.ranks, rank);
        if (box) partition.boxes.push_back(*box);
      }
      if (!partition.boxes.empty()) spec.partitions.push_back(std::move(partition));
    }
    spec.group_names.push_back(absl::StrCat("g", group));
  }
  absl::StatusOr<protocol::Layout> layout = protocol::Layout::Create(std::move(spec));
  FOREBAY_CHECK(layout.ok());
  return std::make_shared<const protocol::Layout>(*std::move(layout));
}

}  // namespace forebay::testing
