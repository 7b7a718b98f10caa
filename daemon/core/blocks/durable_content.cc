// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/blocks/durable_content.h"

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
  // The weights of owners are contiguous in the arena.
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

StatePart WeightsPart(uint64_t weights_bytes, uint64_t slot_bytes, uint32_t part) {
  const uint64_t begin = part * slot_bytes;
  return {.offset_bytes = begin, .bytes = std::min(slot_bytes, weights_bytes - begin)};
}

std::optional<DurableBytes> BytesOf(const BlockLedger::Version& version) {
  if (!version.slot) return std::nullopt;
  return DurableBytes{.slot = *version.slot,
                      .checksum = version.checksum,
                      .written_step = version.written_step,
                      .weights_digests = version.weights_digests};
}

BlockIdentity EntryIdentity(JobId job, uint32_t blocks, uint32_t entry, uint64_t written_step) {
  const bool is_part = entry >= blocks;
  return {.job = job,
          .part = is_part ? BlockPart::kWeightsArena : BlockPart::kStates,
          .block = is_part ? entry - blocks : entry,
          .written_step = written_step};
}

std::string EntryName(uint32_t blocks, uint32_t entry) {
  if (entry < blocks) return absl::StrCat("block ", entry);
  return absl::StrCat("part ", entry - blocks, " of the weights");
}

DurableContent::DurableContent(std::shared_ptr<const DurableJob> job)
    : job_(std::move(job)),
      map_(job_->layout, job_->block_elems, job_->weights_on_swap),
      weights_offsets_(WeightsOffsets(*job_->layout, job_->weights_on_swap)),
      weights_bytes_(RoundUp(WeightsInDram(*job_->layout, job_->weights_on_swap), kPageBytes)) {}

uint32_t DurableContent::entries() const {
  return map_.blocks() + static_cast<uint32_t>(job_->weights.size());
}

std::optional<DurableContent::Expected> DurableContent::At(uint32_t entry) const {
  if (!is_part(entry) && !job_->blocks[entry]) return std::nullopt;
  const DurableBytes& held =
      is_part(entry) ? job_->weights[entry - map_.blocks()] : *job_->blocks[entry];
  return Expected{.slot = held.slot,
                  .bytes = is_part(entry) ? PartOf(entry).bytes : map_.bytes(entry),
                  .identity = EntryIdentity(job_->id, map_.blocks(), entry, held.written_step),
                  .checksum = held.checksum};
}

std::vector<std::string> DurableContent::Params(uint32_t entry) const {
  const protocol::Layout& layout = *job_->layout;
  std::set<uint32_t> params;
  if (!is_part(entry)) {
    for (const BlockRun& run : map_.Runs(entry)) params.insert(run.param);
  } else {
    const StatePart part = PartOf(entry);
    const uint64_t begin = part.offset_bytes;
    const uint64_t end = begin + part.bytes;
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
