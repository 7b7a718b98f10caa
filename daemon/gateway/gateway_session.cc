// SPDX-License-Identifier: Apache-2.0
#include "daemon/gateway/gateway_session.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
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

// Commands of the agent at once: as many as a ring has, and as many again that wait for their bytes.
constexpr size_t kWaitingMax = 2 * protocol::kRingEntries;
constexpr size_t kOwnFetchesMax = 64;  // fetches of the gateway in the daemon's ring at once
constexpr size_t kAheadFetchesMax = 4;
constexpr int kCompletionsAtOnce = 64;

bool Is(const Command& command, Op op) { return command.op == static_cast<uint16_t>(op); }

absl::Status AgentViolation(std::string_view what) {
  return MakeError(ErrorId::kProtocol, absl::StrCat("the agent ", std::string(what)));
}

}  // namespace

GatewaySession::GatewaySession(std::unique_ptr<RemoteLink> link,
                               std::unique_ptr<protocol::UcxMemory> readable,
                               GatewaySessionOptions options)
    : options_(std::move(options)),
      link_(std::move(link)),
      readable_(std::move(readable)),
      reads_remotely_(options_.reads == ReadPolicy::kOn),
      order_(options_.trace),
      is_ready_(!options_.writes_initial) {
  const std::set<uint32_t> traced(order_.begin(), order_.end());
  const auto partitions = static_cast<uint32_t>(options_.layout->partitions().size());
  for (uint32_t partition = 0; partition < partitions; ++partition) {
    if (!traced.contains(partition)) order_.push_back(partition);
  }
  if (!brings_ahead()) return;
  std::erase_if(order_, [this](uint32_t partition) { return !options_.own.contains(partition); });
}

// ---------------------------------------- from the agent

void GatewaySession::OnMessage(const RemoteHeader& header, protocol::UcxArrival& arrival) {
  if (link_->has_ended()) return;
  link_->OnHeard();
  switch (static_cast<RemoteKind>(header.kind)) {
    case RemoteKind::kPing:
      return;
    case RemoteKind::kCommand:
    case RemoteKind::kSync:
      OnCommand(header, arrival);
      return;
    default:
      End(AgentViolation(absl::StrCat("sent a message of kind ", header.kind)));
  }
}

void GatewaySession::OnCommand(const RemoteHeader& header, protocol::UcxArrival& arrival) {
  // Another session of this rank may have the arena now.
  if (options_.channel->state() != protocol::ChannelState::kOpen) return;
  const auto kind = static_cast<RemoteKind>(header.kind);
  const Command command = header.As<Command>();
  const bool is_sync = kind == RemoteKind::kSync;
  const uint64_t own_bits = protocol::kAgentTag | protocol::kGatewayTag;
  if ((command.tag & own_bits) != (is_sync ? protocol::kAgentTag : 0) ||
      (is_sync && !is_synced())) {
    return End(AgentViolation(absl::StrCat("sent a command with tag ", command.tag)));
  }
  if (header.number < next_number_ || header.number - next_number_ >= kWaitingMax ||
      incoming_.size() + in_flight_.size() + syncs_.size() >= kWaitingMax) {
    return End(
        AgentViolation(absl::StrCat("sent command ", header.number, ", with ", in_flight_.size(),
                                    " unanswered and ", incoming_.size(), " on their way")));
  }
  const std::span<std::byte> arena = options_.grad_arena->bytes();
  if (!IsWithin(header.offset_bytes, header.length_bytes, arena.size())) {
    return End(AgentViolation(absl::StrCat("named bytes ", header.offset_bytes, " + ",
                                           header.length_bytes, " of an arena of ", arena.size())));
  }
  const bool is_new =
      incoming_.emplace(header.number, Incoming{.kind = kind, .command = command}).second;
  if (!is_new) return End(AgentViolation(absl::StrCat("sent command ", header.number, " twice")));
  link_->Receive(arrival, arena.subspan(header.offset_bytes, header.length_bytes),
                 options_.grad_arena,
                 [this, number = header.number] { incoming_.at(number).has_arrived = true; });
}

bool GatewaySession::DeliverInOrder() {
  bool did = false;
  for (auto next = incoming_.find(next_number_);
       next != incoming_.end() && next->second.has_arrived && !link_->has_ended();
       next = incoming_.find(next_number_)) {
    if (MayChangeWeights(next->second.command) && !EndAhead()) break;
    const Incoming incoming = next->second;
    incoming_.erase(next);
    ++next_number_;
    Deliver(incoming);
    did = true;
  }
  return did;
}

void GatewaySession::Deliver(const Incoming& incoming) {
  const Command& command = incoming.command;
  if (incoming.kind == RemoteKind::kSync) {
    Completion completion{};
    completion.tag = command.tag;
    if (!is_ready_) return SendCompletion(completion, Behind::kNothing);
    BeginSync(command.tag, {.completion = completion, .to_fetch = {order_.begin(), order_.end()}});
    return;
  }
  if (!in_flight_.emplace(command.tag, command).second) {
    return End(AgentViolation(absl::StrCat("sent tag ", command.tag, " twice")));
  }
  to_daemon_.push_back(command);
  if (MayChangeWeights(command)) ++changing_;
  if (!is_synced() && !brings_ahead()) return;
  const bool counts = is_synced() || options_.own.contains(command.partition);
  if (Is(command, Op::kFetch) && counts && touched_set_.insert(command.partition).second) {
    touched_.push_back(command.partition);
  }
  if (!Is(command, Op::kStep)) return;
  if (!touched_.empty()) {
    // Partitions are fetched in the order of the trainer's own fetches: the daemon uses that order for its update.
    std::erase_if(order_, [this](uint32_t partition) { return touched_set_.contains(partition); });
    order_.insert(order_.begin(), touched_.begin(), touched_.end());
    touched_.clear();
    touched_set_.clear();
  }
  if (is_synced()) BeginSync(command.tag, {.to_fetch = {order_.begin(), order_.end()}});
}

// ---------------------------------------- to and from the daemon

bool GatewaySession::SendToDaemon() {
  bool did = false;
  while (!to_daemon_.empty() && !daemon_has_ended_) {
    const absl::StatusOr<bool> sent = options_.channel->Send(to_daemon_.front());
    if (!sent.ok()) {
      End(sent.status());
      return true;
    }
    if (!*sent) break;
    to_daemon_.pop_front();
    did = true;
  }
  return did;
}

bool GatewaySession::ReceiveFromDaemon() {
  for (int i = 0; i < kCompletionsAtOnce; ++i) {
    if (daemon_has_ended_ || link_->has_ended()) return i > 0;
    const absl::StatusOr<std::optional<Completion>> received = options_.channel->Receive();
    if (received.ok() && !received->has_value()) return i > 0;
    if (received.ok()) {
      OnCompletion(**received);
      continue;
    }
    if (protocol::IdOf(received.status()) != ErrorId::kFenced) {
      End(received.status());
      return true;
    }
    // The agent asks for the reason over the control plane.
    daemon_has_ended_ = true;
    RemoteHeader header;
    header.kind = static_cast<uint16_t>(RemoteKind::kEnd);
    Completion over{};
    over.flags = static_cast<uint16_t>(options_.channel->state());
    header.Set(over);
    link_->Send(header);
  }
  return true;
}

void GatewaySession::OnCompletion(const Completion& completion) {
  if ((completion.tag & protocol::kGatewayTag) != 0) return OnOwnFetch(completion);
  const auto found = in_flight_.extract(completion.tag);
  if (found.empty()) {
    return End(MakeError(ErrorId::kProtocol, absl::StrCat("the daemon answered tag ",
                                                          completion.tag, ", which nobody sent")));
  }
  const Command& command = found.mapped();
  const bool is_prepared = (completion.flags & protocol::kStepPrepared) != 0;  // nothing changed
  if (MayChangeWeights(command) && --changing_ == 0 && !is_prepared) BringAhead();
  if (const auto sync = syncs_.find(completion.tag); sync != syncs_.end()) {
    sync->second.completion = completion;
    return TryEndSync(completion.tag);
  }
  const bool is_ok = completion.error == 0;
  if (is_ok && Is(command, Op::kInitialDone)) {
    is_ready_ = true;
    if (is_synced()) {
      return BeginSync(completion.tag,
                       {.completion = completion, .to_fetch = {order_.begin(), order_.end()}});
    }
  }
  if (is_ok && Is(command, Op::kWriteState) && command.kind == 0 && is_ready_ && is_synced()) {
    return BeginSync(
        completion.tag,
        {.completion = completion, .to_fetch = {command.partition}, .written = command});
  }
  Answer(completion, command);
}

void GatewaySession::Answer(const Completion& completion, const Command& command) {
  const bool is_prepared = (completion.flags & protocol::kStepPrepared) != 0;
  if (completion.error != 0) return SendCompletion(completion, Behind::kNothing);
  if (Is(command, Op::kFetch)) {
    QueuePartition(command.partition, completion, std::nullopt);
  } else if (Is(command, Op::kReadState)) {
    QueueRange({.region = RemoteRegion::kGradArena,
                .offset_bytes = command.arena_offset_bytes,
                .length_bytes = command.length_bytes});
  } else if (is_prepared && (Is(command, Op::kStep) || Is(command, Op::kDecide))) {
    QueueRange({.region = RemoteRegion::kGradArena,
                .offset_bytes = protocol::StepSummaryOffset(options_.step_region, *options_.layout),
                .length_bytes = protocol::NodeSummaryBytes(*options_.layout)});
  } else {
    return SendCompletion(completion, Behind::kNothing);
  }
  SendCompletion(completion, Behind::kPieces);
}

// ---------------------------------------- to the agent

void GatewaySession::SendCompletion(const Completion& completion, Behind behind) {
  RemoteHeader header;
  header.kind = static_cast<uint16_t>(RemoteKind::kCompletion);
  header.pieces = behind == Behind::kPieces ? pieces_queued_ : 0;
  header.Set(completion);
  link_->Send(header);
}

void GatewaySession::QueueRange(const Piece& range) {
  const uint64_t arena_bytes = range.region == RemoteRegion::kWeights
                                   ? options_.weights->bytes().size()
                                   : options_.grad_arena->bytes().size();
  if (!IsWithin(range.offset_bytes, range.length_bytes, arena_bytes)) {
    return End(MakeError(ErrorId::kProtocol,
                         absl::StrCat("the daemon named bytes ", range.offset_bytes, " + ",
                                      range.length_bytes, " of an arena of ", arena_bytes)));
  }
  const bool is_read = reads_remotely() && range.region == RemoteRegion::kWeights;
  const uint64_t piece_bytes = is_read ? protocol::kRemoteReadBytes : protocol::kRemotePieceBytes;
  for (uint64_t begin = 0; begin < range.length_bytes; begin += piece_bytes) {
    outgoing_.push_back({.region = range.region,
                         .offset_bytes = range.offset_bytes + begin,
                         .length_bytes = std::min(piece_bytes, range.length_bytes - begin)});
    ++pieces_queued_;
  }
}

bool GatewaySession::reads_remotely() {
  if (!reads_remotely_ && options_.reads == ReadPolicy::kAuto && readable_ != nullptr) {
    reads_remotely_ = link_->endpoint().reads_in_hardware();
  }
  return reads_remotely_;
}

void GatewaySession::Note(uint32_t partition, const WeightsVersion& version) {
  const auto [known, is_new] = known_.try_emplace(partition, version);
  if (!is_new && known->second.offset_bytes == version.offset_bytes) {
    known->second = version;
    return;
  }
  if (!is_new) known_at_.erase(known->second.offset_bytes);
  known->second = version;
  // In a cache of weights, the agent may know other partitions at these bytes. Forgets those partitions.
  const uint64_t end = version.offset_bytes + options_.layout->partition_bytes(partition);
  auto other = known_at_.lower_bound(version.offset_bytes);
  if (other != known_at_.begin()) {
    const auto before = std::prev(other);
    const uint64_t before_end = before->first + options_.layout->partition_bytes(before->second);
    if (before_end > version.offset_bytes) other = before;
  }
  while (other != known_at_.end() && other->first < end) {
    known_.erase(other->second);
    other = known_at_.erase(other);
  }
  known_at_.emplace(version.offset_bytes, partition);
}

void GatewaySession::QueuePartition(uint32_t partition, const Completion& fetched,
                                    const std::optional<Command>& written) {
  const WeightsVersion version{.offset_bytes = fetched.offset_bytes,
                               .step = fetched.committed_step,
                               .writes = fetched.attempt};
  const auto known = known_.find(partition);
  const bool has_any = known != known_.end() && known->second.offset_bytes == version.offset_bytes;
  const WeightsVersion before = has_any ? known->second : WeightsVersion{};
  Note(partition, version);
  if (has_any && before == version) return;
  const bool is_same_step = has_any && before.step == version.step;
  if (written && is_same_step && before.writes + 1 == version.writes) {
    const uint64_t width = protocol::SizeBytes(options_.layout->spec().dtype);
    const uint64_t elems = written->length_bytes / sizeof(float);
    return QueueRange({.region = RemoteRegion::kWeights,
                       .offset_bytes = version.offset_bytes + written->element_offset * width,
                       .length_bytes = elems * width});
  }
  const bool is_unwritten = has_any && before.writes == version.writes;
  for (const WeightsRange& range : RangesOf(*options_.layout, partition)) {
    if (is_unwritten && (is_same_step || !range.is_trainable)) continue;
    QueueRange({.region = RemoteRegion::kWeights,
                .offset_bytes = version.offset_bytes + range.offset_bytes,
                .length_bytes = range.size_bytes});
  }
}

bool GatewaySession::SendPieces() {
  bool did = false;
  while (!outgoing_.empty() && pieces_in_flight_ < protocol::kRemotePiecesInFlight &&
         !link_->has_ended()) {
    const Piece piece = outgoing_.front();
    outgoing_.pop_front();
    const bool is_weights = piece.region == RemoteRegion::kWeights;
    RemoteHeader header;
    header.region = static_cast<uint16_t>(piece.region);
    header.number = pieces_sent_++;
    header.offset_bytes = piece.offset_bytes;
    header.length_bytes = piece.length_bytes;
    did = true;
    if (is_weights && reads_remotely()) {
      header.kind = static_cast<uint16_t>(RemoteKind::kRead);
      link_->Send(header);
      continue;
    }
    header.kind = static_cast<uint16_t>(RemoteKind::kPiece);
    const auto& memory = is_weights ? options_.weights : options_.grad_arena;
    ++pieces_in_flight_;
    link_->Send(header, memory->bytes().subspan(piece.offset_bytes, piece.length_bytes), memory,
                [this] { --pieces_in_flight_; });
  }
  return did;
}

// ---------------------------------------- sharded attachment

// Nothing is brought ahead if the agent reads weights itself: the gateway does not know when such a read has ended.
void GatewaySession::BringAhead() {
  if (brings_ahead() && !reads_remotely()) ahead_to_fetch_ = {order_.begin(), order_.end()};
}

bool GatewaySession::EndAhead() {
  if (!brings_ahead()) return true;
  ahead_to_fetch_.clear();
  // The daemon may answer outstanding fetches only after the command. The new turn makes OnFetchedAhead() drop those answers.
  ++ahead_turn_;
  ahead_fetches_ = 0;
  return outgoing_.empty() && pieces_in_flight_ == 0;
}

// ---------------------------------------- shared attachment

void GatewaySession::BeginSync(uint64_t tag, Sync sync) {
  if (!syncs_.emplace(tag, std::move(sync)).second) {
    return End(AgentViolation(absl::StrCat("sent tag ", tag, " twice")));
  }
  TryEndSync(tag);
}

bool GatewaySession::FetchForItself() {
  bool did = false;
  const auto fetch = [&](std::deque<uint32_t>& partitions, uint64_t sync_tag) {
    Command command{};
    command.tag = next_own_tag_++;
    command.op = static_cast<uint16_t>(Op::kFetch);
    command.kind = static_cast<uint16_t>(protocol::FetchKind::kPlace);
    command.partition = partitions.front();
    partitions.pop_front();
    own_fetches_.emplace(command.tag, OwnFetch{.sync_tag = sync_tag,
                                               .partition = command.partition,
                                               .behind = next_number_,
                                               .turn = ahead_turn_});
    to_daemon_.push_back(command);
    did = true;
  };
  for (auto& [tag, sync] : syncs_) {
    for (; !sync.to_fetch.empty() && own_fetches_.size() < kOwnFetchesMax; ++sync.fetching) {
      fetch(sync.to_fetch, tag);
    }
  }
  // Few fetches at a time: a fetch of the trainer that is out of order waits behind them.
  for (; !ahead_to_fetch_.empty() && ahead_fetches_ < kAheadFetchesMax &&
         outgoing_.size() < protocol::kRemotePiecesInFlight;
       ++ahead_fetches_) {
    fetch(ahead_to_fetch_, 0);
  }
  return did;
}

void GatewaySession::OnOwnFetch(const Completion& completion) {
  const auto found = own_fetches_.extract(completion.tag);
  if (found.empty()) return;
  const OwnFetch fetch = found.mapped();
  if (fetch.sync_tag == 0) return OnFetchedAhead(fetch, completion);
  const auto sync = syncs_.find(fetch.sync_tag);
  if (sync == syncs_.end()) return;
  --sync->second.fetching;
  if (completion.error != 0) {
    sync->second.error = completion.error;
  } else {
    QueuePartition(fetch.partition, completion, sync->second.written);
  }
  TryEndSync(fetch.sync_tag);
}

void GatewaySession::OnFetchedAhead(const OwnFetch& fetch, Completion completion) {
  if (fetch.turn != ahead_turn_) return;
  --ahead_fetches_;
  if (completion.error != 0) return;  // the trainer's own fetch gets the error
  QueuePartition(fetch.partition, completion, std::nullopt);
  RemoteHeader header;
  header.kind = static_cast<uint16_t>(RemoteKind::kAhead);
  header.number = fetch.behind;
  header.pieces = pieces_queued_;
  completion.tag = fetch.partition;
  header.Set(completion);
  link_->Send(header);
}

void GatewaySession::TryEndSync(uint64_t tag) {
  const Sync& sync = syncs_.at(tag);
  if (!sync.completion || !sync.to_fetch.empty() || sync.fetching > 0) return;
  if (sync.completion->error == 0 && sync.error != 0) {
    return End(MakeError(
        ErrorId::kRemote,
        absl::StrCat("the weights could not be read: ",
                     std::string(protocol::Info(static_cast<ErrorId>(sync.error)).name))));
  }
  SendCompletion(*sync.completion, Behind::kPieces);
  syncs_.erase(tag);
}

// ---------------------------------------- the data thread

bool GatewaySession::Poll() {
  if (link_->has_ended()) return false;
  bool did = DeliverInOrder();
  did = FetchForItself() || did;
  did = SendToDaemon() || did;
  did = ReceiveFromDaemon() || did;
  return SendPieces() || did;
}

bool GatewaySession::PrepareSleep() {
  if (link_->has_ended() || daemon_has_ended_) return true;
  const absl::StatusOr<bool> may_sleep = options_.channel->PrepareSleep();
  return may_sleep.ok() && *may_sleep;  // the next Receive() returns the error
}

void GatewaySession::EndSleep() {
  if (!daemon_has_ended_) options_.channel->EndSleep();
}

}  // namespace forebay::gateway
