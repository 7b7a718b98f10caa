#include "daemon/core/durable_content.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/dtype.h"
#include "protocol/units.h"

namespace forebay::daemon {

using protocol::kPageBytes;
using protocol::RoundUp;

uint64_t WeightsInDram(const protocol::Layout& layout, const std::vector<bool>& weights_on_swap) {
  if (weights_on_swap.empty()) return layout.weights_bytes();
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < layout.partitions().size(); ++i) {
    if (!weights_on_swap[i]) bytes += RoundUp(layout.partition_bytes(i), kPageBytes);
  }
  return bytes;
}

std::vector<uint64_t> WeightsOffsets(const protocol::Layout& layout,
                                     const std::vector<bool>& weights_on_swap) {
  // Owners' weights lie end to end in the arena.
  std::map<uint32_t, uint64_t> owner_begins;
  uint64_t owner_begin = 0;
  for (const protocol::OwnerPlace& owner : layout.owners()) {
    owner_begins[owner.owner] = std::exchange(owner_begin, owner_begin + owner.weights_bytes);
  }
  std::vector<uint64_t> offsets;
  uint64_t in_dram_bytes = 0;
  for (uint32_t i = 0; i < layout.partitions().size(); ++i) {
    const protocol::PartitionPlace& partition = layout.partitions()[i];
    if (weights_on_swap.empty()) {
      offsets.push_back(owner_begins.at(partition.owner) + partition.weights_offset_bytes);
    } else if (weights_on_swap[i]) {
      offsets.push_back(0);
    } else {
      offsets.push_back(in_dram_bytes);
      in_dram_bytes += RoundUp(layout.partition_bytes(i), kPageBytes);
    }
  }
  return offsets;
}

DurableContent::DurableContent(std::shared_ptr<const DurableJob> job)
    : job_(std::move(job)),
      map_(job_->layout, job_->block_elems, job_->weights_on_swap),
      weights_offsets_(WeightsOffsets(*job_->layout, job_->weights_on_swap)),
      weights_bytes_(RoundUp(WeightsInDram(*job_->layout, job_->weights_on_swap), kPageBytes)) {}

uint32_t DurableContent::entries() const {
  return map_.blocks() + static_cast<uint32_t>(job_->weights.size());
}

uint64_t DurableContent::PartBegin(uint32_t entry) const {
  return (entry - map_.blocks()) * job_->slot_bytes;
}

uint64_t DurableContent::PartBytes(uint32_t entry) const {
  return std::min(job_->slot_bytes, weights_bytes_ - PartBegin(entry));
}

std::optional<DurableContent::Expected> DurableContent::At(uint32_t entry) const {
  const bool is_part = entry >= map_.blocks();
  const uint32_t number = is_part ? entry - map_.blocks() : entry;
  if (!is_part && !job_->blocks[entry]) return std::nullopt;
  const DurableBytes& held = is_part ? job_->weights[number] : *job_->blocks[entry];
  return Expected{.slot = held.slot,
                  .bytes = is_part ? PartBytes(entry) : map_.bytes(entry),
                  .identity = {.job = job_->id,
                               .part = is_part ? BlockPart::kWeightsArena : BlockPart::kStates,
                               .block = number,
                               .written_step = held.written_step},
                  .checksum = held.checksum};
}

std::string DurableContent::Name(uint32_t entry) const {
  if (entry < map_.blocks()) return absl::StrCat("block ", entry);
  return absl::StrCat("part ", entry - map_.blocks(), " of the weights");
}

std::vector<std::string> DurableContent::Params(uint32_t entry) const {
  const protocol::Layout& layout = *job_->layout;
  std::set<uint32_t> params;
  if (entry < map_.blocks()) {
    for (const BlockRun& run : map_.Runs(entry)) params.insert(run.param);
  } else {
    const uint64_t begin = PartBegin(entry);
    const uint64_t end = begin + PartBytes(entry);
    const uint64_t width = protocol::SizeBytes(layout.spec().dtype);
    for (const protocol::BoxPlace& place : layout.boxes()) {
      if (map_.is_on_swap(place.partition)) continue;
      const uint64_t first = weights_offsets_[place.partition] + place.partition_elem * width;
      if (first < end && first + place.box.elems() * width > begin) params.insert(place.box.param);
    }
  }
  std::vector<std::string> names;
  for (const uint32_t param : params) names.push_back(layout.spec().params[param].name);
  return names;
}

}  // namespace forebay::daemon
