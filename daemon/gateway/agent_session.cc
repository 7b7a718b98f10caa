// SPDX-License-Identifier: Apache-2.0
#include "daemon/gateway/agent_session.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "protocol/doorbell.h"
#include "protocol/error.h"

namespace forebay::gateway {
namespace {

using protocol::Command;
using protocol::Completion;
using protocol::ErrorId;
using protocol::MakeError;
using protocol::Op;
using protocol::RemoteHeader;
using protocol::RemoteKind;
using protocol::RemoteRegion;

constexpr int kCommandsAtOnce = 64;
constexpr size_t kReadsWaitingMax = size_t{1} << 16;
constexpr uint64_t kPiecesAheadMax = uint64_t{1} << 20;

absl::Status GatewayViolation(std::string_view what) {
  return MakeError(ErrorId::kProtocol, absl::StrCat("the gateway ", std::string(what)));
}

}  // namespace

AgentSession::AgentSession(std::unique_ptr<RemoteLink> link, AgentSessionOptions options)
    : options_(std::move(options)), link_(std::move(link)) {}

AgentSession::~AgentSession() { Close(protocol::ChannelState::kEnded); }

void AgentSession::OnLost() {
  Close(options_.has_rank ? protocol::ChannelState::kRestarting : protocol::ChannelState::kEnded);
}

void AgentSession::End(const absl::Status& status) {
  Close(protocol::ChannelState::kEnded);
  link_->End(status);
}

void AgentSession::Close(protocol::ChannelState state) {
  if (std::exchange(is_closed_, true)) return;
  options_.channel->Close(state);
}

// ---------------------------------------- from the trainer

AgentSession::Range AgentSession::BytesOf(const Command& command) const {
  switch (static_cast<Op>(command.op)) {
    case Op::kWriteInitial:
    case Op::kGradReady:
    case Op::kWriteState:
    case Op::kStep:
    case Op::kAnnounceStep:
      return {.offset_bytes = command.arena_offset_bytes, .length_bytes = command.length_bytes};
    case Op::kDecide:
      return {.offset_bytes = protocol::StepSummaryOffset(options_.step_region, *options_.layout),
              .length_bytes = protocol::StepSummaryBytes(options_.layout->params().size())};
    default:
      return {};
  }
}

bool AgentSession::ReceiveFromTrainer() {
  for (int i = 0; i < kCommandsAtOnce; ++i) {
    const absl::StatusOr<std::optional<Command>> received = options_.channel->Receive();
    if (!received.ok()) {
      End(received.status());
      return true;
    }
    if (!received->has_value()) return i > 0;
    const Command& command = **received;
    if (AnswerHere(command)) continue;
    if (MayChangeWeights(command)) {
      ahead_.clear();
      ahead_from_ = next_number_ + 1;
    }
    Range range = BytesOf(command);
    // The daemon rejects a command whose bytes are outside its arena.
    if (!IsWithin(range.offset_bytes, range.length_bytes, options_.daemon_arena_bytes)) range = {};
    if (!in_flight_.insert(command.tag).second) {
      End(MakeError(ErrorId::kRing, absl::StrCat("tag ", command.tag, " is in flight twice")));
      return true;
    }
    RemoteHeader header;
    header.kind = static_cast<uint16_t>(RemoteKind::kCommand);
    header.region = static_cast<uint16_t>(RemoteRegion::kGradArena);
    header.number = next_number_++;
    header.offset_bytes = range.offset_bytes;
    header.length_bytes = range.length_bytes;
    header.Set(command);
    link_->Send(header,
                options_.grad_arena->bytes().subspan(range.offset_bytes, range.length_bytes),
                options_.grad_arena);
  }
  return true;
}

bool AgentSession::AnswerHere(const Command& command) {
  Completion completion{};
  const bool is_fetch = static_cast<Op>(command.op) == Op::kFetch;
  if (is_fetch) {
    const auto ahead = ahead_.find(command.partition);
    if (ahead == ahead_.end() || ahead->second.pieces > pieces_ended_) return false;
    completion = ahead->second.completion;
    const bool leases = command.kind == static_cast<uint16_t>(protocol::FetchKind::kLease);
    completion.lease_id = leases ? protocol::kAheadLease : 0;
  } else if (static_cast<Op>(command.op) != Op::kRelease ||
             command.lease_id != protocol::kAheadLease) {
    return false;
  }
  completion.tag = command.tag;
  completion.op = command.op;
  if (const absl::Status sent = options_.channel->Send(completion); !sent.ok()) End(sent);
  return true;
}

void AgentSession::RequestSync(std::function<void()> on_done) {
  Command command{};
  command.tag = next_sync_tag_++;
  syncs_.emplace(command.tag, std::move(on_done));
  RemoteHeader header;
  header.kind = static_cast<uint16_t>(RemoteKind::kSync);
  header.number = next_number_++;
  header.Set(command);
  link_->Send(header);
}

// ---------------------------------------- from the gateway

void AgentSession::OnMessage(const RemoteHeader& header, protocol::UcxArrival& arrival) {
  if (link_->has_ended()) return;
  link_->OnHeard();
  switch (static_cast<RemoteKind>(header.kind)) {
    case RemoteKind::kPing:
      return;
    case RemoteKind::kCompletion:
      OnCompletion(header);
      return;
    case RemoteKind::kPiece:
    case RemoteKind::kRead:
      OnPiece(header, arrival);
      return;
    case RemoteKind::kAhead:
      OnAhead(header);
      return;
    case RemoteKind::kEnd:
      Close(header.As<Completion>().flags ==
                    static_cast<uint16_t>(protocol::ChannelState::kRestarting)
                ? protocol::ChannelState::kRestarting
                : protocol::ChannelState::kEnded);
      return;
    default:
      End(GatewayViolation(absl::StrCat("sent a message of kind ", header.kind)));
  }
}

void AgentSession::OnPiece(const RemoteHeader& header, protocol::UcxArrival& arrival) {
  const bool is_read = static_cast<RemoteKind>(header.kind) == RemoteKind::kRead;
  const bool is_weights = header.region == static_cast<uint16_t>(RemoteRegion::kWeights);
  const auto& memory = is_weights ? options_.weights : options_.grad_arena;
  const uint64_t size_bytes = is_weights ? memory->bytes().size() : options_.daemon_arena_bytes;
  if (!IsWithin(header.offset_bytes, header.length_bytes, size_bytes) ||
      (is_read && (!is_weights || options_.weights_address == 0))) {
    return End(GatewayViolation(absl::StrCat("sent bytes ", header.offset_bytes, " + ",
                                             header.length_bytes, " of an arena of ", size_bytes)));
  }
  const bool is_new = header.number >= pieces_ended_ &&
                      header.number - pieces_ended_ < kPiecesAheadMax &&
                      begun_.insert(header.number).second;
  if (!is_new || reads_.size() >= kReadsWaitingMax) {
    return End(
        GatewayViolation(absl::StrCat("sent piece ", header.number, " after ", pieces_ended_)));
  }
  if (is_read) {
    reads_.push_back(
        {.number = header.number,
         .range = {.offset_bytes = header.offset_bytes, .length_bytes = header.length_bytes}});
    return;
  }
  link_->Receive(arrival, memory->bytes().subspan(header.offset_bytes, header.length_bytes), memory,
                 [this, number = header.number] { OnPieceEnded(number); });
}

bool AgentSession::StartReads() {
  bool did = false;
  while (!reads_.empty() && reads_in_flight_ < protocol::kRemotePiecesInFlight &&
         !link_->has_ended()) {
    const Read read = reads_.front();
    reads_.pop_front();
    ++reads_in_flight_;
    did = true;
    link_->Get(options_.weights->bytes().subspan(read.range.offset_bytes, read.range.length_bytes),
               options_.weights_address + read.range.offset_bytes, options_.weights,
               [this, number = read.number] {
                 --reads_in_flight_;
                 OnPieceEnded(number);
               });
  }
  return did;
}

void AgentSession::OnPieceEnded(uint64_t number) {
  ended_ahead_.insert(number);
  while (!ended_ahead_.empty() && *ended_ahead_.begin() == pieces_ended_) {
    ended_ahead_.erase(ended_ahead_.begin());
    begun_.erase(pieces_ended_);
    ++pieces_ended_;
  }
  DeliverCompletions();
}

void AgentSession::OnCompletion(const RemoteHeader& header) {
  if (waiting_.size() >= 2 * protocol::kRingEntries) {
    return End(GatewayViolation("answers more commands than there are"));
  }
  waiting_.push_back({.completion = header.As<Completion>(), .pieces = header.pieces});
  DeliverCompletions();
}

void AgentSession::OnAhead(const RemoteHeader& header) {
  const Completion completion = header.As<Completion>();
  if (completion.tag >= options_.layout->partitions().size()) {
    return End(GatewayViolation(absl::StrCat("brings partition ", completion.tag)));
  }
  if (header.number < ahead_from_) return;
  ahead_[static_cast<uint32_t>(completion.tag)] = {.completion = completion,
                                                   .pieces = header.pieces};
}

void AgentSession::DeliverCompletions() {
  // Completions that arrive from within Deliver() are appended.
  for (size_t i = 0; i < waiting_.size() && !link_->has_ended();) {
    if (waiting_[i].pieces > pieces_ended_) {
      ++i;
      continue;
    }
    const Completion completion = waiting_[i].completion;
    waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
    Deliver(completion);
  }
}

void AgentSession::Deliver(const Completion& completion) {
  if ((completion.tag & protocol::kAgentTag) != 0) {
    const auto sync = syncs_.extract(completion.tag);
    if (!sync.empty()) sync.mapped()();
    return;
  }
  if (in_flight_.erase(completion.tag) == 0) {
    return End(
        GatewayViolation(absl::StrCat("answered tag ", completion.tag, ", which nobody sent")));
  }
  if (is_closed_) return;
  const absl::Status sent = options_.channel->Send(completion);
  if (!sent.ok()) End(sent);
}

// ---------------------------------------- the data thread

bool AgentSession::Poll() {
  if (link_->has_ended()) {
    OnLost();
    return false;
  }
  const bool did = !is_closed_ && ReceiveFromTrainer();
  return StartReads() || did;
}

bool AgentSession::PrepareSleep() {
  if (link_->has_ended() || is_closed_) return true;
  const absl::StatusOr<bool> may_sleep = options_.channel->PrepareSleep();
  return may_sleep.ok() && *may_sleep;  // the next Receive() returns the error
}

void AgentSession::EndSleep() {
  options_.channel->EndSleep();
  protocol::DrainDoorbell(options_.channel->wait_fd());
}

}  // namespace forebay::gateway
