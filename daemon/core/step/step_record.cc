// SPDX-License-Identifier: Apache-2.0
// Records a step, so that the next daemon can continue the step if this daemon is killed, and recovers a step from such a
// record.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/core/step/step.h"
#include "daemon/core/update/step_pipeline.h"
#include "protocol/error.h"
#include "protocol/os/check.h"

namespace forebay::daemon {

RecordBlock StepPipeline::RecordOf(uint32_t block, const BlockLedger::Version& version) const {
  return {.job = io_.job(),
          .block = block,
          .slot = version.slot,
          .checksum = version.checksum,
          .written_step = version.written_step,
          .weights_digests = version.weights_digests};
}

// Records a block that the decided step has written.
void StepPipeline::RecordWritten(uint32_t block, uint64_t overflows,
                                 std::optional<uint32_t> weights_slot) {
  if (!is_recorded_) return;
  RecordBlock record = RecordOf(block, *ledger_.pending(block));
  record.step = order_.step;
  record.overflows = overflows;
  record.weights_slot = weights_slot;
  io_.actions().Emit(std::move(record));
}

void StepPipeline::PublishBlock(uint32_t block) {
  ledger_.PublishBlock(block);
  if (keeps_jobs_) io_.actions().Emit(RecordOf(block, ledger_.current(block)));
}

void StepPipeline::SetResident(uint32_t block) {
  ledger_.SetResident(block);
  if (keeps_jobs_) io_.actions().Emit(RecordOf(block, ledger_.current(block)));
}

void StepPipeline::Recover(const DurableJob& job) {
  const DurableJob* const durable = job.kept ? job.kept->durable.get() : &job;
  FOREBAY_CHECK(job.blocks.size() == map_.blocks() &&
                job.param_updates.size() == param_updates_.size());
  FOREBAY_CHECK(durable == nullptr || durable->weights.size() == plan_.weights_parts);
  param_updates_ = job.param_updates;
  const auto version = [](const DurableBytes& bytes) {
    return BlockLedger::Version{.slot = bytes.slot,
                                .checksum = bytes.checksum,
                                .written_step = bytes.written_step,
                                .weights_digests = bytes.weights_digests};
  };
  for (uint32_t block = 0; durable != nullptr && block < map_.blocks(); ++block) {
    if (!durable->blocks[block]) continue;
    ledger_.Recover(block, version(*durable->blocks[block]),
                    is_resident(block) ? BlockLedger::Home::kDram : BlockLedger::Home::kSwap);
  }
  for (uint32_t part = 0; durable != nullptr && part < plan_.weights_parts; ++part) {
    ledger_.Recover(map_.blocks() + part, version(durable->weights[part]),
                    BlockLedger::Home::kDram);
  }
  const DurableJob* const before = durable == nullptr ? nullptr : durable->before.get();
  for (uint32_t block = 0; before != nullptr && block < map_.blocks(); ++block) {
    if (before->blocks[block]) ledger_.RecoverBefore(block, version(*before->blocks[block]));
  }
  for (uint32_t part = 0; before != nullptr && part < plan_.weights_parts; ++part) {
    ledger_.RecoverBefore(map_.blocks() + part, version(before->weights[part]));
  }
  for (uint32_t block = 0; job.kept && block < map_.blocks(); ++block) {
    if (is_resident(block)) ledger_.RecoverInPlace(block, job.kept->written_steps[block]);
    ledger_.RecoverKilled(block,
                          job.blocks[block] ? version(*job.blocks[block]) : BlockLedger::Version{});
    if (job.kept->update == nullptr) continue;
    const auto& written = job.kept->update->blocks[block].written;
    if (written) ledger_.RecoverEarly(block, version(*written));
  }
  if (job.kept && job.kept->update != nullptr) {
    for (const KeptUpdate::Sums& sums : job.kept->update->sums) sums_.Adopt(sums);
  }
  for (uint32_t part = 0; job.kept && part < plan_.weights_parts; ++part) {
    ledger_.SetChanged(map_.blocks() + part);
  }
}

void Step::Resume(const KeptUpdate& update) {
  if (update.prepared) {
    ResumePrepared(update);
    return;
  }
  pipeline_.Resume(update);
  is_to_be_resumed_ = false;
  has_answered_early_ = true;
}

std::vector<std::byte> Step::LastSummary() const {
  return last_decision_ ? protocol::EncodeStepSummary(*last_decision_) : std::vector<std::byte>();
}

void Step::Record(KeptMemory& kept, bool is_last) {
  const uint64_t open = open_attempt();
  recorded_attempt_ = gradients_.empty() ? open : std::max(open, attempt_ + 1);
  kept.attempt = recorded_attempt_;
  kept.norm = last_.norm;
  kept.clipped = last_.clipped;
  // The next daemon reports an overflow. Only the last record knows whether this daemon has reported it.
  if (!is_last || !unsaid_.ok()) kept.overflowed = overflowed_;
  kept.summary = LastSummary();
}

void Step::RecordOpenAttempt(uint64_t attempt) {
  if (!spec_.options.keeps_jobs || attempt == recorded_attempt_) return;
  recorded_attempt_ = attempt;
  io_.actions().Emit(
      RecordAttempt{.job = spec_.id, .step = committed_step_ + 1, .attempt = attempt});
}

absl::Status Step::OverflowError(uint64_t overflowed) const {
  return protocol::MakeError(
      protocol::ErrorId::kOverflow,
      absl::StrCat(overflowed, " parameters of job ", spec_.name, " became non-finite in step ",
                   published_step_, ", which is committed"),
      "go back to a checkpoint, or lower the learning rate");
}

RecordDecision Step::DecisionOf(const StepOrder& order) const {
  RecordDecision record{.job = spec_.id,
                        .step = order.step,
                        .order = order.CopyIn(io_.memory()),
                        .param_updates = std::pmr::vector<uint64_t>(io_.memory()),
                        .trace = std::pmr::vector<uint32_t>(io_.memory()),
                        .extra_states = std::pmr::vector<StatePart>(io_.memory()),
                        .norm = last_.norm,
                        .clipped = last_.clipped,
                        .overflowed = last_.status.ok() ? 0 : overflowed_};
  if (spec_.plan.uses_float_sums) record.float_sums = spec_.plan.float_sums_part();
  if (decision_) record.summary = protocol::EncodeStepSummary(*decision_);
  const auto copy = [](const auto& from, auto& to) { to.assign(from.begin(), from.end()); };
  copy(pipeline_.updates(), record.param_updates);
  for (uint32_t param = 0; param < order.params.size(); ++param) {
    if (order.params[param]) ++record.param_updates[param];
  }
  copy(trace_.committed(), record.trace);
  for (uint32_t rank = 0; rank < spec_.world_size(); ++rank) {
    record.extra_states.push_back(
        {.offset_bytes = spec_.plan.extra_state_slot(rank, 1 - extra_slot_)});
  }
  for (const auto& [rank, call] : barrier_.by_rank()) {
    record.extra_states[rank].bytes = call.request.extra_state_bytes;
  }
  return record;
}

void Step::RecordPublished(uint64_t overflowed) {
  overflowed_ = overflowed;
  if (!spec_.options.keeps_jobs) return;
  io_.actions().Emit(
      RecordStep{.job = spec_.id, .step = published_step_, .overflowed = overflowed});
}

}  // namespace forebay::daemon
