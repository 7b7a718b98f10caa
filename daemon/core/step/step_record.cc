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
void StepPipeline::RecordWritten(uint32_t block) {
  if (!is_recorded_) return;
  RecordBlock record = RecordOf(block, *ledger_.pending(block));
  record.step = order_.step;
  record.overflows = blocks_.at(block).overflows;
  record.weights_slot = blocks_.at(block).weights_slot;
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
  answers_.OnResumed();
}

void Step::Record(KeptMemory& kept, bool is_last) {
  kept.attempt = attempts_.Record(gradients_.empty() ? StepAttempts::Gradients::kNone
                                                     : StepAttempts::Gradients::kDelivered);
  kept.norm = answers_.norm();
  kept.clipped = answers_.clipped();
  // The next daemon reports an overflow. Only the last record knows whether this daemon has reported it.
  if (!is_last || !answers_.unreported().ok()) kept.overflowed = answers_.overflowed();
  kept.summary = nodes_.EncodeLast();
}

RecordDecision Step::DecisionOf(const StepOrder& order) const {
  RecordDecision record{.job = spec_.id,
                        .step = order.step,
                        .order = order.CopyIn(io_.memory()),
                        .param_updates = std::pmr::vector<uint64_t>(io_.memory()),
                        .trace = std::pmr::vector<uint32_t>(io_.memory()),
                        .extra_states = extra_.NextParts(barrier_.by_rank()),
                        .norm = answers_.norm(),
                        .clipped = answers_.clipped(),
                        .overflowed = answers_.overflow_to_report()};
  if (spec_.plan.uses_float_sums) record.float_sums = spec_.plan.float_sums_part();
  if (nodes_.decision()) record.summary = protocol::EncodeStepSummary(*nodes_.decision());
  const auto copy = [](const auto& from, auto& to) { to.assign(from.begin(), from.end()); };
  copy(pipeline_.updates(), record.param_updates);
  for (uint32_t param = 0; param < order.params.size(); ++param) {
    if (order.params[param]) ++record.param_updates[param];
  }
  copy(trace_.committed(), record.trace);
  return record;
}

}  // namespace forebay::daemon
