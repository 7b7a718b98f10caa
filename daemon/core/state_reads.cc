#include "daemon/core/state_reads.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "protocol/os/check.h"

namespace forebay::daemon {

using State = StagedBlocks::State;

void StateReads::Add(const CommandId& command, const protocol::Command& words) {
  const protocol::LayoutSpec& spec = layout_->spec();
  const auto planes = protocol::StatePlanes(spec.optimizer, spec.format, spec.dtype);
  const protocol::Plane& plane = planes[words.kind];
  const uint64_t width = protocol::SizeBytes(plane.dtype);
  Request request;
  request.command = command;
  request.grad_offset_bytes = words.arena_offset_bytes;
  const std::vector<ElementRun> runs = pipeline_.map().Locate(
      words.group, words.element_offset, words.length_bytes / width * plane.elems_per_value);
  for (const ElementRun& run : runs) {
    request.pieces.push_back(
        {.block = run.block,
         .block_offset_bytes = pipeline_.map().plane_offset_bytes(run.block, words.kind) +
                               run.block_elem / plane.elems_per_value * width,
         .bytes = protocol::PlaneBytes(plane, run.elems)});
  }
  queue_.push_back(std::move(request));
}

void StateReads::Pump() {
  if (phase_ == Phase::kReading || phase_ == Phase::kCopying) return;
  if (phase_ == Phase::kIdle) {
    if (queue_.empty()) return;
    current_ = std::move(queue_.front());
    queue_.pop_front();
    phase_ = Phase::kWaitingSlot;
  }
  const uint32_t block = current_.pieces.front().block;
  own_slot_ = false;
  if (pipeline_.is_resident(block)) {
    StartCopy();
    return;
  }
  StagedBlocks& staged = pipeline_.staged();
  if (staged.contains(block)) {  // read ahead for the next step
    if (staged.at(block).state == State::kReady) StartCopy();
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
    StartCopy();
  } else {
    End(absl::OkStatus());  // given up meanwhile, and answered
  }
}

void StateReads::StartCopy() {
  const Piece& piece = current_.pieces.front();
  if (!pipeline_.is_resident(piece.block)) pipeline_.staged().at(piece.block).state = State::kInUse;
  phase_ = Phase::kCopying;
  io_.Start(TaskKind::kCopyState, current_.command.session,
            CopyState{.session = current_.command.session,
                      .place = pipeline_.PlaceOf(piece.block),
                      .identity = pipeline_.IdentityOf(piece.block),
                      .checksum = pipeline_.checksum(piece.block),
                      .block_bytes = pipeline_.map().bytes(piece.block),
                      .block_offset_bytes = piece.block_offset_bytes,
                      .grad_offset_bytes = current_.grad_offset_bytes,
                      .bytes = piece.bytes});
}

void StateReads::OnCopied(const TaskDone& done) {
  FOREBAY_CHECK(phase_ == Phase::kCopying);
  const Piece piece = current_.pieces.front();
  if (!pipeline_.is_resident(piece.block)) {
    pipeline_.staged().at(piece.block).state = State::kReady;
    if (own_slot_ || !done.status.ok()) pipeline_.staged().Drop(piece.block);
  }
  current_.pieces.pop_front();
  current_.grad_offset_bytes += piece.bytes;
  if (!done.status.ok() || current_.answered || current_.pieces.empty()) {
    End(done.status);
    return;
  }
  phase_ = Phase::kWaitingSlot;
}

void StateReads::End(const absl::Status& status) {
  phase_ = Phase::kIdle;
  if (!current_.answered) io_.Answer(current_.command, status);
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
