// SPDX-License-Identifier: Apache-2.0
#include "daemon/core/update/state_access.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/os/check.h"

namespace forebay::daemon {

using protocol::ErrorId;
using protocol::MakeError;

void StateAccess::AddRead(const CommandId& command, const protocol::Command& words) {
  std::pmr::vector<ElementRun> runs;
  if (words.length_bytes > 0) {
    runs = store_.map().Locate(words.partition, words.element_offset,
                               words.length_bytes / sizeof(float));
  }
  uint64_t elems = 0;
  for (const ElementRun& run : runs) elems += run.elems;
  if (elems != words.length_bytes / sizeof(float)) {
    io_.Answer(
        command,
        MakeError(ErrorId::kRange,
                  absl::StrCat("of ", words.length_bytes / sizeof(float), " elements of parameter ",
                               layout_->spec().params[words.partition].name, " from ",
                               words.element_offset, " on, ", elems, " are on this node"),
                  "read them on the nodes that have them"));
    return;
  }
  queue_.push_back({.command = command,
                    .param = words.partition,
                    .state = words.kind,
                    .grad_offset_bytes = words.arena_offset_bytes,
                    .pieces = {runs.begin(), runs.end()}});
}

PartitionRange StateAccess::AddWrite(const CommandId& command, const protocol::Command& words) {
  const auto op = static_cast<protocol::Op>(words.op);
  if (op == protocol::Op::kWriteUpdates) {
    queue_.push_back({.command = command, .param = words.partition, .updates = words.step});
    return {};
  }
  const bool is_weights = op == protocol::Op::kWriteInitial;
  const protocol::DType dtype = is_weights ? layout_->spec().dtype : protocol::DType::kFloat32;
  const PartitionRange range{.partition = words.partition,
                             .begin = words.element_offset,
                             .end = words.element_offset + words.length_bytes / SizeBytes(dtype)};
  const std::pmr::vector<ElementRun> runs =
      store_.map().LocateInPartition(range.partition, range.begin, range.end);
  queue_.push_back({.command = command,
                    .state = is_weights ? 0U : words.kind,
                    .write = range,
                    .dtype = dtype,
                    .grad_offset_bytes = words.arena_offset_bytes,
                    .pieces = {runs.begin(), runs.end()}});
  return range;
}

// Makes the next request with elements current. Ends requests without elements at once.
void StateAccess::Next() {
  while (phase_ == CommandPhase::kIdle && !queue_.empty()) {
    current_ = std::move(queue_.front());
    queue_.pop_front();
    phase_ = CommandPhase::kWaitingSlot;
    if (current_.updates) {
      pipeline_.terms().SetUpdates(current_.param, *current_.updates);
    } else if (!current_.pieces.empty()) {
      continue;
    }
    End(absl::OkStatus());
  }
}

void StateAccess::Pump() {
  if (phase_ != CommandPhase::kIdle && phase_ != CommandPhase::kWaitingSlot) return;
  Next();
  if (phase_ == CommandPhase::kIdle) return;
  // A write waits until the cache's reads have ended, because these reads use the block's old slot.
  if (current_.write && (leases_.IsLeased(current_.write->partition) || weights_.is_loading())) {
    return;
  }
  const uint32_t block = current_.pieces.front().block;
  if (block == ElementRun::kNoBlock || store_.is_resident(block)) {
    StartAccess();
    return;
  }
  Blocks& blocks = store_.blocks();
  if (blocks.at(block).staging_slot) {  // the block was read ahead for the next step
    if (blocks.phase(block) == Phase::kReady) StartAccess();
    return;
  }
  const std::optional<uint32_t> slot = blocks.AllocateUrgent();
  if (!slot) return;
  phase_ = CommandPhase::kReading;
  pipeline_.tasks().StartRead(block, *slot, Transition::kReadForAccess);
}

void StateAccess::OnRead(const StepPipeline::ReadOutcome& outcome) {
  if (phase_ != CommandPhase::kReading || current_.pieces.front().block != outcome.block) return;
  if (!outcome.status.ok()) {
    End(outcome.status);
  } else if (store_.blocks().at(outcome.block).staging_slot) {
    StartAccess();
  } else {
    End(absl::OkStatus());  // the command was dropped and answered meanwhile
  }
}

void StateAccess::StartAccess() {
  const ElementRun& piece = current_.pieces.front();
  const bool staged = piece.block != ElementRun::kNoBlock && !store_.is_resident(piece.block);
  Blocks& blocks = store_.blocks();
  if (staged && current_.write && !store_.slots().AddForVersion(piece.block)) {
    if (blocks.purpose(piece.block) == Purpose::kAccess) {
      blocks.Apply(piece.block, Transition::kAccessFailed);
    }
    EndPiece(MakeError(ErrorId::kSwapNospc,
                       "durable steps keep what is on swap of this parameter, and there is no free "
                       "slot for another version of it",
                       "raise swap.capacity, or write right after the first attach"));
    return;
  }
  if (piece.block != ElementRun::kNoBlock) {
    blocks.Apply(piece.block, staged ? Transition::kAccess : Transition::kAccessInPlace);
  }
  phase_ = CommandPhase::kAccessing;
  if (current_.write) {
    StartSet(piece);
  } else {
    StartDecode(piece);
  }
}

void StateAccess::StartDecode(const ElementRun& piece) {
  io_.Start(TaskKind::kAccessState, current_.command.session,
            DecodeState{.session = current_.command.session,
                        .place = store_.PlaceOf(piece.block),
                        .identity = store_.IdentityOf(piece.block),
                        .checksum = store_.checksum(piece.block),
                        .block_bytes = store_.map().bytes(piece.block),
                        .block_elems = store_.map().elems(piece.block),
                        .state = current_.state,
                        .block_elem = piece.block_elem,
                        .elems = piece.elems,
                        .weights = WeightsOf(piece),
                        .grad_offset_bytes = current_.grad_offset_bytes});
}

void StateAccess::StartSet(const ElementRun& piece) {
  SetState action{.session = current_.command.session,
                  .state = current_.state,
                  .dtype = current_.dtype,
                  .elems = piece.elems,
                  .weights = WeightsOf(piece),
                  .grad_offset_bytes = current_.grad_offset_bytes};
  if (piece.block != ElementRun::kNoBlock) {
    action.in_block = SetState::InBlock{.place = store_.PlaceOf(piece.block),
                                        .identity = store_.IdentityOf(piece.block),
                                        .checksum = store_.checksum(piece.block),
                                        .block_bytes = store_.map().bytes(piece.block),
                                        .states_elems = store_.map().states_elems(piece.block),
                                        .block_elem = piece.block_elem};
  }
  io_.Start(TaskKind::kAccessState, current_.command.session, action);
}

WeightsPlace StateAccess::WeightsOf(const ElementRun& piece) const {
  return store_.PlaceOfWeights(piece.partition, piece.partition_elem);
}

void StateAccess::OnAccessed(const TaskDone& done) {
  FOREBAY_CHECK(phase_ == CommandPhase::kAccessing);
  const ElementRun& piece = current_.pieces.front();
  absl::Status status = done.status;
  if (piece.block != ElementRun::kNoBlock) status = store_.DescribeBlock(status, piece.block);
  if (status.ok() && done.count > 0) {
    const std::string what =
        current_.state == 0
            ? "the parameters"
            : absl::StrCat("the values for ",
                           protocol::StateNames(layout_->spec().optimizer)[current_.state]);
    status = MakeError(
        ErrorId::kNonfinite,
        absl::StrCat(what, " of ", layout_->DescribePartition(piece.partition),
                     " hold NaN, infinity", current_.state == 0 ? "" : ", a square below 0",
                     " or what rounds to infinity"),
        "check the initialisation or the loaded checkpoint");
  }
  const bool staged = piece.block != ElementRun::kNoBlock && !store_.is_resident(piece.block);
  if (current_.write) {
    store_.OnStateSet(piece, current_.state == 0 ? BlockStore::StateSet::kMasters
                                                 : BlockStore::StateSet::kMoment);
  }
  if (staged && current_.write && status.ok()) {
    checksum_ = done.checksum;
    weights_digests_ = done.weights_digests;
    store_.blocks().Apply(piece.block, Transition::kWrite);
    StartWrite();
    return;
  }
  if (piece.block != ElementRun::kNoBlock) {
    store_.blocks().Apply(piece.block,
                          status.ok() ? Transition::kAccessEnded : Transition::kAccessFailed);
  }
  EndPiece(status);
}

void StateAccess::StartWrite() {
  const uint32_t block = current_.pieces.front().block;
  phase_ = CommandPhase::kWriting;
  io_.Start(TaskKind::kWriteState, 0,
            store_.BeginWrite(block, store_.IdentityOf(block), checksum_));
}

void StateAccess::OnWritten(const TaskDone& done) {
  FOREBAY_CHECK(phase_ == CommandPhase::kWriting);
  const uint32_t block = current_.pieces.front().block;
  Blocks& blocks = store_.blocks();
  BlockLedger& ledger = store_.ledger();
  if (!done.status.ok()) {
    ledger.OnWriteFailed(block);
    if (!abandoned_) {  // the weights are set already, so the write is repeated in another slot
      blocks.Apply(block, Transition::kWriteRepeated);
      store_.slots().AddSpare();
      StartWrite();
      return;
    }
  } else {
    ledger.EndWrite(block, checksum_, ledger.current(block).written_step, weights_digests_);
    store_.PublishBlock(block);
    weights_.ForgetBlock(block);
  }
  blocks.Apply(block, done.status.ok() ? Transition::kWritten : Transition::kWriteAbandoned);
  pipeline_.read_ahead().OnSwapped(block);
  if (!abandoned_) store_.slots().ReturnSurplus();
  EndPiece(done.status);
}

void StateAccess::EndPiece(const absl::Status& status) {
  current_.grad_offset_bytes += current_.pieces.front().elems * SizeBytes(current_.dtype);
  current_.pieces.pop_front();
  if (!status.ok() || current_.answered || current_.pieces.empty()) {
    End(status);
    return;
  }
  phase_ = CommandPhase::kWaitingSlot;
}

void StateAccess::End(const absl::Status& status) {
  phase_ = CommandPhase::kIdle;
  if (current_.write && current_.state == 0) ++weights_writes_[current_.write->partition];
  if (!current_.answered) {
    protocol::Completion completion{};
    const bool reads = !current_.write && !current_.updates;
    if (reads) completion.offset_bytes = pipeline_.terms().updates()[current_.param];
    if (current_.write && status.ok()) written_.push_back(*current_.write);
    io_.Answer(current_.command, completion, status);
  }
  current_ = {};
}

void StateAccess::Drop(SessionId session, const absl::Status& status) {
  abandoned_ = abandoned_ || session == 0;
  const auto concerns = [session](const Request& request) {
    return session == 0 || request.command.session == session;
  };
  for (const Request& request : queue_) {
    if (concerns(request)) io_.Answer(request.command, status);
  }
  std::erase_if(queue_, concerns);
  if (phase_ == CommandPhase::kIdle || current_.answered || !concerns(current_)) return;
  io_.Answer(current_.command, status);
  current_.answered = true;
  if (phase_ == CommandPhase::kWaitingSlot) {
    End(status);
  } else if (phase_ == CommandPhase::kReading) {
    store_.blocks().Apply(current_.pieces.front().block, Transition::kReadCancelled);
  }
}

uint64_t StateAccess::unanswered(SessionId session) const {
  const auto is_of = [session](const Request& r) { return r.command.session == session; };
  const auto queued = std::count_if(queue_.begin(), queue_.end(), is_of);
  const bool current = in_progress() && !current_.answered && is_of(current_);
  return static_cast<uint64_t>(queued) + (current ? 1 : 0);
}

}  // namespace forebay::daemon
