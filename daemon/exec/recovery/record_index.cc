// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/recovery/record_index.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "daemon/core/blocks/block_map.h"
#include "daemon/core/blocks/placement.h"
#include "daemon/exec/recovery/kept_record.h"
#include "nvme/volume.h"
#include "protocol/error.h"
#include "protocol/limits.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"
#include "protocol/wire.h"

namespace forebay::daemon {
namespace {

using protocol::ErrorId;
using protocol::MakeError;

// True if the fields of an entry name no slot or a slot that a volume can have. `path`: 1 + the path, or 0.
bool IsSlotOrNone(uint32_t path, uint64_t offset_bytes) {
  return path <= nvme::Volume::kPathsMax && offset_bytes % protocol::kPageBytes == 0 &&
         offset_bytes <= INT64_MAX;
}

StatePart PartOf(schema::Part::Reader from) {
  return {.offset_bytes = from.getOffsetBytes(), .bytes = from.getBytes()};
}

std::vector<std::byte> DataBytes(capnp::Data::Reader from) {
  const auto* const begin = reinterpret_cast<const std::byte*>(from.begin());
  return {begin, begin + from.size()};
}

void CopyList(auto from, auto& to) {
  to.clear();
  to.reserve(from.size());
  for (const auto one : from) to.push_back(one);
}

// Hyper-parameters that an older daemon does not write have their default value.
void ReadHyperParams(auto from, std::pmr::vector<protocol::HyperParams>& to) {
  using Values = std::array<double, sizeof(protocol::HyperParams) / sizeof(double)>;
  for (const auto group : from) {
    auto values = std::bit_cast<Values>(protocol::HyperParams());
    for (unsigned i = 0; i < std::min<size_t>(group.size(), values.size()); ++i) {
      values[i] = group[i];
    }
    to.push_back(std::bit_cast<protocol::HyperParams>(values));
  }
}

absl::StatusOr<ExtraStates> ReadStates(auto parts, int step_arena) {
  struct stat info = {};
  const uint64_t arena_bytes =
      ::fstat(step_arena, &info) == 0 ? static_cast<uint64_t>(info.st_size) : 0;
  std::vector<std::vector<std::byte>> read;
  for (const schema::Part::Reader from : parts) {
    const StatePart part = PartOf(from);
    if (part.bytes > 0 &&
        (part.bytes > arena_bytes || part.offset_bytes > arena_bytes - part.bytes)) {
      return CorruptRecord("its step arena is cut short");
    }
    std::vector<std::byte>& bytes = read.emplace_back(part.bytes);
    if (part.bytes == 0) continue;
    const ssize_t got =
        ::pread(step_arena, bytes.data(), part.bytes, static_cast<off_t>(part.offset_bytes));
    if (got != static_cast<ssize_t>(part.bytes))
      return CorruptRecord("its step arena cannot be read");
  }
  return std::make_shared<const std::vector<std::vector<std::byte>>>(std::move(read));
}

std::optional<DurableBytes> PlaceOf(schema::BlockEntry::Reader from, uint64_t slot_bytes) {
  if (from.getPath() == 0) return std::nullopt;
  DurableBytes bytes{.slot = {.path = from.getPath() - 1,
                              .offset_bytes = from.getOffsetBytes(),
                              .size_bytes = slot_bytes},
                     .checksum = from.getChecksum(),
                     .written_step = from.getWrittenStep()};
  const capnp::Data::Reader data = from.getDigests();
  if (data.size() > 0) {
    std::vector<uint64_t> digests(data.size() / sizeof(uint64_t));
    std::memcpy(digests.data(), data.begin(), digests.size() * sizeof(uint64_t));
    bytes.weights_digests = std::make_shared<const std::vector<uint64_t>>(std::move(digests));
  }
  return bytes;
}

// Checks that no place in the step arena or on swap has two contents, and that the step arena has the places.
absl::Status CheckPlaces(const KeptUpdate& update, const KeptMemory& kept) {
  std::set<uint32_t> weights;
  for (const KeptUpdate::Block& block : update.blocks) {
    if (!block.weights_slot) continue;
    if (*block.weights_slot < kept.early_weights_slots &&
        weights.insert(*block.weights_slot).second) {
      continue;
    }
    return CorruptRecord("the new weights of a block");
  }
  std::set<uint32_t> frames;
  std::set<nvme::Slot> slots;
  for (const KeptUpdate::Sums& sums : update.sums) {
    const bool has_frame =
        !sums.frame || (*sums.frame < kept.sum_frames && frames.insert(*sums.frame).second);
    if (!has_frame || (sums.slot && !slots.insert(*sums.slot).second)) {
      return CorruptRecord("the place of gradient sums");
    }
  }
  return absl::OkStatus();
}

}  // namespace

RecordIndex::RecordIndex(const RecordCounts& counts)
    : counts_(counts),
      updates_(counts.params, kNone),
      blocks_(counts.blocks),
      sums_(counts.sum_pages) {
  leases_.reserve(counts.leases);
}

uint64_t RecordIndex::CurrentOf(const Block& block) const {
  return block.written.offset == kNone || IsOpen(block.written) ? block.current
                                                                : block.written.offset;
}

bool RecordIndex::HasWritten(uint32_t block, uint64_t step) const {
  const OfStep& written = blocks_[block].written;
  return written.offset != kNone && written.step == step;
}

// ------------------------------------------------------------------------------------------- adding

absl::Status RecordIndex::Add(schema::RecordEntry::Reader entry, uint64_t offset) {
  using Kind = schema::RecordEntry::Which;
  switch (entry.which()) {
    case Kind::BLOCK:
      return Add(entry.getBlock(), offset);
    case Kind::INSTALLED:
      return AddInstalled(entry.getInstalled(), offset);
    case Kind::STAGED:
      return Add(entry.getStaged(), offset);
    case Kind::SUMS:
      return Add(entry.getSums(), offset);
    case Kind::ATTEMPT:
      attempt_ = {.offset = offset, .step = entry.getAttempt().getStep()};
      return absl::OkStatus();
    case Kind::PREPARED:
      return Add(entry.getPrepared(), offset);
    case Kind::DECISION:
      return Add(entry.getDecision(), offset);
    case Kind::TRUST:
      if (!counts_.has_trust || entry.getTrust().getTrust().size() != counts_.params) {
        return CorruptRecord("trust ratios");
      }
      trust_ = {.offset = offset, .step = entry.getTrust().getStep()};
      return absl::OkStatus();
    case Kind::STEP:
      return Add(entry.getStep(), offset);
    case Kind::UPDATES:
      return Add(entry.getUpdates(), offset);
    case Kind::LEASE:
      return Add(entry.getLease(), offset);
    case Kind::LEASE_END:
      EndLease(entry.getLeaseEnd().getLease());
      return absl::OkStatus();
    case Kind::ORDER:
      return Add(entry.getOrder(), offset);
  }
  return MakeError(ErrorId::kConfig,
                   absl::StrCat("the daemon before keeps a job in memory, in a record with entries "
                                "of kind ",
                                static_cast<int>(entry.which()), ", made by a newer forebayd"),
                   absl::StrCat("start the newer forebayd again", kGiveUpHint));
}

absl::Status RecordIndex::Add(schema::BlockEntry::Reader entry, uint64_t offset) {
  if (entry.getBlock() >= counts_.blocks ||
      entry.getDigests().size() > counts_.block_digests * sizeof(uint64_t) ||
      entry.getDigests().size() % sizeof(uint64_t) != 0 ||
      !IsSlotOrNone(entry.getPath(), entry.getOffsetBytes())) {
    return CorruptRecord("the place of a block");
  }
  Block& block = blocks_[entry.getBlock()];
  block.current = CurrentOf(block);
  block.written = {};
  block.installed = kNone;
  if (entry.getStep() > published_) {
    block.written = {.offset = offset, .step = entry.getStep()};
  } else {
    block.current = offset;
  }
  return absl::OkStatus();
}

absl::Status RecordIndex::AddInstalled(uint32_t block, uint64_t offset) {
  if (block >= counts_.blocks) return CorruptRecord("the weights of a block");
  if (IsOpen(blocks_[block].written)) blocks_[block].installed = offset;
  return absl::OkStatus();
}

absl::Status RecordIndex::Add(schema::StagedEntry::Reader entry, uint64_t offset) {
  if (entry.getBlock() >= counts_.blocks) return CorruptRecord("the staging slot of a block");
  blocks_[entry.getBlock()].staged = {.offset = offset, .step = entry.getStep()};
  return absl::OkStatus();
}

absl::Status RecordIndex::Add(schema::SumsEntry::Reader entry, uint64_t offset) {
  if (entry.getPage() >= counts_.sum_pages ||
      !IsSlotOrNone(entry.getPath(), entry.getOffsetBytes())) {
    return CorruptRecord("a page of gradient sums");
  }
  const bool is_needed = entry.getFrame() > 0 || entry.getPath() > 0;
  sums_[entry.getPage()] = {.offset = is_needed ? offset : kNone, .step = entry.getStep()};
  return absl::OkStatus();
}

// Checks the values that a prepared and a decided step have in common.
absl::Status RecordIndex::CheckValues(auto entry) const {
  if (entry.getSummary().size() > counts_.summary_bytes ||
      entry.getExtraStates().size() > counts_.ranks) {
    return CorruptRecord("the values of a step");
  }
  for (const schema::Part::Reader part : entry.getExtraStates()) {
    if (part.getBytes() > protocol::kExtraStateBytesMax) return CorruptRecord("extra_state");
  }
  return absl::OkStatus();
}

absl::Status RecordIndex::Add(schema::PreparedEntry::Reader entry, uint64_t offset) {
  RETURN_IF_ERROR(CheckValues(entry));
  if (entry.getStep() == 0) {
    prepared_ = {};
    return absl::OkStatus();
  }
  if (entry.getStep() != published_ + 1 ||
      entry.getHyperParams().size() > counts_.param_group_rows ||
      entry.getExtraStates().size() != counts_.ranks ||
      entry.getSummary().size() != counts_.summary_bytes || counts_.summary_bytes == 0) {
    return CorruptRecord("the step that is prepared");
  }
  prepared_ = {.offset = offset, .step = entry.getStep()};
  return absl::OkStatus();
}

absl::Status RecordIndex::Add(schema::DecisionEntry::Reader entry, uint64_t offset) {
  RETURN_IF_ERROR(CheckValues(entry));
  // The first decision has the values of the published step.
  const bool is_first = decision_ == kNone;
  const bool is_next = entry.getStep() == published_ + 1 && order_.step == entry.getStep();
  if ((!is_first && !is_next) || entry.getParamUpdates().size() != counts_.params ||
      entry.getTrace().size() > counts_.partitions) {
    return CorruptRecord("the decision of a step");
  }
  for (const uint32_t partition : entry.getTrace()) {
    if (partition >= counts_.partitions) return CorruptRecord("its trace");
  }
  decided_ = entry.getStep();
  decision_ = offset;
  return absl::OkStatus();
}

absl::Status RecordIndex::Add(schema::OrderEntry::Reader entry, uint64_t offset) {
  if (entry.getStep() != published_ + 1 || entry.getParams().size() != counts_.params ||
      entry.getHyperParams().size() > counts_.param_group_rows) {
    return CorruptRecord("the order of an update");
  }
  order_ = {.offset = offset, .step = entry.getStep()};
  return absl::OkStatus();
}

absl::Status RecordIndex::Add(schema::StepEntry::Reader entry, uint64_t offset) {
  if (decision_ == kNone || entry.getStep() != decided_) return CorruptRecord("its steps");
  published_ = decided_;
  values_ = decision_;
  step_ = offset;
  if (std::exchange(updates_set_, 0) > 0) std::ranges::fill(updates_, kNone);
  return absl::OkStatus();
}

absl::Status RecordIndex::Add(schema::UpdatesEntry::Reader entry, uint64_t offset) {
  if (is_decided() || entry.getParam() >= counts_.params)
    return CorruptRecord("updates of a parameter");
  updates_[entry.getParam()] = offset;
  ++updates_set_;
  return absl::OkStatus();
}

absl::Status RecordIndex::Add(schema::Lease::Reader entry, uint64_t offset) {
  if (leases_.size() >= counts_.leases) return CorruptRecord("too many leases");
  leases_.push_back({.lease = entry.getLease(), .offset = offset});
  return absl::OkStatus();
}

void RecordIndex::EndLease(uint64_t lease) {
  std::erase_if(leases_, [lease](const Lease& one) { return one.lease == lease; });
}

// The values of the published step come first, because they decide which entries of blocks are current.
void RecordIndex::Move(absl::FunctionRef<uint64_t(uint64_t)> move) {
  const auto move_if = [&](bool counts, uint64_t& offset) {
    if (counts) offset = move(offset);
  };
  values_ = move(values_);
  step_ = move(step_);
  for (uint64_t& offset : updates_) move_if(offset != kNone, offset);
  for (Block& block : blocks_) {
    block.current = CurrentOf(block);
    if (!IsOpen(block.written)) block.written = {};
    move_if(block.current != kNone, block.current);
  }
  move_if(attempt_.step > decided_, attempt_.offset);
  move_if(is_prepared(), prepared_.offset);
  move_if(IsOpen(order_), order_.offset);
  if (is_decided()) {
    decision_ = move(decision_);
  } else {
    decision_ = values_;
  }
  move_if(has_trust(), trust_.offset);
  for (Block& block : blocks_) {
    if (block.written.offset == kNone) block.installed = kNone;
    move_if(block.written.offset != kNone, block.written.offset);
    move_if(block.installed != kNone, block.installed);
    move_if(block.written.offset == kNone && IsOpen(block.staged), block.staged.offset);
  }
  for (OfStep& page : sums_) move_if(IsOpen(page), page.offset);
  for (Lease& lease : leases_) lease.offset = move(lease.offset);
}

// ------------------------------------------------------------------------------------------ reading

void RecordIndex::ReadBlocks(std::span<const std::byte> half, DurableJob& job,
                             KeptMemory& kept) const {
  for (uint32_t i = 0; i < counts_.blocks; ++i) {
    job.blocks[i].reset();
    if (const uint64_t offset = CurrentOf(blocks_[i]); offset != kNone) {
      EntryReader reader(half.subspan(offset));
      const auto entry = reader.Get().getBlock();
      kept.resident[i] = entry.getPath() == 0;
      kept.written_steps[i] = entry.getWrittenStep();
      job.blocks[i] = PlaceOf(entry, job.slot_bytes);
    }
    if (kept.resident[i]) kept.written_steps[i] = published_;
  }
}

std::vector<KeptUpdate::Sums> RecordIndex::ReadSums(uint64_t step,
                                                    std::span<const std::byte> half) const {
  std::vector<KeptUpdate::Sums> read;
  for (uint32_t page = 0; page < counts_.sum_pages; ++page) {
    if (sums_[page].offset == kNone || sums_[page].step != step) continue;
    EntryReader reader(half.subspan(sums_[page].offset));
    const auto from = reader.Get().getSums();
    KeptUpdate::Sums& of = read.emplace_back();
    of = {.page = page, .checksum = from.getChecksum(), .spills = from.getSpills()};
    if (from.getFrame() > 0) of.frame = from.getFrame() - 1;
    if (from.getPath() == 0) continue;
    of.slot = {.path = from.getPath() - 1,
               .offset_bytes = from.getOffsetBytes(),
               .size_bytes = from.getSizeBytes()};
  }
  return read;
}

std::shared_ptr<const KeptUpdate> RecordIndex::ReadUpdate(uint64_t slot_bytes,
                                                          std::span<const std::byte> half) const {
  EntryReader reader(half.subspan(order_.offset));
  const auto from = reader.Get().getOrder();
  auto update = std::make_shared<KeptUpdate>();
  update->order = {.step = decided_,
                   .grad_scale = from.getGradScale(),
                   .grad_min = from.getGradMin(),
                   .grad_max = from.getGradMax()};
  update->float_sums = PartOf(from.getFloatSums());
  ReadHyperParams(from.getHyperParams(), update->order.hyper_params);
  CopyList(from.getParams(), update->order.params);
  if (has_trust()) {
    EntryReader trust(half.subspan(trust_.offset));
    CopyList(trust.Get().getTrust().getTrust(), update->trust);
  }
  update->blocks.resize(counts_.blocks);
  for (uint32_t i = 0; i < counts_.blocks; ++i) {
    KeptUpdate::Block& of = update->blocks[i];
    if (HasWritten(i, decided_)) {
      EntryReader written(half.subspan(blocks_[i].written.offset));
      const auto entry = written.Get().getBlock();
      of.written = PlaceOf(entry, slot_bytes);
      of.overflows = entry.getOverflows();
      const bool has_weights = entry.getWeightsSlot() > 0 && blocks_[i].installed == kNone;
      if (has_weights) of.weights_slot = entry.getWeightsSlot() - 1;
    } else if (blocks_[i].staged.offset != kNone && blocks_[i].staged.step == decided_) {
      EntryReader staged(half.subspan(blocks_[i].staged.offset));
      of.staging_slot = staged.Get().getStaged().getStagingSlot();
    }
  }
  update->sums = ReadSums(decided_, half);
  return update;
}

absl::StatusOr<std::shared_ptr<const KeptUpdate>> RecordIndex::ReadPrepared(
    std::span<const std::byte> half, int step_arena) const {
  EntryReader reader(half.subspan(prepared_.offset));
  const auto from = reader.Get().getPrepared();
  auto update = std::make_shared<KeptUpdate>();
  update->order.step = prepared_.step;
  ReadHyperParams(from.getHyperParams(), update->order.hyper_params);
  update->float_sums = PartOf(from.getFloatSums());
  update->blocks.resize(counts_.blocks);
  update->sums = ReadSums(prepared_.step, half);
  KeptPrepared& of = update->prepared.emplace();
  of.attempt = from.getAttempt();
  of.request = {.step = prepared_.step,
                .param_groups = from.getParamGroups(),
                .extra_state_bytes = from.getExtraStateBytes(),
                .max_grad_norm = from.getMaxGradNorm(),
                .grad_scale = from.getGradScale(),
                .grad_min = from.getGradMin(),
                .grad_max = from.getGradMax()};
  ASSIGN_OR_RETURN(of.extra_states, ReadStates(from.getExtraStates(), step_arena));
  of.summary = DataBytes(from.getSummary());
  return update;
}

absl::Status RecordIndex::ReadValues(std::span<const std::byte> half, int step_arena,
                                     DurableJob& job, KeptMemory& kept) const {
  job.step = decided_;
  EntryReader values(half.subspan(values_));
  CopyList(values.Get().getDecision().getParamUpdates(), job.param_updates);
  for (uint32_t param = 0; updates_set_ > 0 && param < counts_.params; ++param) {
    if (updates_[param] == kNone) continue;
    EntryReader set(half.subspan(updates_[param]));
    job.param_updates[param] = set.Get().getUpdates().getUpdates();
  }
  EntryReader decision(half.subspan(decision_));
  const auto from = decision.Get().getDecision();
  CopyList(from.getTrace(), job.trace);
  ASSIGN_OR_RETURN(job.extra_states, ReadStates(from.getExtraStates(), step_arena));
  kept.norm = from.getNorm();
  kept.clipped = from.getClipped();
  kept.overflowed = from.getOverflowed();
  kept.summary = DataBytes(from.getSummary());
  if (!is_decided()) {
    EntryReader step(half.subspan(step_));
    kept.overflowed = step.Get().getStep().getOverflowed();
  }
  kept.attempt = 0;
  if (attempt_.step == decided_ + 1) {
    EntryReader attempt(half.subspan(attempt_.offset));
    kept.attempt = attempt.Get().getAttempt().getAttempt();
  }
  return absl::OkStatus();
}

absl::StatusOr<DurableJob> RecordIndex::Read(DurableJob job, std::span<const std::byte> half,
                                             int step_arena) const {
  KeptMemory kept = *std::exchange(job.kept, std::nullopt);
  std::vector<nvme::Slot> slots = std::exchange(kept.spare_slots, {});
  const BlockMap map(job.layout, job.block_elems, job.weights_on_swap);
  const auto state_bytes = [&] {
    return Placement(*job.layout, map, kept.resident, {}).state_bytes();
  };
  kept.dram_bytes -= state_bytes();
  RETURN_IF_ERROR(ReadValues(half, step_arena, job, kept));
  ReadBlocks(half, job, kept);
  if (is_decided()) kept.update = ReadUpdate(job.slot_bytes, half);
  if (is_prepared()) {
    ASSIGN_OR_RETURN(kept.update, ReadPrepared(half, step_arena));
    kept.attempt = kept.update->prepared->attempt;
  }
  if (kept.update != nullptr) {
    RETURN_IF_ERROR(CheckPlaces(*kept.update, kept));
    // If the session accumulates, the recorded dram_bytes count the float32 sums already.
    if (!kept.session.accumulate) kept.dram_bytes += kept.update->float_sums.bytes;
    // Slots that the node granted because a path failed are not in the recorded list.
    for (const KeptUpdate::Sums& sums : kept.update->sums) {
      const bool is_known =
          !sums.slot || std::ranges::find(kept.sum_slots, *sums.slot) != kept.sum_slots.end();
      if (!is_known) kept.sum_slots.push_back(*sums.slot);
    }
  }
  kept.leases.clear();
  for (const Lease& lease : leases_) {
    EntryReader reader(half.subspan(lease.offset));
    const auto from = reader.Get().getLease();
    kept.leases.push_back({.lease = from.getLease(),
                           .rank = from.getRank(),
                           .partition = from.getPartition(),
                           .offset_bytes = from.getOffsetBytes()});
  }
  kept.dram_bytes += state_bytes();
  job.kept = std::move(kept);
  // Slots that the job had when it was recorded and does not have now. Other jobs may have some of them now.
  job.RemoveOwn(slots);
  job.kept->spare_slots = std::move(slots);
  return job;
}

}  // namespace forebay::daemon
