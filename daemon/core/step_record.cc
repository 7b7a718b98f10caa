// What a step says to the record of its job, from which another daemon goes on where this one is killed.

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/core/step.h"
#include "daemon/core/step_pipeline.h"
#include "protocol/error.h"

namespace forebay::daemon {

RecordBlock StepPipeline::RecordOf(uint32_t block, const BlockLedger::Version& version) const {
  return {.job = io_.job(),
          .block = block,
          .slot = version.slot,
          .checksum = version.checksum,
          .written_step = version.written_step,
          .weights_digests = version.weights_digests};
}

// In the step that is decided.
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

void Step::Record(KeptMemory& kept) {
  const uint64_t open = open_attempt();
  recorded_attempt_ = gradients_.empty() ? open : std::max(open, attempt_ + 1);
  kept.attempt = recorded_attempt_;
  kept.was_killed = true;
  kept.overflowed = overflowed_;  // whether it was said, nobody knows
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
