#include "daemon/core/state_reads.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "protocol/os/check.h"

namespace forebay::daemon {

using State = StagedBlocks::State;

void StateReads::Add(const CommandId& command, const protocol::Command& words) {
  const std::vector<ElementRun> runs = pipeline_.map().Locate(words.partition, words.element_offset,
                                                              words.length_bytes / sizeof(float));
  queue_.push_back({.command = command,
                    .param = words.partition,
                    .state = words.kind,
                    .grad_offset_bytes = words.arena_offset_bytes,
                    .pieces = {runs.begin(), runs.end()}});
}

void StateReads::Pump() {
  if (phase_ == Phase::kReading || phase_ == Phase::kDecoding) return;
  if (phase_ == Phase::kIdle) {
    if (queue_.empty()) return;
    current_ = std::move(queue_.front());
    queue_.pop_front();
    phase_ = Phase::kWaitingSlot;
  }
  const uint32_t block = current_.pieces.front().block;
  own_slot_ = false;
  if (pipeline_.is_resident(block)) {
    StartDecode();
    return;
  }
  StagedBlocks& staged = pipeline_.staged();
  if (staged.contains(block)) {  // read ahead for the next step
    if (staged.at(block).state == State::kReady) StartDecode();
    return;
  }
  const std::optional<uint32_t> slot = staged.AllocateUrgent();
  if (!slot) return;
  own_slot_ = true;
  phase_ = Phase::kReading;
  pipeline_.StartRead(block, *slot, /*for_update=*/false);
}

void StateReads::OnRead(const StepPipeline::ReadOutcome& outcome) {
  if (phase_ != Phase::kReading || current_.pieces.front().block != outcome.block) return;
  if (!outcome.status.ok()) {
    End(outcome.status);
  } else if (pipeline_.staged().contains(outcome.block)) {
    StartDecode();
  } else {
    End(absl::OkStatus());  // given up meanwhile, and answered
  }
}

void StateReads::StartDecode() {
  const ElementRun& piece = current_.pieces.front();
  if (!pipeline_.is_resident(piece.block)) pipeline_.staged().at(piece.block).state = State::kInUse;
  phase_ = Phase::kDecoding;
  const uint64_t weights_offset_bytes =
      pipeline_.placement().WherePartition(piece.partition).weights_offset_bytes +
      piece.partition_elem * protocol::SizeBytes(layout_->spec().dtype);
  io_.Start(TaskKind::kDecodeState, current_.command.session,
            DecodeState{.session = current_.command.session,
                        .place = pipeline_.PlaceOf(piece.block),
                        .identity = pipeline_.IdentityOf(piece.block),
                        .checksum = pipeline_.checksum(piece.block),
                        .block_bytes = pipeline_.map().bytes(piece.block),
                        .block_elems = pipeline_.map().elems(piece.block),
                        .state = current_.state,
                        .block_elem = piece.block_elem,
                        .elems = piece.elems,
                        .weights_offset_bytes = weights_offset_bytes,
                        .grad_offset_bytes = current_.grad_offset_bytes});
}

void StateReads::OnDecoded(const TaskDone& done) {
  FOREBAY_CHECK(phase_ == Phase::kDecoding);
  const ElementRun piece = current_.pieces.front();
  if (!pipeline_.is_resident(piece.block)) {
    pipeline_.staged().at(piece.block).state = State::kReady;
    if (own_slot_ || !done.status.ok()) pipeline_.staged().Drop(piece.block);
  }
  current_.pieces.pop_front();
  current_.grad_offset_bytes += piece.elems * sizeof(float);
  if (!done.status.ok() || current_.answered || current_.pieces.empty()) {
    End(done.status);
    return;
  }
  phase_ = Phase::kWaitingSlot;
}

void StateReads::End(const absl::Status& status) {
  phase_ = Phase::kIdle;
  if (!current_.answered) {
    protocol::Completion completion{};
    completion.offset_bytes = pipeline_.updates_of(current_.param);
    io_.Answer(current_.command, completion, status);
  }
  current_ = {};
}

void StateReads::Drop(SessionId session, const absl::Status& status) {
  const auto concerns = [session](const Request& request) {
    return session == 0 || request.command.session == session;
  };
  for (const Request& request : queue_) {
    if (concerns(request)) io_.Answer(request.command, status);
  }
  std::erase_if(queue_, concerns);
  if (phase_ == Phase::kIdle || current_.answered || !concerns(current_)) return;
  io_.Answer(current_.command, status);
  current_.answered = true;
  if (phase_ == Phase::kWaitingSlot) {
    End(status);
  } else if (phase_ == Phase::kReading) {
    pipeline_.staged().at(current_.pieces.front().block).cancelled = true;
  }
}

uint64_t StateReads::unanswered(SessionId session) const {
  const auto is_of = [session](const Request& r) { return r.command.session == session; };
  const auto queued = std::count_if(queue_.begin(), queue_.end(), is_of);
  const bool current = in_progress() && !current_.answered && is_of(current_);
  return static_cast<uint64_t>(queued) + (current ? 1 : 0);
}

}  // namespace forebay::daemon
