// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/update/block_store.h"

#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/os/check.h"

namespace forebay::daemon {

BlockStore::BlockStore(JobTasks& io, const protocol::Layout& layout, const BlockMap& map,
                       const MemoryPlan& plan, Options options)
    : io_(io),
      layout_(layout),
      map_(map),
      plan_(plan),
      path_table_(options.path_table),
      keeps_jobs_(options.keeps_jobs),
      blocks_(options.pool, {.blocks = map.blocks(),
                             .weights_slots = plan.early_weights_slots,
                             .may_reclaim = std::move(options.may_reclaim),
                             .position = std::move(options.position)}),
      ledger_(map.blocks(), options.swap_slots, options.path_table, io.memory(),
              plan.has_durable_steps() ? std::optional(plan.weights_parts) : std::nullopt),
      placement_(plan.placement),
      slots_(map, plan, placement_, ledger_, options.swap, options.path_table) {}

BlockPlace BlockStore::PlaceOf(uint32_t block) const {
  const BlockLocation& location = placement_.WhereBlock(block);
  if (location.tier == Tier::kDram) {
    return {.resident = true, .state_offset_bytes = location.state.offset_bytes};
  }
  return {.resident = false,
          .staging_slot = blocks_.at(block).staging_slot.value_or(0),
          .slot = ledger_.newest(block).slot};
}

WeightsPlace BlockStore::PlaceOfWeights(uint32_t partition, uint64_t partition_elem) const {
  const PartitionLocation location = placement_.WherePartition(partition);
  if (location.tier == Tier::kNvme) return {.in_block = true};
  const uint64_t width = protocol::SizeBytes(layout_.spec().dtype);
  return {.offset_bytes = location.weights_offset_bytes + partition_elem * width};
}

BlockIdentity BlockStore::IdentityOf(uint32_t block) const {
  return {.job = io_.job(), .block = block, .written_step = ledger_.newest(block).written_step};
}

uint64_t BlockStore::NewWeightsOffset(uint32_t slot, uint64_t block_elem) const {
  return plan_.early_weights_offset + (uint64_t{slot} * plan_.block_elems + block_elem) *
                                          protocol::SizeBytes(layout_.spec().dtype);
}

absl::Status BlockStore::DescribeBlock(const absl::Status& status, uint32_t block) const {
  if (status.ok()) return status;
  const std::pmr::vector<BlockRun> runs = map_.Runs(block);
  std::string names = runs.empty()
                          ? "no parameter"
                          : absl::StrCat("parameter ", layout_.spec().params[runs[0].param].name);
  if (!runs.empty() && runs.back().param != runs[0].param) absl::StrAppend(&names, " and others");
  return protocol::MakeError(
      protocol::IdOf(status),
      absl::StrCat("block ", block, " (", names, "): ", std::string(status.message())),
      protocol::HintOf(status));
}

WriteBlock BlockStore::BeginWrite(uint32_t block, const BlockIdentity& identity,
                                  uint64_t checksum) {
  const BlockLedger::Target target = slots_.AllocateTarget(block);
  BlockPlace place = PlaceOf(block);
  place.slot = target.slot;
  return {.place = place,
          .bytes = map_.bytes(block),
          .identity = identity,
          .checksum = checksum,
          .pause = target.pause};
}

RecordBlock BlockStore::RecordOf(uint32_t block, const BlockLedger::Version& version) const {
  return {.job = io_.job(),
          .block = block,
          .slot = version.slot,
          .checksum = version.checksum,
          .written_step = version.written_step,
          .weights_digests = version.weights_digests};
}

void BlockStore::PublishBlock(uint32_t block) {
  ledger_.PublishBlock(block);
  if (keeps_jobs_) io_.actions().Emit(RecordOf(block, ledger_.current(block)));
}

void BlockStore::SetResident(uint32_t block) {
  ledger_.SetResident(block);
  if (keeps_jobs_) io_.actions().Emit(RecordOf(block, ledger_.current(block)));
}

void BlockStore::SetWeightsChanged(uint32_t partition, uint64_t partition_elem, uint64_t elems) {
  const WeightsPlace place = PlaceOfWeights(partition, partition_elem);
  if (place.in_block || elems == 0) return;
  const uint64_t end = place.offset_bytes + elems * protocol::SizeBytes(layout_.spec().dtype);
  for (uint64_t part = place.offset_bytes / plan_.block_bytes; part * plan_.block_bytes < end;
       ++part) {
    ledger_.SetChanged(map_.blocks() + static_cast<uint32_t>(part));
  }
}

void BlockStore::OnStateSet(const ElementRun& elems, StateSet state) {
  if (!ledger_.is_durable()) return;
  if (elems.block != ElementRun::kNoBlock) ledger_.SetChanged(elems.block);
  if (state == StateSet::kMoment) return;
  SetWeightsChanged(elems.partition, elems.partition_elem, elems.elems);
}

void BlockStore::KeepStaged(const KeptUpdate& update) {
  for (uint32_t block = 0; block < map_.blocks(); ++block) {
    const auto& slot = update.blocks[block].staging_slot;
    if (slot) blocks_.Adopt(block, Transition::kRecovered, {.staging_slot = slot});
  }
}

void BlockStore::Adopt(const DurableJob& job) {
  const DurableJob* const durable = job.kept ? job.kept->durable.get() : &job;
  const DurableJob* const before = durable == nullptr ? nullptr : durable->before.get();
  const KeptUpdate* const update = job.kept ? job.kept->update.get() : nullptr;
  FOREBAY_CHECK(job.blocks.size() == map_.blocks());
  FOREBAY_CHECK(durable == nullptr || durable->weights.size() == plan_.weights_parts);
  const auto version = [](const DurableBytes& bytes) {
    return BlockLedger::Version{.slot = bytes.slot,
                                .checksum = bytes.checksum,
                                .written_step = bytes.written_step,
                                .weights_digests = bytes.weights_digests};
  };
  for (uint32_t block = 0; block < map_.blocks(); ++block) {
    BlockLedger::Recorded recorded;
    const auto set = [&](std::optional<BlockLedger::Version>& to,
                         const std::optional<DurableBytes>& bytes) {
      if (bytes) to = version(*bytes);
    };
    if (durable != nullptr) set(recorded.last, durable->blocks[block]);
    if (before != nullptr) set(recorded.before, before->blocks[block]);
    if (job.blocks[block]) recorded.current = version(*job.blocks[block]);
    if (is_resident(block)) {
      recorded.current = {.written_step = job.kept ? job.kept->written_steps[block]
                                                   : recorded.current.written_step};
    }
    recorded.is_changed = job.kept || !recorded.last;
    if (update != nullptr) {
      const KeptUpdate::Block& of = update->blocks[block];
      set(recorded.early, of.written);
      if (of.written) {
        blocks_.Adopt(block, Transition::kRecoveredWritten,
                      {.weights_slot = of.weights_slot, .overflows = of.overflows});
      }
    }
    ledger_.Adopt(block, std::move(recorded));
  }
  for (uint32_t part = 0; durable != nullptr && part < plan_.weights_parts; ++part) {
    BlockLedger::Recorded recorded{.last = version(durable->weights[part]),
                                   .is_changed = job.kept.has_value()};
    recorded.current.written_step = recorded.last->written_step;
    if (before != nullptr) recorded.before = version(before->weights[part]);
    ledger_.Adopt(map_.blocks() + part, std::move(recorded));
  }
}

void BlockStore::CheckInvariants(uint64_t committed_step) const {
  for (const uint32_t block : blocks_.staged()) FOREBAY_CHECK(!is_resident(block));
  for (uint32_t block = 0; block < map_.blocks(); ++block) {
    const BlockLedger::Version& current = ledger_.current(block);
    FOREBAY_CHECK(!is_resident(block) || !current.slot);
    FOREBAY_CHECK(current.written_step <= committed_step);
    FOREBAY_CHECK(ledger_.newest(block).written_step <= committed_step);
    FOREBAY_CHECK((placement_.moving() == block) == (blocks_.phase(block) == Phase::kMoving));
  }
  FOREBAY_CHECK(ledger_.slots().size() >= placement_.slots_needed());
  blocks_.CheckInvariants();
  ledger_.CheckInvariants();
}

}  // namespace forebay::daemon
