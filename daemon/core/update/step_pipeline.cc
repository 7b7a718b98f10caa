// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/update/step_pipeline.h"

#include <algorithm>
#include <utility>

#include "daemon/core/base/limits.h"
#include "protocol/os/check.h"

namespace forebay::daemon {

namespace {

// StartReads() stops once this many blocks have found no frames for their gradient sums.
constexpr uint32_t kBlocksLookedAt = 16;

}  // namespace

StepPipeline::StepPipeline(JobTasks& io, std::shared_ptr<const protocol::Layout> layout,
                           const MemoryPlan& plan, const LeaseTable& leases, Options options)
    : io_(io),
      layout_(std::move(layout)),
      leases_(leases),
      workers_(options.workers),
      keeps_jobs_(options.keeps_jobs),
      map_(layout_, plan.block_elems, plan.weights_on_swap),
      order_(*layout_, map_, io.memory()),
      store_(io, *layout_, map_, plan,
             {.swap_slots = options.swap_slots,
              .swap = options.swap,
              .path_table = options.path_table,
              .pool = options.pool,
              .keeps_jobs = options.keeps_jobs,
              .may_reclaim = [this](uint32_t block) { return !running() || IsLeased(block); },
              .position = [this](uint32_t block) { return order_.position(block); }}),
      sums_(io, *layout_, map_, plan,
            {.slots = options.sum_slots,
             .recorded = options.recorded_sums,
             .swap = options.swap,
             .path_table = options.path_table}),
      terms_(io, *layout_, plan, store_, options.keeps_jobs),
      tasks_(io, *layout_, plan, store_, terms_, sums_),
      read_ahead_(plan, order_, store_, tasks_),
      early_(io, *layout_,
             {.order = order_,
              .store = store_,
              .terms = terms_,
              .tasks = tasks_,
              .read_ahead = read_ahead_,
              .sums = sums_},
             options.workers),
      queue_(*layout_, order_, io.memory()) {}

void StepPipeline::Prefetch() {
  if (running() || abandoned_) return;
  if (early_.is_on()) {
    early_.Prefetch();
  } else {
    read_ahead_.Pump();
  }
}

void StepPipeline::FollowTrace(const std::vector<uint32_t>& trace) {
  FOREBAY_CHECK(!running());
  if (!order_.Follow(trace)) return;
  early_.Sort();
  read_ahead_.Restart();
}

// ------------------------------------------------------------------------------------- the decision

void StepPipeline::Begin(StepOrder order, bool is_as_announced) {
  Open(std::move(order), terms_.needs_norms() ? UpdatePass::kNorms : UpdatePass::kWhole);
  is_recorded_ = keeps_jobs_;
  early_.End(is_as_announced, [this](uint32_t block) { return IsLeased(block); });
  BeginPass();
}

// BeginPass() accepts blocks that the previous daemon has written, as early updates. Blocks that the previous daemon had in staging
// slots become ready, even if part of their update was done.
void StepPipeline::Resume(const KeptUpdate& update) {
  const bool has_norms = !terms_.needs_norms() || !update.trust.empty();
  terms_.SetTrust(update.trust);
  Open(update.order.CopyIn(io_.memory()), has_norms ? UpdatePass::kWhole : UpdatePass::kNorms);
  is_recorded_ = true;
  for (const uint32_t block : store_.blocks().staged()) {
    store_.blocks().Apply(block, Transition::kResumed);
  }
  BeginPass();
}

bool StepPipeline::BeginMasters() {
  const protocol::LayoutSpec& spec = layout_->spec();
  const auto planes = protocol::StatePlanes(spec.optimizer, spec.format, spec.dtype);
  if (planes.empty() || planes[0].name != "master") return false;
  StepOrder order;
  for (const protocol::ParamPlace& param : layout_->params()) {
    order.params.push_back(param.trainable);
  }
  Open(std::move(order), UpdatePass::kMasters);
  is_recorded_ = false;
  early_.End(/*is_as_announced=*/false, [](uint32_t) { return false; });
  BeginPass();
  return true;
}

void StepPipeline::Open(StepOrder order, UpdatePass pass) {
  FOREBAY_CHECK(!running() && !abandoned_ && !store_.is_moving());
  terms_.Set(std::move(order), pass);
  queue_.Open(terms_.order().params);
  overflowed_masters_ = 0;
  before_.bytes_at_decision = tasks_.counters().bytes();
  read_ahead_.ForgetErrors();
}

void StepPipeline::BeginPass() {
  queue_.Clear();
  std::pmr::vector<uint32_t> from_sums(io_.memory());
  Blocks& blocks = store_.blocks();
  for (const uint32_t block : order_.blocks()) {
    const bool needed = terms_.IsNeeded(block);
    if (needed) queue_.Add(block);
    // An early update has used its sums. But if this daemon is killed, the next one repeats an early update that is not written,
    // and needs the same sums.
    const bool needs_sums =
        !blocks.is_early(block) || (is_recorded_ && blocks.phase(block) != Phase::kWritten);
    if (needed && needs_sums) from_sums.push_back(block);
    FollowDecision(block, needed);
    if (!needed) continue;
    if (blocks.is_early(block)) {
      AcceptEarly(block);
    } else if (store_.is_resident(block)) {
      queue_.AddInPlace(block);
    } else {
      queue_.AddStaged(block);
    }
  }
  if (terms_.pass() == UpdatePass::kWhole) {
    sums_.BeginUpdate(from_sums, is_recorded_ ? terms_.order().step : 0);
  }
}

// Cancels the read of a block that the decided step does not update, or drops the block. Continues a cancelled read of a block
// that the step updates.
void StepPipeline::FollowDecision(uint32_t block, bool is_updated) {
  Blocks& blocks = store_.blocks();
  if (!IsForUpdate(blocks.purpose(block))) return;
  const Phase phase = blocks.phase(block);
  if (phase == Phase::kReading && !is_updated) blocks.Apply(block, Transition::kReadCancelled);
  if (phase == Phase::kCancelled && is_updated) blocks.Apply(block, Transition::kReadWanted);
  if (phase == Phase::kReady && !is_updated) blocks.Apply(block, Transition::kNotNeeded);
}

void StepPipeline::EndNormsPass() {
  const std::vector<float>& trust = terms_.EndNorms();
  if (is_recorded_) {
    io_.actions().Emit(RecordTrust{.job = io_.job(),
                                   .step = terms_.order().step,
                                   .trust = {trust.begin(), trust.end(), io_.memory()}});
  }
  BeginPass();
}

// Makes the early update of a block part of the running step.
void StepPipeline::AcceptEarly(uint32_t block) {
  store_.blocks().Apply(block, Transition::kAccepted);
  ++tasks_.counters().early_updates;
  overflowed_masters_ += store_.blocks().at(block).overflows;
  if (store_.blocks().phase(block) != Phase::kWritten) return;
  store_.ledger().AcceptEarly(block);
  RecordWritten(block);
  EndAccepted(block);
}

// Ends the update of a block that was begun early and is written, or lets its new weights be installed.
void StepPipeline::EndAccepted(uint32_t block) {
  if (store_.blocks().at(block).weights_slot) {
    queue_.AddInstall(block);
    return;
  }
  store_.blocks().Apply(block, Transition::kCompleted);
  EndAcceptedUpdate(block);
}

void StepPipeline::EndAcceptedUpdate(uint32_t block) {
  early_.OnEnded(block);
  queue_.EndPartitionsOf(block);
  queue_.EndBlock();
}

// --------------------------------------------------------------------------------------------- pump

void StepPipeline::Pump() {
  if (!running() || abandoned_) return;
  if (terms_.pass() == UpdatePass::kNorms && queue_.is_empty()) EndNormsPass();
  PrepareStaged();
  StartReads();
  while (tasks_.updating() < UpdatesMax()) {
    const std::optional<uint32_t> ready = FirstReady();
    const std::pmr::set<uint32_t>& to_install = queue_.to_install();
    const bool installs =
        !to_install.empty() && (!ready || *to_install.begin() < order_.position(*ready));
    if (installs) {
      StartInstall(order_.blocks()[*to_install.begin()]);
      continue;
    }
    if (ready) {
      StartUpdate(*ready);
      continue;
    }
    std::pmr::deque<uint32_t>& in_place = queue_.in_place();
    const auto next =
        std::ranges::find_if(in_place, [this](uint32_t block) { return MayUpdateInPlace(block); });
    if (next == in_place.end()) return;
    const uint32_t block = *next;
    in_place.erase(next);
    StartUpdate(block);
  }
}

// Reads the gradient sums of blocks that are staged already, so that their updates need not wait.
void StepPipeline::PrepareStaged() {
  if (!tasks_.reads_sums() || !sums_.is_paged()) return;
  for (const uint32_t block : store_.blocks().staged()) {
    if (queue_.has_staged(block) && !IsLeased(block)) (void)sums_.Prepare(block);
  }
}

void StepPipeline::StartReads() {
  // A failed write is being repeated. Reading more blocks would only take staging slots from other jobs.
  if (is_rewriting() || tasks_.AreAllPathsBusy()) return;
  uint32_t without_sums = 0;
  for (const uint32_t position : queue_.staged()) {
    const uint32_t block = order_.blocks()[position];
    if (store_.blocks().phase(block) != Phase::kIdle || IsLeased(block) ||
        tasks_.IsPathBusy(block)) {
      continue;
    }
    if (tasks_.reads_sums() && sums_.Prepare(block) == SumPages::Room::kNone) {
      if (++without_sums == kBlocksLookedAt) return;
      continue;
    }
    const std::optional<uint32_t> slot = store_.blocks().AllocateUrgent();
    if (!slot) return;
    tasks_.StartRead(block, *slot,
                     UpdatesHaveOtherWork() ? Transition::kReadAhead : Transition::kReadForStep);
  }
}

bool StepPipeline::UpdatesHaveOtherWork() const {
  return queue_.has_in_place() ||
         std::ranges::any_of(store_.blocks().staged(), [this](uint32_t block) {
           return queue_.has_staged(block) && !IsLeased(block);
         });
}

void StepPipeline::StartUpdate(uint32_t block) {
  if (store_.is_resident(block)) {
    store_.blocks().Apply(block, Transition::kUpdateInPlace);
  } else {
    queue_.RemoveStaged(block);
    tasks_.CountUpdate(block);
    store_.blocks().Apply(block, Transition::kUpdate);
  }
  const bool is_recorded = is_recorded_ && terms_.pass() == UpdatePass::kWhole;
  tasks_.StartUpdate(block, is_recorded ? UpdateTasks::Recorded::kYes : UpdateTasks::Recorded::kNo);
}

void StepPipeline::StartInstall(uint32_t block) {
  queue_.RemoveInstall(block);
  store_.blocks().Apply(block, Transition::kInstall);
  tasks_.StartInstall(block);
}

// Returns the number of updates that may run or wait for a worker: one for each worker, so that a block on swap that becomes
// ready is updated next. If only blocks in DRAM remain, kUpdatesPerWorker for each worker.
uint32_t StepPipeline::UpdatesMax() const {
  const bool only_resident = queue_.staged().empty() && store_.blocks().staged().empty();
  return only_resident ? kUpdatesPerWorker * workers_ : workers_;
}

// True if the update of the block waits for a lease on its weights. No new lease on these weights is granted before the update.
bool StepPipeline::IsLeased(uint32_t block) const {
  const bool leaves_weights = terms_.pass() != UpdatePass::kWhole;
  if (leases_.count_of_sessions() == 0 || leaves_weights) return false;
  return std::ranges::any_of(order_.partitions_of(block), [this](uint32_t partition) {
    return queue_.HasUpdated(partition) && leases_.IsLeasedBySession(partition);
  });
}

// Returns the first ready block on swap to update.
std::optional<uint32_t> StepPipeline::FirstReady() const {
  std::optional<uint32_t> first;
  for (const uint32_t block : store_.blocks().staged()) {
    if (store_.blocks().phase(block) != Phase::kReady || IsLeased(block)) continue;
    if (tasks_.reads_sums() && !sums_.IsThere(block)) continue;
    if (!first || order_.position(block) < order_.position(*first)) first = block;
  }
  return first;
}

bool StepPipeline::MayUpdateInPlace(uint32_t block) {
  return !IsLeased(block) &&
         (!tasks_.reads_sums() || sums_.Prepare(block) == SumPages::Room::kThere);
}

bool StepPipeline::is_rewriting() const {
  return store_.blocks().count(Phase::kRewriting, Purpose::kStep) +
             store_.blocks().count(Phase::kRewriting, Purpose::kAccepted) >
         0;
}

// ------------------------------------------------------------------------------------- ended tasks

StepPipeline::ReadOutcome StepPipeline::OnRead(const TaskDone& done) {
  const uint32_t block = tasks_.EndRead(done);
  Blocks& blocks = store_.blocks();
  const bool for_update = IsForUpdate(blocks.purpose(block));
  const bool cancelled = blocks.phase(block) == Phase::kCancelled;
  if (cancelled) {
    blocks.Apply(block, Transition::kReadDiscarded);
  } else if (!done.status.ok()) {
    blocks.Apply(block, Transition::kReadFailed);
  } else {
    blocks.Apply(block, abandoned_ ? Transition::kAbandoned : Transition::kReadEnded);
  }
  if (!done.status.ok() && for_update && !running()) read_ahead_.Fail(block, done.status);
  return {.block = block,
          .status = store_.DescribeBlock(done.status, block),
          .fatal = running() && !cancelled};
}

absl::Status StepPipeline::OnUpdated(const TaskDone& done) {
  const uint32_t block = tasks_.EndUpdate(done);
  Blocks& blocks = store_.blocks();
  early_.OnUpdated(block);
  if (blocks.phase(block) == Phase::kDropped) {
    blocks.Apply(block, Transition::kDropEnded);
    return absl::OkStatus();
  }
  if (!done.status.ok() || abandoned_) return OnUpdateFailed(block, done.status);
  if (terms_.pass() == UpdatePass::kNorms) {
    terms_.AddNorms(block, done.norms);
    queue_.EndBlock();
    blocks.Apply(block, Transition::kNormsSummed);
    return absl::OkStatus();
  }
  blocks.SetOverflows(block, done.count);
  if (running()) overflowed_masters_ += done.count;
  if (blocks.purpose(block) == Purpose::kStep) {
    if (tasks_.reads_sums()) sums_.EndUpdateOf(block);
    if (!map_.has_weights(block)) queue_.EndPartitionsOf(block);
    if (store_.is_resident(block)) {
      store_.ledger().SetInPlace(block, terms_.order().step);
      queue_.EndBlock();
      blocks.Apply(block, Transition::kUpdatedInPlace);
      return absl::OkStatus();
    }
  }
  blocks.Apply(block, Transition::kWrite);
  tasks_.StartWrite(block, done.checksum, done.weights_digests);
  return absl::OkStatus();
}

// Handles an update that has failed, or that has ended after the job failed.
absl::Status StepPipeline::OnUpdateFailed(uint32_t block, const absl::Status& status) {
  if (!running()) {
    early_.OnUpdateFailed(block, status);
    return absl::OkStatus();
  }
  store_.blocks().Apply(block, Transition::kUpdateFailed);
  return store_.DescribeBlock(status, block);
}

absl::Status StepPipeline::OnWritten(const TaskDone& done) {
  const UpdateTasks::Written write = tasks_.EndWrite(done);
  const uint32_t block = write.block;
  Blocks& blocks = store_.blocks();
  const bool is_lost = !done.status.ok() || abandoned_;
  if (is_lost && blocks.purpose(block) == Purpose::kEarly &&
      blocks.phase(block) == Phase::kWriting) {
    early_.DropFailed(block, done.status);
  }
  if (blocks.phase(block) == Phase::kDropped) {
    early_.EndDroppedWrite(block, done.status);
    return absl::OkStatus();
  }
  if (!done.status.ok()) return OnWriteFailed(write, done.status);
  if (!terms_.sets_masters()) tasks_.counters().written_bytes += map_.bytes(block);
  const Purpose purpose = blocks.purpose(block);
  const uint64_t step = terms_.order().step;
  if (purpose == Purpose::kEarly) {
    store_.ledger().EndEarlyWrite(block, write.checksum, step, write.weights_digests);
    sums_.SetUpdatedEarly(block, true);
    blocks.Apply(block, Transition::kWritten);
    return absl::OkStatus();
  }
  store_.ledger().EndWrite(block, write.checksum, step, write.weights_digests);
  RecordWritten(block);
  if (purpose == Purpose::kAccepted && is_recorded_) sums_.EndUpdateOf(block);
  blocks.Apply(block, Transition::kWritten);
  if (!is_rewriting()) swap_wait_ = absl::OkStatus();
  if (purpose == Purpose::kAccepted) {
    EndAccepted(block);
    return absl::OkStatus();
  }
  if (map_.has_weights(block)) queue_.EndPartitionsOf(block);
  queue_.EndBlock();
  return absl::OkStatus();
}

// Repeats a write of the decided step that has failed, in another slot.
absl::Status StepPipeline::OnWriteFailed(const UpdateTasks::Written& write,
                                         const absl::Status& status) {
  store_.ledger().OnWriteFailed(write.block);
  if (abandoned_) {
    store_.blocks().Apply(write.block, Transition::kWriteAbandoned);
    return absl::OkStatus();  // the job has failed or is deleted
  }
  store_.blocks().Apply(write.block, Transition::kWriteRepeated);
  swap_wait_ = store_.DescribeBlock(status, write.block);
  store_.slots().AddSpare();
  tasks_.StartWrite(write.block, write.checksum, write.weights_digests);
  return absl::OkStatus();
}

void StepPipeline::OnInstalled(const TaskDone& done) {
  const uint32_t block = tasks_.EndInstall(done);
  if (is_recorded_) io_.actions().Emit(RecordInstalled{.job = io_.job(), .block = block});
  store_.blocks().Apply(block, Transition::kInstalled);
  EndAcceptedUpdate(block);
}

// Records a block that the decided step has written.
void StepPipeline::RecordWritten(uint32_t block) {
  if (!is_recorded_) return;
  RecordBlock record = store_.RecordOf(block, *store_.ledger().pending(block));
  record.step = terms_.order().step;
  record.overflows = store_.blocks().at(block).overflows;
  record.weights_slot = store_.blocks().at(block).weights_slot;
  io_.actions().Emit(std::move(record));
}

// ---------------------------------------------------------------------------------------------- end

uint64_t StepPipeline::Finish() {
  FOREBAY_CHECK(done() && tasks_.updating() == 0 && store_.blocks().early().empty());
  queue_.Close();
  store_.ledger().Publish();
  store_.slots().ReturnSurplus();
  const bool were_masters = terms_.sets_masters();
  terms_.Close();
  if (were_masters) return 0;
  if (store_.ledger().is_durable()) SetWeightsChanged();
  terms_.Publish();
  const PipelineCounters& now = tasks_.counters();
  const PipelineCounters before = std::exchange(before_.at_publication, now);
  statistics_.last_step = {
      .update_reads = now.update_reads - before.update_reads,
      .update_reads_prefetched = now.update_reads_prefetched - before.update_reads_prefetched,
      .read_bytes = now.read_bytes - before.read_bytes,
      .written_bytes = now.written_bytes - before.written_bytes,
      .early_updates = now.early_updates - before.early_updates};
  statistics_.last_update_bytes = now.bytes() - before_.bytes_at_decision;
  return overflowed_masters_;
}

// Marks the weights that the published step has updated as changed.
void StepPipeline::SetWeightsChanged() {
  for (const protocol::BoxPlace& place : layout_->boxes()) {
    if (!terms_.order().params[place.box.param]) continue;
    store_.SetWeightsChanged(place.partition, place.partition_elem, place.box.elems());
  }
}

void StepPipeline::Abandon() {
  abandoned_ = true;
  sums_.Abandon();
  early_.Abandon();
  std::vector<uint32_t> ready;
  for (const uint32_t block : store_.blocks().staged()) {
    if (store_.blocks().phase(block) == Phase::kReady) ready.push_back(block);
  }
  for (const uint32_t block : ready) store_.blocks().Apply(block, Transition::kAbandoned);
}

StepPipeline::Statistics StepPipeline::statistics() const {
  Statistics statistics = statistics_;
  statistics.all = tasks_.counters();
  return statistics;
}

void StepPipeline::CheckInvariants(uint64_t committed_step) const {
  FOREBAY_CHECK(tasks_.updating() <= kUpdatesPerWorker * workers_);
  FOREBAY_CHECK(!running() || !store_.is_moving());
  FOREBAY_CHECK(!running() || !early_.is_on());
  store_.CheckInvariants(committed_step);
  sums_.CheckInvariants();
}

}  // namespace forebay::daemon
