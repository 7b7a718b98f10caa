#include "daemon/core/block_map.h"

#include <algorithm>
#include <utility>

#include "protocol/os/check.h"
#include "protocol/units.h"

namespace forebay::daemon {
namespace {

using protocol::Layout;
using protocol::Plane;

std::span<const Plane> PlanesOf(const Layout& layout) {
  const protocol::LayoutSpec& spec = layout.spec();
  return protocol::StatePlanes(spec.optimizer, spec.format, spec.dtype);
}

uint64_t PagesOf(const Plane& plane, uint64_t elems) {
  return protocol::RoundUp(PlaneBytes(plane, elems), protocol::kPageBytes);
}

// Blocks, like partitions, are cut at multiples of this.
uint64_t AlignElems(const Layout& layout) {
  return layout.spec().format == protocol::Format::kInt8 ? protocol::kScaleElems
                                                         : protocol::kPartitionAlignElems;
}

uint64_t BlockBytes(std::span<const Plane> planes, uint64_t elems) {
  uint64_t bytes = 0;
  for (const Plane& plane : planes) bytes += PagesOf(plane, elems);
  return bytes;
}

}  // namespace

BlockMap::BlockMap(std::shared_ptr<const Layout> layout, uint64_t block_elems)
    : layout_(std::move(layout)),
      planes_(PlanesOf(*layout_)),
      block_elems_(block_elems),
      world_size_(layout_->spec().world_size),
      blocks_per_rank_(0),
      rank_elems_(layout_->padded_elems() / world_size_) {
  FOREBAY_CHECK(block_elems_ > 0 && block_elems_ % AlignElems(*layout_) == 0);
  blocks_per_rank_ = static_cast<uint32_t>((rank_elems_ + block_elems_ - 1) / block_elems_);
  uint64_t begin = 0;
  for (uint32_t group = 0; group < layout_->groups().size(); ++group) {
    group_begins_.push_back(begin);
    begin += layout_->partition_elems(group);
  }
  group_begins_.push_back(begin);
  FOREBAY_CHECK(begin == rank_elems_);
}

uint64_t BlockMap::elems(uint32_t block) const {
  const uint64_t begin = uint64_t{block / world_size_} * block_elems_;
  return std::min(block_elems_, rank_elems_ - begin);
}

uint64_t BlockMap::bytes(uint32_t block) const { return BytesOf(elems(block)); }

uint64_t BlockMap::BytesOf(uint64_t elems) const { return BlockBytes(planes_, elems); }

uint64_t BlockMap::plane_offset_bytes(uint32_t block, uint32_t plane) const {
  return BlockBytes(planes_.first(plane), elems(block));
}

std::vector<BlockRun> BlockMap::Runs(uint32_t block) const {
  const uint64_t rank = block % world_size_;
  const uint64_t begin = uint64_t{block / world_size_} * block_elems_;
  const uint64_t end = begin + elems(block);
  const auto after = std::upper_bound(group_begins_.begin(), group_begins_.end(), begin);
  auto group = static_cast<uint32_t>(after - group_begins_.begin() - 1);

  std::vector<BlockRun> runs;
  for (uint64_t at = begin; at < end; ++group) {
    const protocol::GroupPlace& place = layout_->groups()[group];
    const uint64_t part_end = std::min(end, group_begins_[group + 1]);
    // The part of this block that lies in this group, as elements of the padded group.
    // May wrap
    const uint64_t shift = rank * layout_->partition_elems(group) - group_begins_[group];
    const uint64_t first = at + shift;
    const uint64_t last = std::min(part_end + shift, place.elems);  // without the padding
    const auto params =
        layout_->params().subspan(place.param_begin, place.param_end - place.param_begin);
    auto param = std::upper_bound(
        params.begin(), params.end(), first,
        [](uint64_t elem, const protocol::ParamPlace& p) { return elem < p.offset_elems; });
    if (param != params.begin()) --param;
    for (; param != params.end() && param->offset_elems < last; ++param) {
      const uint64_t elem = std::max(first, param->offset_elems);  // there may be a gap before it
      const uint64_t stop = std::min(last, param->offset_elems + param->elems);
      if (elem >= stop) continue;
      const auto index = static_cast<uint32_t>(param - params.begin());
      runs.push_back({.group = group,
                      .param_group = param->param_group,
                      .param = place.param_begin + index,
                      .param_elem = elem - param->offset_elems,
                      .group_elem = elem,
                      .block_elem = elem - shift - begin,
                      .elems = stop - elem});
    }
    at = part_end;
  }
  return runs;
}

std::vector<uint32_t> BlockMap::Groups(uint32_t block) const {
  std::vector<uint32_t> groups;
  for (const BlockRun& run : Runs(block)) {
    if (groups.empty() || groups.back() != run.group) groups.push_back(run.group);
  }
  return groups;
}

std::vector<ElementRun> BlockMap::Locate(uint32_t group, uint64_t first, uint64_t elems) const {
  const uint64_t partition = layout_->partition_elems(group);
  std::vector<ElementRun> runs;
  for (uint64_t elem = first; elem < first + elems;) {
    const uint64_t rank = elem / partition;
    const uint64_t in_rank = group_begins_[group] + elem % partition;
    const uint64_t block_elem = in_rank % block_elems_;
    const uint64_t count =
        std::min({first + elems - elem, partition - elem % partition, block_elems_ - block_elem});
    const auto block = static_cast<uint32_t>(in_rank / block_elems_ * world_size_ + rank);
    runs.push_back({.block = block, .block_elem = block_elem, .elems = count});
    elem += count;
  }
  return runs;
}

uint64_t BlockMap::Blocks(const Layout& layout, uint64_t block_elems) {
  const uint64_t world_size = layout.spec().world_size;
  const uint64_t rank_elems = layout.padded_elems() / world_size;
  return (rank_elems + block_elems - 1) / block_elems * world_size;
}

uint64_t BlockMap::ElemsWithin(const Layout& layout, uint64_t bytes) {
  const std::span<const Plane> planes = PlanesOf(layout);
  const uint64_t align = AlignElems(layout);
  uint64_t align_bytes = 0;
  for (const Plane& plane : planes) align_bytes += protocol::PlaneBytes(plane, align);
  uint64_t elems = bytes / align_bytes * align;
  while (elems > 0 && BlockBytes(planes, elems) > bytes) elems -= align;
  return elems;
}

uint64_t BlockMap::TotalBytes(const Layout& layout, uint64_t block_elems) {
  const uint64_t world_size = layout.spec().world_size;
  const uint64_t rank_elems = layout.padded_elems() / world_size;
  const auto planes = PlanesOf(layout);
  const uint64_t rank_bytes = rank_elems / block_elems * BlockBytes(planes, block_elems) +
                              BlockBytes(planes, rank_elems % block_elems);
  return rank_bytes * world_size;
}

}  // namespace forebay::daemon
