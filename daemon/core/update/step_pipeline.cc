// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/update/step_pipeline.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_adam/lamb.h"
#include "cpu_adam/step_scalars.h"
#include "protocol/error.h"
#include "protocol/os/check.h"

namespace forebay::daemon {

namespace {

// True if a block is in its staging slot, or on the way to it, for an update.
bool IsForUpdate(Purpose purpose) {
  return purpose == Purpose::kReadAhead || purpose == Purpose::kEarly || purpose == Purpose::kStep;
}

// StartReads() stops once this many blocks have found no frames for their gradient sums.
constexpr uint32_t kBlocksLookedAt = 16;

}  // namespace

StepPipeline::StepPipeline(JobTasks& io, std::shared_ptr<const protocol::Layout> layout,
                           const MemoryPlan& plan, const std::vector<nvme::Slot>& swap_slots,
                           const std::vector<nvme::Slot>& sum_slots, nvme::SlotMap& swap,
                           PathTable& path_table, StagingPool& pool, const LeaseTable& leases,
                           uint32_t workers, bool keeps_jobs)
    : io_(io),
      layout_(std::move(layout)),
      map_(layout_, plan.block_elems, plan.weights_on_swap),
      plan_(plan),
      leases_(leases),
      workers_(workers),
      keeps_jobs_(keeps_jobs),
      blocks_(pool, {.blocks = map_.blocks(),
                     .weights_slots = plan.early_weights_slots,
                     .may_reclaim = [this](uint32_t block) { return !running_ || IsLeased(block); },
                     .position = [this](uint32_t block) { return position_[block]; }}),
      ledger_(map_.blocks(), swap_slots, path_table, io.memory(),
              plan.has_durable_steps() ? std::optional(plan.weights_parts) : std::nullopt),
      placement_(plan.placement),
      swap_(swap),
      path_table_(path_table),
      param_updates_(layout_->params().size(), 0),
      tasks_(io.memory()),
      reads_(std::max(1U, path_table.paths()), 0),
      to_install_(io.memory()),
      gathered_(*layout_, map_, blocks_, position_, io.memory()),
      sums_(io, *layout_, map_, plan, sum_slots, swap, path_table),
      early_prefetch_left_(map_.blocks()),
      prefetch_next_(0),
      scalars_(io.memory()),
      norms_(io.memory()),
      resident_(io.memory()),
      swapped_(io.memory()),
      partition_blocks_left_(layout_->partitions().size(), 0) {
  for (uint32_t block = 0; block < map_.blocks(); ++block) {
    block_partitions_.push_back(map_.Partitions(block));
    in_order_.push_back(block);
  }
  position_.resize(map_.blocks());
  Sort();
}

void StepPipeline::FollowTrace(const std::vector<uint32_t>& trace) {
  FOREBAY_CHECK(!running_);
  if (trace == trace_) return;
  trace_ = trace;
  Sort();
  prefetch_next_ = 0;
}

void StepPipeline::Sort() {
  const auto partitions = static_cast<uint32_t>(layout_->partitions().size());
  std::pmr::vector<uint32_t> first_use(partitions, io_.memory());
  for (uint32_t partition = 0; partition < partitions; ++partition) {
    first_use[partition] = static_cast<uint32_t>(trace_.size()) + partition;
  }
  for (uint32_t i = 0; i < trace_.size(); ++i) first_use[trace_[i]] = i;
  std::pmr::vector<std::pair<uint32_t, uint32_t>> keys(io_.memory());  // first use, block
  for (uint32_t block = 0; block < map_.blocks(); ++block) {
    uint32_t first = UINT32_MAX;
    for (const uint32_t partition : block_partitions_[block]) {
      first = std::min(first, first_use[partition]);
    }
    keys.emplace_back(first, block);
  }
  std::ranges::sort(keys);
  for (uint32_t i = 0; i < keys.size(); ++i) {
    in_order_[i] = keys[i].second;
    position_[keys[i].second] = i;
  }
  gathered_.Sort();
}

BlockPlace StepPipeline::PlaceOf(uint32_t block) const {
  const BlockLocation& location = placement_.WhereBlock(block);
  if (location.tier == Tier::kDram) {
    return {.resident = true, .state_offset_bytes = location.state.offset_bytes};
  }
  return {.resident = false,
          .staging_slot = blocks_.at(block).staging_slot.value_or(0),
          .slot = ledger_.newest(block).slot};
}

WeightsPlace StepPipeline::PlaceOfWeights(uint32_t partition, uint64_t partition_elem) const {
  const PartitionLocation location = placement_.WherePartition(partition);
  if (location.tier == Tier::kNvme) return {.in_block = true};
  const uint64_t width = protocol::SizeBytes(layout_->spec().dtype);
  return {.offset_bytes = location.weights_offset_bytes + partition_elem * width};
}

BlockIdentity StepPipeline::IdentityOf(uint32_t block) const {
  return {.job = io_.job(), .block = block, .written_step = ledger_.newest(block).written_step};
}

StepPipeline::Running StepPipeline::FinishTask(TaskId task) {
  const auto it = tasks_.find(task);
  FOREBAY_CHECK(it != tasks_.end());
  const Running running = it->second;
  tasks_.erase(it);
  return running;
}

uint32_t StepPipeline::PathOf(uint32_t block) const {
  const std::optional<nvme::Slot>& slot = ledger_.newest(block).slot;
  return slot ? slot->path : 0;  // the block holds zeros, which are not read
}

bool StepPipeline::AreAllPathsBusy() const {
  for (uint32_t path = 0; path < path_table_.paths(); ++path) {
    if (!IsPathBusy(path)) return false;
  }
  return true;
}

void StepPipeline::StartRead(uint32_t block, uint32_t slot, Transition why) {
  blocks_.BeginRead(block, why, slot);
  const uint32_t path = PathOf(block);
  const bool from_disk = ledger_.newest(block).slot.has_value();
  ++reads_[path];
  if (from_disk && IsForUpdate(blocks_.purpose(block))) ledger_.CountRead(path);
  const TaskId task =
      io_.Start(TaskKind::kReadBlock, 0,
                ReadBlock{.block = block, .place = PlaceOf(block), .bytes = map_.bytes(block)});
  tasks_.emplace(task, Running{.block = block, .path = path, .from_disk = from_disk});
}

void StepPipeline::Prefetch() {
  if (running_ || abandoned_) return;
  if (is_early_) {
    PrefetchEarly();
    return;
  }
  prefetch_next_ = std::min(prefetch_next_, blocks_.DrainFirstDropped());
  for (; prefetch_next_ < map_.blocks(); ++prefetch_next_) {
    const uint32_t block = in_order_[prefetch_next_];
    if (MayReadAhead(block) && !ReadAhead(block)) return;
  }
}

bool StepPipeline::MayReadAhead(uint32_t block) const {
  const BlockLocation& location = placement_.WhereBlock(block);
  return map_.has_states(block) && location.tier != Tier::kDram && !location.comes_to_dram() &&
         blocks_.phase(block) == Phase::kIdle && !prefetch_failed_.contains(block);
}

// Backward fetches weights through the same staging slots, for which blocks that were read ahead would be dropped.
std::optional<uint32_t> StepPipeline::AllocateForReadAhead() {
  return blocks_.AllocateFree(plan_.has_weights_on_swap() ? kStagingSlotsForWeights : 0);
}

// Begins to read a block ahead. False if the block's path is busy or no staging slot is free.
bool StepPipeline::ReadAhead(uint32_t block) {
  if (IsPathBusy(PathOf(block))) return false;
  const std::optional<uint32_t> slot = AllocateForReadAhead();
  if (!slot) return false;
  StartRead(block, *slot, Transition::kReadAhead);
  return true;
}

void StepPipeline::FailPrefetch(uint32_t block, const absl::Status& status) {
  prefetch_failed_.insert(block);
  prefetch_error_.Update(DescribeBlock(status, block));
}

void StepPipeline::Begin(StepOrder order, bool is_as_announced) {
  Prepare(std::move(order), needs_norms() ? UpdatePass::kNorms : UpdatePass::kWhole);
  is_recorded_ = keeps_jobs_;
  AdoptEarly(is_as_announced);
  Start();
}

void StepPipeline::Resume(const KeptUpdate& update) {
  trust_ = update.trust;
  const bool has_norms = !needs_norms() || !trust_.empty();
  Prepare(update.order.CopyIn(io_.memory()), has_norms ? UpdatePass::kWhole : UpdatePass::kNorms);
  is_recorded_ = true;
  AdoptKept(update);
  Start();
}

bool StepPipeline::BeginMasters() {
  const protocol::LayoutSpec& spec = layout_->spec();
  const auto planes = protocol::StatePlanes(spec.optimizer, spec.format, spec.dtype);
  if (planes.empty() || planes[0].name != "master") return false;
  StepOrder order;
  for (const protocol::ParamPlace& param : layout_->params()) {
    order.params.push_back(param.trainable);
  }
  Prepare(std::move(order), UpdatePass::kMasters);
  is_recorded_ = false;
  AdoptEarly(/*is_as_announced=*/false);
  Start();
  return true;
}

void StepPipeline::Prepare(StepOrder order, UpdatePass pass) {
  FOREBAY_CHECK(!running_ && !abandoned_ && !is_moving());
  running_ = true;
  pass_ = pass;
  order_ = std::move(order);
  partition_has_gradient_.assign(layout_->partitions().size(), false);
  for (const protocol::BoxPlace& place : layout_->boxes()) {
    if (order_.params[place.box.param]) partition_has_gradient_[place.partition] = true;
  }
  overflowed_masters_ = 0;
  bytes_at_decision_ = counters_.bytes();
}

void StepPipeline::Start() {
  ForgetPrefetchErrors();
  norms_.clear();
  scalars_.clear();
  BeginPass(pass_);
}

void StepPipeline::BeginPass(UpdatePass pass) {
  pass_ = pass;
  resident_.clear();
  swapped_.clear();
  blocks_left_ = 0;
  std::fill(partition_blocks_left_.begin(), partition_blocks_left_.end(), 0);
  std::pmr::vector<uint32_t> from_sums(io_.memory());
  for (const uint32_t block : in_order_) {
    const bool needed = IsNeeded(block);
    if (needed) {
      for (const uint32_t partition : block_partitions_[block]) {
        ++partition_blocks_left_[partition];
      }
    }
    // The next daemon would repeat an early update that is not written.
    const bool needs_sums =
        !blocks_.is_early(block) || (is_recorded_ && blocks_.phase(block) != Phase::kWritten);
    if (needed && needs_sums) from_sums.push_back(block);
    FollowDecision(block, needed);
    if (!needed) continue;
    ++blocks_left_;
    if (blocks_.is_early(block)) {
      AcceptEarly(block);
    } else if (is_resident(block)) {
      resident_.push_back(block);
    } else {
      swapped_.insert(position_[block]);
    }
  }
  if (pass == UpdatePass::kWhole) {
    sums_.BeginUpdate(from_sums, is_recorded_ ? order_.step : 0);
  }
}

// Cancels the read of a block that the decided step does not update, or drops the block. Continues a cancelled read of a block
// that the step updates.
void StepPipeline::FollowDecision(uint32_t block, bool is_updated) {
  if (!IsForUpdate(blocks_.purpose(block))) return;
  const Phase phase = blocks_.phase(block);
  if (phase == Phase::kReading && !is_updated) blocks_.Apply(block, Transition::kReadCancelled);
  if (phase == Phase::kCancelled && is_updated) blocks_.Apply(block, Transition::kReadWanted);
  if (phase == Phase::kReady && !is_updated) blocks_.Apply(block, Transition::kNotNeeded);
}

// Sums the norms of each parameter over its segments, in the order of blocks.
void StepPipeline::EndNormsPass() {
  std::pmr::vector<SegmentNorms> sums(layout_->params().size(), io_.memory());
  for (const auto& [block, norms] : norms_) {
    const std::pmr::vector<UpdateSegment> segments = Segments(block);
    FOREBAY_CHECK(norms.size() == segments.size());
    for (size_t i = 0; i < segments.size(); ++i) {
      SegmentNorms& sum = sums[segments[i].param];
      sum.weight_squares += norms[i].weight_squares;
      sum.update_squares += norms[i].update_squares;
    }
  }
  norms_.clear();
  trust_.clear();
  for (const SegmentNorms& sum : sums) {
    trust_.push_back(cpu_adam::TrustRatio(sum.weight_squares, sum.update_squares));
  }
  if (is_recorded_) {
    io_.actions().Emit(RecordTrust{.job = io_.job(),
                                   .step = order_.step,
                                   .trust = {trust_.begin(), trust_.end(), io_.memory()}});
  }
  BeginPass(UpdatePass::kWhole);
}

bool StepPipeline::UpdatesHaveOtherWork() const {
  if (!resident_.empty()) return true;
  return std::ranges::any_of(blocks_.staged(), [this](uint32_t block) {
    return swapped_.contains(position_[block]) && !IsLeased(block);
  });
}

// Reads the gradient sums of blocks that are staged already, so that their updates need not wait.
void StepPipeline::PrepareStaged() {
  if (!ReadsSums() || !sums_.is_paged()) return;
  for (const uint32_t block : blocks_.staged()) {
    if (swapped_.contains(position_[block]) && !IsLeased(block)) (void)sums_.Prepare(block);
  }
}

void StepPipeline::StartReads() {
  // A failed write is being repeated. Reading more blocks would only take staging slots from other jobs.
  if (is_rewriting() || AreAllPathsBusy()) return;
  uint32_t without_sums = 0;
  for (const uint32_t position : swapped_) {
    const uint32_t block = in_order_[position];
    if (blocks_.phase(block) != Phase::kIdle || IsLeased(block) || IsPathBusy(PathOf(block))) {
      continue;
    }
    if (ReadsSums() && sums_.Prepare(block) == SumPages::Room::kNone) {
      if (++without_sums == kBlocksLookedAt) return;
      continue;
    }
    const std::optional<uint32_t> slot = blocks_.AllocateUrgent();
    if (!slot) return;
    StartRead(block, *slot,
              UpdatesHaveOtherWork() ? Transition::kReadAhead : Transition::kReadForStep);
  }
}

// Returns the number of updates that may run or wait for a worker. The number is small while the step still has swapped blocks,
// because these are updated first.
uint32_t StepPipeline::UpdatesMax() const {
  const bool only_resident = swapped_.empty() && blocks_.staged().empty();
  return only_resident ? kUpdatesPerWorker * workers_ : workers_;
}

bool StepPipeline::IsLeased(uint32_t block) const {
  const bool leaves_weights = pass_ != UpdatePass::kWhole;
  if (leases_.count_of_sessions() == 0 || leaves_weights) return false;
  const std::vector<uint32_t>& partitions = block_partitions_[block];
  return std::any_of(partitions.begin(), partitions.end(), [this](uint32_t partition) {
    return partition_has_gradient_[partition] && leases_.IsLeasedBySession(partition);
  });
}

std::optional<uint32_t> StepPipeline::FirstReady() const {
  std::optional<uint32_t> first;
  for (const uint32_t block : blocks_.staged()) {
    if (blocks_.phase(block) != Phase::kReady || IsLeased(block)) continue;
    if (ReadsSums() && !sums_.IsThere(block)) continue;
    if (!first || position_[block] < position_[*first]) first = block;
  }
  return first;
}

void StepPipeline::Pump() {
  if (!running_ || abandoned_) return;
  if (pass_ == UpdatePass::kNorms && blocks_left_ == 0) EndNormsPass();
  PrepareStaged();
  StartReads();
  while (updating_ < UpdatesMax()) {
    const std::optional<uint32_t> ready = FirstReady();
    const bool installs =
        !to_install_.empty() && (!ready || *to_install_.begin() < position_[*ready]);
    if (installs) {
      StartInstall(in_order_[*to_install_.begin()]);
      continue;
    }
    if (ready) {
      BeginUpdate(*ready);
      continue;
    }
    const auto next = std::find_if(resident_.begin(), resident_.end(),
                                   [this](uint32_t block) { return MayUpdateInPlace(block); });
    if (next == resident_.end()) return;
    const uint32_t block = *next;
    resident_.erase(next);
    BeginUpdate(block);
  }
}

bool StepPipeline::MayUpdateInPlace(uint32_t block) {
  return !IsLeased(block) && (!ReadsSums() || sums_.Prepare(block) == SumPages::Room::kThere);
}

void StepPipeline::PumpSums(bool norm_waits) { sums_.Pump(HasEarlyWork() && !norm_waits); }

const cpu_adam::StepScalars& StepPipeline::ScalarsOf(uint32_t param_group, uint64_t t) {
  const auto [entry, is_new] = scalars_.try_emplace({param_group, t});
  if (is_new) {
    entry->second = cpu_adam::MakeStepScalars(
        layout_->spec().optimizer, order_.hyper_params[param_group], t, order_.grad_scale);
    if (order_.grad_min < order_.grad_max) {
      cpu_adam::SetGradientBounds(order_.grad_min, order_.grad_max, entry->second);
    }
  }
  return entry->second;
}

bool StepPipeline::IsNeeded(uint32_t block) const {
  if (!map_.has_states(block)) return false;
  const std::pmr::vector<BlockRun> runs = map_.Runs(block, io_.memory());
  return std::any_of(runs.begin(), runs.end(),
                     [this](const BlockRun& run) { return order_.params[run.param]; });
}

std::pmr::vector<UpdateSegment> StepPipeline::Segments(uint32_t block) {
  const uint64_t sum_width = protocol::SizeBytes(plan_.sum_dtype);
  std::pmr::vector<UpdateSegment> segments(io_.memory());
  for (const BlockRun& run : map_.Runs(block, io_.memory())) {
    if (!order_.params[run.param]) continue;
    const protocol::ParamPlace& param = layout_->params()[run.param];
    WeightsPlace weights = PlaceOfWeights(run.partition, run.partition_elem);
    if (const std::optional<uint32_t>& slot = blocks_.at(block).weights_slot) {
      weights.new_offset_bytes = NewWeightsOffset(*slot, run.block_elem);
    }
    segments.push_back(
        {.weights = weights,
         .accumulator_offset_bytes =
             plan_.accumulator_offsets[run.partition] + run.partition_elem * sum_width,
         .block_elem = run.block_elem,
         .elems = run.elems,
         .param_elem = run.param_elem,
         .param = run.param,
         .trust = needs_norms() && pass_ == UpdatePass::kWhole ? trust_[run.param] : 1.0F});
    if (pass_ == UpdatePass::kMasters) continue;
    const uint64_t t = param_updates_[run.param] + 1;
    segments.back().scalars = ScalarsOf(param.param_group, t);
    cpu_adam::SetRoundingKey({.seed = layout_->spec().seed, .parameter = param.name_hash, .t = t},
                             segments.back().scalars);
  }
  return segments;
}

// Starts the update of a block of the decided step.
void StepPipeline::BeginUpdate(uint32_t block) {
  if (is_resident(block)) {
    blocks_.Apply(block, Transition::kUpdateInPlace);
  } else {
    CountUpdate(block);
    blocks_.Apply(block, Transition::kUpdate);
  }
  StartUpdate(block);
}

// Counts the read of a block that is about to be updated in its staging slot.
void StepPipeline::CountUpdate(uint32_t block) {
  swapped_.erase(position_[block]);
  if (sets_masters()) return;
  ++counters_.update_reads;
  if (blocks_.purpose(block) == Purpose::kReadAhead) ++counters_.update_reads_prefetched;
}

void StepPipeline::StartUpdate(uint32_t block) {
  ++updating_;
  const BlockIdentity before = IdentityOf(block);
  BlockIdentity after = before;
  after.written_step = order_.step;
  if (ReadsSums()) sums_.PinBlock(block);
  const bool is_recorded = running_ && is_recorded_ && pass_ == UpdatePass::kWhole;
  if (is_recorded && !is_resident(block)) {
    io_.actions().Emit(RecordStaged{.job = io_.job(),
                                    .block = block,
                                    .step = order_.step,
                                    .staging_slot = *blocks_.at(block).staging_slot});
  }
  const TaskId task = io_.Start(TaskKind::kUpdateBlock, 0,
                                UpdateBlock{.place = PlaceOf(block),
                                            .block_elems = map_.elems(block),
                                            .bytes = map_.bytes(block),
                                            .identity_before = before,
                                            .identity_after = after,
                                            .checksum_before = checksum(block),
                                            .is_recorded = is_recorded,
                                            .pass = pass_,
                                            .sum_dtype = plan_.sum_dtype,
                                            .segments = Segments(block),
                                            .sum_page_bytes = plan_.sum_page_bytes,
                                            .sum_frames = sums_.FramesOf(block)});
  tasks_.emplace(task, Running{.block = block, .reads_sums = ReadsSums()});
}

StepPipeline::ReadOutcome StepPipeline::OnRead(const TaskDone& done) {
  const Running read = FinishTask(done.task);
  --reads_[read.path];
  if (read.from_disk) CountRead(read.path, map_.bytes(read.block), done);
  const bool for_update = IsForUpdate(blocks_.purpose(read.block));
  const bool cancelled = blocks_.phase(read.block) == Phase::kCancelled;
  if (done.status.ok() && for_update && !sets_masters()) {
    counters_.read_bytes += map_.bytes(read.block);
  }
  if (cancelled) {
    blocks_.Apply(read.block, Transition::kReadDiscarded);
  } else if (!done.status.ok()) {
    blocks_.Apply(read.block, Transition::kReadFailed);
  } else {
    blocks_.Apply(read.block, abandoned_ ? Transition::kAbandoned : Transition::kReadEnded);
  }
  if (!done.status.ok() && for_update && !running_) FailPrefetch(read.block, done.status);
  return {.block = read.block,
          .status = DescribeBlock(done.status, read.block),
          .fatal = running_ && !cancelled};
}

absl::Status StepPipeline::OnUpdated(const TaskDone& done) {
  const Running update = FinishTask(done.task);
  const uint32_t block = update.block;
  --updating_;
  if (update.reads_sums) sums_.UnpinBlock(block);
  gathered_.OnUpdated(block);
  if (blocks_.phase(block) == Phase::kDropped) {
    blocks_.Apply(block, Transition::kDropEnded);
    return absl::OkStatus();
  }
  if (!done.status.ok() || abandoned_) return OnUpdateFailed(block, done.status);
  if (pass_ == UpdatePass::kNorms) {
    norms_[block] = done.norms;
    --blocks_left_;
    blocks_.Apply(block, Transition::kNormsSummed);
    return absl::OkStatus();
  }
  blocks_.SetOverflows(block, done.count);
  if (running_) overflowed_masters_ += done.count;
  if (blocks_.purpose(block) == Purpose::kStep) {
    if (update.reads_sums) sums_.EndUpdateOf(block);
    if (!map_.has_weights(block)) FinishPartitionsOf(block);
    if (is_resident(block)) {
      ledger_.SetInPlace(block, order_.step);
      --blocks_left_;
      blocks_.Apply(block, Transition::kUpdatedInPlace);
      return absl::OkStatus();
    }
  }
  blocks_.Apply(block, Transition::kWrite);
  StartWrite(block, done.checksum, done.weights_digests);
  return absl::OkStatus();
}

// Handles an update that has failed, or that has ended after the job failed.
absl::Status StepPipeline::OnUpdateFailed(uint32_t block, const absl::Status& status) {
  if (running_) {
    blocks_.Apply(block, Transition::kUpdateFailed);
    return DescribeBlock(status, block);
  }
  DropEarly({&block, 1}, status.ok() ? Transition::kJobFailed : Transition::kTaskFailed);
  blocks_.Apply(block, Transition::kDropEnded);
  if (!status.ok()) FailPrefetch(block, status);
  return absl::OkStatus();
}

WriteBlock StepPipeline::BeginWrite(uint32_t block, const BlockIdentity& identity,
                                    uint64_t checksum) {
  const BlockLedger::Target target = AllocateTarget(block);
  BlockPlace place = PlaceOf(block);
  place.slot = target.slot;
  return {.place = place,
          .bytes = map_.bytes(block),
          .identity = identity,
          .checksum = checksum,
          .pause = target.pause};
}

void StepPipeline::CountRead(uint32_t path, uint64_t bytes, const TaskDone& done) {
  path_table_.CountTransfer({.path = path,
                             .direction = Direction::kRead,
                             .bytes = bytes,
                             .begin_ns = done.begin_ns,
                             .end_ns = done.end_ns},
                            done.status.ok());
}

void StepPipeline::FinishPartitionsOf(uint32_t block) {
  for (const uint32_t partition : block_partitions_[block]) --partition_blocks_left_[partition];
}

void StepPipeline::StartWrite(uint32_t block, uint64_t checksum, WeightsDigests weights_digests) {
  const BlockIdentity identity{.job = io_.job(), .block = block, .written_step = order_.step};
  WriteBlock write = BeginWrite(block, identity, checksum);
  const uint32_t path = write.place.slot->path;
  const TaskId task = io_.Start(TaskKind::kWriteBlock, 0, write);
  tasks_.emplace(task, Running{.block = block,
                               .path = path,
                               .checksum = checksum,
                               .weights_digests = std::move(weights_digests)});
}

absl::Status StepPipeline::OnWritten(const TaskDone& done) {
  const Running write = FinishTask(done.task);
  const uint32_t block = write.block;
  if (done.status.ok()) {  // the ledger counts whether it has succeeded
    path_table_.AddTransfer({.path = write.path,
                             .direction = Direction::kWrite,
                             .bytes = map_.bytes(block),
                             .begin_ns = done.begin_ns,
                             .end_ns = done.end_ns});
  }
  if (!running_ && blocks_.phase(block) == Phase::kWriting && (!done.status.ok() || abandoned_)) {
    DropEarly({&block, 1}, done.status.ok() ? Transition::kJobFailed : Transition::kTaskFailed);
  }
  if (blocks_.phase(block) == Phase::kDropped) {
    EndDroppedWrite(block, done.status);
    return absl::OkStatus();
  }
  if (!done.status.ok()) return OnWriteFailed(write, done.status);
  if (!sets_masters()) counters_.written_bytes += map_.bytes(block);
  const Purpose purpose = blocks_.purpose(block);
  if (purpose == Purpose::kEarly) {
    ledger_.EndEarlyWrite(block, write.checksum, order_.step, write.weights_digests);
    sums_.SetUpdatedEarly(block, true);
    blocks_.Apply(block, Transition::kWritten);
    return absl::OkStatus();
  }
  ledger_.EndWrite(block, write.checksum, order_.step, write.weights_digests);
  RecordWritten(block);
  if (purpose == Purpose::kAccepted && is_recorded_) sums_.EndUpdateOf(block);
  blocks_.Apply(block, Transition::kWritten);
  if (!is_rewriting()) swap_wait_ = absl::OkStatus();
  if (purpose == Purpose::kAccepted) {
    EndAccepted(block);
    return absl::OkStatus();
  }
  if (map_.has_weights(block)) FinishPartitionsOf(block);
  --blocks_left_;
  return absl::OkStatus();
}

void StepPipeline::EndDroppedWrite(uint32_t block, const absl::Status& status) {
  if (status.ok()) {
    ledger_.CancelWrite(block);
  } else {
    ledger_.OnWriteFailed(block);
    early_failed_ = true;
  }
  blocks_.Apply(block, Transition::kDropEnded);
}

// Repeats a write of the decided step that has failed, in another slot.
absl::Status StepPipeline::OnWriteFailed(const Running& write, const absl::Status& status) {
  ledger_.OnWriteFailed(write.block);
  if (abandoned_) {
    blocks_.Apply(write.block, Transition::kWriteAbandoned);
    return absl::OkStatus();  // the job has failed or is deleted
  }
  blocks_.Apply(write.block, Transition::kWriteRepeated);
  swap_wait_ = DescribeBlock(status, write.block);
  AddSpareSlot();
  StartWrite(write.block, write.checksum, write.weights_digests);
  return absl::OkStatus();
}

bool StepPipeline::is_rewriting() const {
  return blocks_.count(Phase::kRewriting, Purpose::kStep) +
             blocks_.count(Phase::kRewriting, Purpose::kAccepted) >
         0;
}

absl::Status StepPipeline::DescribeBlock(const absl::Status& status, uint32_t block) const {
  if (status.ok()) return status;
  const std::pmr::vector<BlockRun> runs = map_.Runs(block);
  std::string names = runs.empty()
                          ? "no parameter"
                          : absl::StrCat("parameter ", layout_->spec().params[runs[0].param].name);
  if (!runs.empty() && runs.back().param != runs[0].param) absl::StrAppend(&names, " and others");
  return protocol::MakeError(
      protocol::IdOf(status),
      absl::StrCat("block ", block, " (", names, "): ", std::string(status.message())),
      protocol::HintOf(status));
}

void StepPipeline::ForgetPrefetchErrors() {
  prefetch_failed_.clear();
  prefetch_error_ = absl::OkStatus();
  prefetch_next_ = 0;
}

uint64_t StepPipeline::Finish() {
  FOREBAY_CHECK(done() && updating_ == 0 && blocks_.early().empty());
  running_ = false;
  ledger_.Publish();
  ReturnSurplusSlots();
  for (const uint32_t left : partition_blocks_left_) FOREBAY_CHECK(left == 0);
  if (pass_ == UpdatePass::kMasters) return 0;
  if (ledger_.is_durable()) SetWeightsChanged();
  for (uint32_t param = 0; param < param_updates_.size(); ++param) {
    if (order_.params[param]) ++param_updates_[param];
  }
  last_step_ = {.update_reads = counters_.update_reads - at_begin_.update_reads,
                .update_reads_prefetched =
                    counters_.update_reads_prefetched - at_begin_.update_reads_prefetched,
                .read_bytes = counters_.read_bytes - at_begin_.read_bytes,
                .written_bytes = counters_.written_bytes - at_begin_.written_bytes,
                .early_updates = counters_.early_updates - at_begin_.early_updates};
  last_update_bytes_ = counters_.bytes() - bytes_at_decision_;
  at_begin_ = counters_;
  return overflowed_masters_;
}

// Marks the weights that the published step has updated as changed.
void StepPipeline::SetWeightsChanged() {
  for (const protocol::BoxPlace& place : layout_->boxes()) {
    if (!order_.params[place.box.param]) continue;
    SetWeightsChanged(place.partition, place.partition_elem, place.box.elems());
  }
}

// Marks the parts of the weights arena with these elements as changed.
void StepPipeline::SetWeightsChanged(uint32_t partition, uint64_t partition_elem, uint64_t elems) {
  const WeightsPlace place = PlaceOfWeights(partition, partition_elem);
  if (place.in_block || elems == 0) return;
  const uint64_t end = place.offset_bytes + elems * protocol::SizeBytes(layout_->spec().dtype);
  for (uint64_t part = place.offset_bytes / plan_.block_bytes; part * plan_.block_bytes < end;
       ++part) {
    ledger_.SetChanged(map_.blocks() + static_cast<uint32_t>(part));
  }
}

void StepPipeline::OnStateSet(const ElementRun& elems, StateSet state) {
  if (!ledger_.is_durable()) return;
  if (elems.block != ElementRun::kNoBlock) ledger_.SetChanged(elems.block);
  if (state == StateSet::kMoment) return;
  SetWeightsChanged(elems.partition, elems.partition_elem, elems.elems);
}

void StepPipeline::SetUpdates(uint32_t param, uint64_t updates) {
  FOREBAY_CHECK(!running_);
  param_updates_[param] = updates;
  if (keeps_jobs_) {
    io_.actions().Emit(RecordUpdates{.job = io_.job(), .param = param, .updates = updates});
  }
}

void StepPipeline::KeepStaged(const KeptUpdate& update) {
  for (uint32_t block = 0; block < map_.blocks(); ++block) {
    const auto& slot = update.blocks[block].staging_slot;
    if (slot) blocks_.Recover(block, *slot);
  }
}

void StepPipeline::Abandon() {
  abandoned_ = true;
  sums_.Abandon();
  std::vector<uint32_t> ready;
  for (const uint32_t block : blocks_.staged()) {
    if (blocks_.phase(block) == Phase::kReady) ready.push_back(block);
  }
  for (const uint32_t block : ready) blocks_.Apply(block, Transition::kAbandoned);
}

void StepPipeline::CheckInvariants(uint64_t committed_step) const {
  FOREBAY_CHECK(updating_ <= kUpdatesPerWorker * workers_);
  for (const uint32_t block : blocks_.staged()) FOREBAY_CHECK(!is_resident(block));
  for (uint32_t block = 0; block < map_.blocks(); ++block) {
    const BlockLedger::Version& current = ledger_.current(block);
    FOREBAY_CHECK(current.written_step <= committed_step);
    // A block is either in DRAM or in a slot.
    FOREBAY_CHECK(!is_resident(block) || !current.slot);
    FOREBAY_CHECK(ledger_.newest(block).written_step <= committed_step);
  }
  FOREBAY_CHECK(!running_ || !is_moving());
  FOREBAY_CHECK(ledger_.slots().size() >= placement_.slots_needed());
  blocks_.CheckInvariants();
  ledger_.CheckInvariants();
  sums_.CheckInvariants();
}

}  // namespace forebay::daemon
