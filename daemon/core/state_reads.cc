#include "daemon/core/state_reads.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "protocol/os/check.h"

namespace forebay::daemon {

using State = StagedBlocks::State;

void StateReads::Add(const CommandId& command, const protocol::Command& words,
                     const protocol::Layout& layout, const StepPipeline& pipeline) {
  const protocol::LayoutSpec& spec = layout.spec();
  const auto planes = protocol::StatePlanes(spec.optimizer, spec.format, spec.dtype);
  const protocol::Plane& plane = planes[words.kind];
  const uint64_t width = protocol::SizeBytes(plane.dtype);
  Request request;
  request.command = command;
  request.grad_offset_bytes = words.arena_offset_bytes;
  const std::vector<ElementRun> runs = pipeline.map().Locate(
      words.group, words.element_offset, words.length_bytes / width * plane.elems_per_value);
  for (const ElementRun& run : runs) {
    request.pieces.push_back(
        {.block = run.block,
         .block_offset_bytes = pipeline.map().plane_offset_bytes(run.block, words.kind) +
                               run.block_elem / plane.elems_per_value * width,
         .bytes = protocol::PlaneBytes(plane, run.elems)});
  }
  queue_.push_back(std::move(request));
}

void StateReads::Pump(JobIo& io, StepPipeline& pipeline) {
  if (phase_ == Phase::kReading || phase_ == Phase::kCopying) return;
  if (phase_ == Phase::kIdle) {
    if (queue_.empty()) return;
    current_ = std::move(queue_.front());
    queue_.pop_front();
    phase_ = Phase::kWaitingSlot;
  }
  const uint32_t block = current_.pieces.front().block;
  own_slot_ = false;
  if (pipeline.is_resident(block)) {
    StartCopy(io, pipeline);
    return;
  }
  StagedBlocks& staged = pipeline.staged();
  if (staged.contains(block)) {  // read ahead for the next step
    if (staged.at(block).state == State::kReady) StartCopy(io, pipeline);
    return;
  }
  const std::optional<uint32_t> slot = staged.pool().AllocateUrgent(staged);
  if (!slot) return;
  own_slot_ = true;
  phase_ = Phase::kReading;
  pipeline.StartRead(io, block, *slot, /*for_update=*/false);
}

void StateReads::OnRead(JobIo& io, StepPipeline& pipeline,
                        const StepPipeline::ReadOutcome& outcome) {
  if (phase_ != Phase::kReading || current_.pieces.front().block != outcome.block) return;
  if (!outcome.status.ok()) {
    End(io, outcome.status);
  } else if (pipeline.staged().contains(outcome.block)) {
    StartCopy(io, pipeline);
  } else {
    End(io, absl::OkStatus());  // given up meanwhile, and answered
  }
}

void StateReads::StartCopy(JobIo& io, StepPipeline& pipeline) {
  const Piece& piece = current_.pieces.front();
  if (!pipeline.is_resident(piece.block)) pipeline.staged().at(piece.block).state = State::kInUse;
  phase_ = Phase::kCopying;
  io.Start(TaskKind::kCopyState, current_.command.session,
           CopyState{.session = current_.command.session,
                     .place = pipeline.PlaceOf(piece.block),
                     .identity = pipeline.IdentityOf(io.job(), piece.block),
                     .checksum = pipeline.checksum(piece.block),
                     .block_bytes = pipeline.map().bytes(piece.block),
                     .block_offset_bytes = piece.block_offset_bytes,
                     .grad_offset_bytes = current_.grad_offset_bytes,
                     .bytes = piece.bytes});
}

void StateReads::OnCopied(JobIo& io, StepPipeline& pipeline, const TaskDone& done) {
  FOREBAY_CHECK(phase_ == Phase::kCopying);
  const Piece piece = current_.pieces.front();
  if (!pipeline.is_resident(piece.block)) {
    pipeline.staged().at(piece.block).state = State::kReady;
    if (own_slot_ || !done.status.ok()) pipeline.staged().Drop(piece.block);
  }
  current_.pieces.pop_front();
  current_.grad_offset_bytes += piece.bytes;
  if (!done.status.ok() || current_.answered || current_.pieces.empty()) {
    End(io, done.status);
    return;
  }
  phase_ = Phase::kWaitingSlot;
}

void StateReads::End(JobIo& io, const absl::Status& status) {
  phase_ = Phase::kIdle;
  if (!current_.answered) io.Answer(current_.command, status);
  current_ = {};
}

void StateReads::Drop(JobIo& io, StepPipeline& pipeline, SessionId session,
                      const absl::Status& status) {
  const auto concerns = [session](const Request& request) {
    return session == 0 || request.command.session == session;
  };
  for (const Request& request : queue_) {
    if (concerns(request)) io.Answer(request.command, status);
  }
  std::erase_if(queue_, concerns);
  if (phase_ == Phase::kIdle || current_.answered || !concerns(current_)) return;
  io.Answer(current_.command, status);
  current_.answered = true;
  if (phase_ == Phase::kWaitingSlot) {
    End(io, status);
  } else if (phase_ == Phase::kReading) {
    pipeline.staged().at(current_.pieces.front().block).cancelled = true;
  }
}

uint64_t StateReads::unanswered(SessionId session) const {
  const auto is_of = [session](const Request& r) { return r.command.session == session; };
  const auto queued = std::count_if(queue_.begin(), queue_.end(), is_of);
  const bool current = in_progress() && !current_.answered && is_of(current_);
  return static_cast<uint64_t>(queued) + (current ? 1 : 0);
}

}  // namespace forebay::daemon
