// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/update/update_tasks.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "protocol/os/check.h"

namespace forebay::daemon {

UpdateTasks::UpdateTasks(JobTasks& io, const protocol::Layout& layout, const MemoryPlan& plan,
                         BlockStore& store, StepTerms& terms, SumPages& sums)
    : io_(io),
      layout_(layout),
      plan_(plan),
      store_(store),
      terms_(terms),
      sums_(sums),
      tasks_(io.memory()),
      reads_(std::max(1U, store.path_table().paths()), 0) {}

UpdateTasks::Running UpdateTasks::End(TaskId task) {
  auto node = tasks_.extract(task);
  FOREBAY_CHECK(!node.empty());
  return std::move(node.mapped());
}

uint32_t UpdateTasks::PathOf(uint32_t block) const {
  const std::optional<nvme::Slot>& slot = store_.ledger().newest(block).slot;
  return slot ? slot->path : 0;  // the block holds zeros, which are not read
}

bool UpdateTasks::IsBusy(uint32_t path) const {
  return reads_[path] >= store_.path_table().reads_at_once(path, store_.map().full_block_bytes());
}

bool UpdateTasks::AreAllPathsBusy() const {
  for (uint32_t path = 0; path < store_.path_table().paths(); ++path) {
    if (!IsBusy(path)) return false;
  }
  return true;
}

void UpdateTasks::CountRead(uint32_t path, uint64_t bytes, const TaskDone& done) {
  store_.path_table().CountTransfer({.path = path,
                                     .direction = Direction::kRead,
                                     .bytes = bytes,
                                     .begin_ns = done.begin_ns,
                                     .end_ns = done.end_ns},
                                    done.status.ok());
}

void UpdateTasks::StartRead(uint32_t block, uint32_t staging_slot, Transition why) {
  store_.blocks().BeginRead(block, why, staging_slot);
  const uint32_t path = PathOf(block);
  const bool from_disk = store_.ledger().newest(block).slot.has_value();
  ++reads_[path];
  if (from_disk && IsForUpdate(store_.blocks().purpose(block))) store_.ledger().CountRead(path);
  const TaskId task = io_.Start(
      TaskKind::kReadBlock, 0,
      ReadBlock{
          .block = block, .place = store_.PlaceOf(block), .bytes = store_.map().bytes(block)});
  tasks_.emplace(task, Running{.block = block, .path = path, .from_disk = from_disk});
}

uint32_t UpdateTasks::EndRead(const TaskDone& done) {
  const Running read = End(done.task);
  const uint64_t bytes = store_.map().bytes(read.block);
  --reads_[read.path];
  if (read.from_disk) CountRead(read.path, bytes, done);
  const bool for_update = IsForUpdate(store_.blocks().purpose(read.block));
  if (done.status.ok() && for_update && !terms_.sets_masters()) counters_.read_bytes += bytes;
  return read.block;
}

void UpdateTasks::CountUpdate(uint32_t block) {
  if (terms_.sets_masters()) return;
  ++counters_.update_reads;
  if (store_.blocks().purpose(block) == Purpose::kReadAhead) ++counters_.update_reads_prefetched;
}

void UpdateTasks::StartUpdate(uint32_t block, Recorded recorded) {
  ++updating_;
  const BlockIdentity before = store_.IdentityOf(block);
  BlockIdentity after = before;
  after.written_step = terms_.order().step;
  if (reads_sums()) sums_.PinBlock(block);
  const std::optional<uint32_t>& staging_slot = store_.blocks().at(block).staging_slot;
  if (recorded == Recorded::kYes && staging_slot) {
    io_.actions().Emit(RecordStaged{.job = io_.job(),
                                    .block = block,
                                    .step = terms_.order().step,
                                    .staging_slot = *staging_slot});
  }
  const TaskId task = io_.Start(TaskKind::kUpdateBlock, 0,
                                UpdateBlock{.place = store_.PlaceOf(block),
                                            .block_elems = store_.map().elems(block),
                                            .bytes = store_.map().bytes(block),
                                            .identity_before = before,
                                            .identity_after = after,
                                            .checksum_before = store_.checksum(block),
                                            .is_recorded = recorded == Recorded::kYes,
                                            .pass = terms_.pass(),
                                            .sum_dtype = plan_.sum_dtype,
                                            .segments = terms_.SegmentsOf(block),
                                            .sum_page_bytes = plan_.sum_page_bytes,
                                            .sum_frames = sums_.FramesOf(block)});
  tasks_.emplace(task, Running{.block = block, .reads_sums = reads_sums()});
}

uint32_t UpdateTasks::EndUpdate(const TaskDone& done) {
  const Running update = End(done.task);
  --updating_;
  if (update.reads_sums) sums_.UnpinBlock(update.block);
  return update.block;
}

void UpdateTasks::StartWrite(uint32_t block, uint64_t checksum, WeightsDigests weights_digests) {
  const BlockIdentity identity{
      .job = io_.job(), .block = block, .written_step = terms_.order().step};
  WriteBlock write = store_.BeginWrite(block, identity, checksum);
  const uint32_t path = write.place.slot->path;
  const TaskId task = io_.Start(TaskKind::kWriteBlock, 0, write);
  tasks_.emplace(task, Running{.block = block,
                               .path = path,
                               .checksum = checksum,
                               .weights_digests = std::move(weights_digests)});
}

UpdateTasks::Written UpdateTasks::EndWrite(const TaskDone& done) {
  Running write = End(done.task);
  if (done.status.ok()) {  // BlockLedger counts successes and failures
    store_.path_table().AddTransfer({.path = write.path,
                                     .direction = Direction::kWrite,
                                     .bytes = store_.map().bytes(write.block),
                                     .begin_ns = done.begin_ns,
                                     .end_ns = done.end_ns});
  }
  return {.block = write.block,
          .checksum = write.checksum,
          .weights_digests = std::move(write.weights_digests)};
}

void UpdateTasks::StartInstall(uint32_t block) {
  ++updating_;
  InstallWeights action{.block = block, .copies = std::pmr::vector<BytesCopy>(io_.memory())};
  const uint32_t slot = *store_.blocks().at(block).weights_slot;
  const uint64_t width = protocol::SizeBytes(layout_.spec().dtype);
  for (const BlockRun& run : store_.map().Runs(block, io_.memory())) {
    action.copies.push_back(
        {.from_bytes = store_.NewWeightsOffset(slot, run.block_elem),
         .to_bytes = store_.PlaceOfWeights(run.partition, run.partition_elem).offset_bytes,
         .size_bytes = run.elems * width});
  }
  tasks_.emplace(io_.Start(TaskKind::kInstallWeights, 0, std::move(action)),
                 Running{.block = block});
}

uint32_t UpdateTasks::EndInstall(const TaskDone& done) {
  --updating_;
  return End(done.task).block;
}

}  // namespace forebay::daemon
