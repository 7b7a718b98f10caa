// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/environment.h"
#include "client/internal/attach_request.h"
#include "client/internal/attachment_state.h"
#include "client/internal/control.h"
#include "client/internal/deadline.h"
#include "client/internal/mapping.h"
#include "client/internal/stopwatch.h"
#include "client/window_registry.h"
#include "gpu/host_device.h"
#include "gpu/nvtx_range.h"
#include "protocol/error.h"
#include "protocol/layout_codec.h"
#include "protocol/os/memfd.h"
#include "protocol/os/mutex.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"

namespace forebay::client {
namespace {

using internal::Control;
using internal::DaemonGoneError;
using internal::Deadline;
using internal::MapAccess;
using internal::Mapping;
using internal::SessionParts;
using internal::Stopwatch;
using internal::WaitLimits;
using protocol::ErrorId;
using protocol::MakeError;
using protocol::UniqueFd;

// Longest pause between attempts to attach to another node's daemon. Each attempt starts a process.
constexpr std::chrono::milliseconds kAgentPauseMax{1000};
constexpr Timeout kLastCopiesTimeout = std::chrono::seconds(10);

absl::StatusOr<std::vector<std::byte>> ReadExtraState(int fd, uint64_t size_bytes) {
  std::vector<std::byte> bytes(size_bytes);
  const int64_t got = protocol::ReadFromStart(fd, bytes);
  if (got == static_cast<int64_t>(size_bytes)) return bytes;
  return MakeError(ErrorId::kProtocol, absl::StrCat("the daemon sent ", got, " of the ", size_bytes,
                                                    " bytes of extra_state"));
}

// Returns true if the arena has room for the trace behind its other parts.
bool HasRoomForTrace(const SessionParts& parts) {
  if (parts.trace_bytes == 0) return true;
  const uint64_t before_bytes =
      parts.step_region_offset + parts.step_region_bytes + parts.activation_bytes;
  return parts.trace_bytes >= sizeof(protocol::TraceMemory) &&
         parts.trace_bytes % protocol::kPageBytes == 0 &&
         parts.trace_bytes <= parts.grad->bytes().size() - before_bytes;
}

// Maps the arenas, and reads the committed extra_state.
absl::Status MapArenas(internal::GrantedSession& granted, const WaitLimits& limits,
                       SessionParts& parts) {
  const schema::AttachReply::Reader& reply = *granted.reply;
  Control& control = *granted.connection->control;
  const uint64_t own_bytes = reply.getExtraStateBytes();
  const uint64_t rank0_bytes = reply.getRank0ExtraStateBytes();
  if (std::max(own_bytes, rank0_bytes) > protocol::kExtraStateBytesMax) {
    return MakeError(
        ErrorId::kProtocol,
        absl::StrCat("the daemon names ", own_bytes, " bytes of extra_state of this rank and ",
                     rank0_bytes, " of rank 0 (at most ", protocol::kExtraStateBytesMax, " each)"));
  }
  parts.extra_state.clear();  // may hold the bytes of an earlier attempt
  parts.rank0_extra_state.clear();
  if (own_bytes + rank0_bytes > 0) {
    ASSIGN_OR_RETURN(const UniqueFd extra_fd,
                     control.Descriptor(schema::Session::Kind::EXTRA_STATE, limits));
    ASSIGN_OR_RETURN(parts.extra_state, ReadExtraState(extra_fd.get(), own_bytes + rank0_bytes));
    const auto own_end = parts.extra_state.begin() + static_cast<ptrdiff_t>(own_bytes);
    parts.rank0_extra_state.assign(own_end, parts.extra_state.end());
    parts.extra_state.erase(own_end, parts.extra_state.end());
  }
  ASSIGN_OR_RETURN(
      parts.weights,
      Mapping::MapFile(granted.weights.get(), granted.terms.weights_bytes, parts.weights_access));
  ASSIGN_OR_RETURN(parts.grad,
                   Mapping::MapFile(granted.grad_arena.get(), granted.terms.grad_arena_bytes,
                                    MapAccess::kReadWrite));
  if (parts.layout->is_shared() && !parts.reader) {
    parts.weights_file = protocol::DuplicateFd(granted.weights.get());
    if (!parts.weights_file.valid()) {
      return MakeError(ErrorId::kLimit,
                       protocol::ErrnoText("another descriptor of the weights", errno),
                       "raise ulimit -n");
    }
  }
  return control.Mapped(limits);
}

// Returns the function by which a rank attaches again after a restart of the daemon. The function encodes the layout on each
// call: that costs less than to retain the encoded layout. `arenas`: the local arenas if the daemon is on another node, else
// null.
internal::AttachAgain MakeAttachAgain(std::string socket, internal::AttachRequest request,
                                      std::shared_ptr<const protocol::Layout> layout,
                                      std::shared_ptr<const internal::RemoteArenas> arenas) {
  return [socket = std::move(socket), request = std::move(request), layout = std::move(layout),
          arenas = std::move(arenas)](
             const internal::SessionBefore& before,
             const WaitLimits& limits) -> absl::StatusOr<internal::GrantedSession> {
    ASSIGN_OR_RETURN(const std::vector<std::byte> encoded, protocol::EncodeLayout(layout->spec()));
    return internal::ConnectAndAttach(socket, internal::MakeReattachRequest(request, before),
                                      encoded, limits, arenas.get());
  };
}

// A daemon that is being started again does not answer meanwhile. `parts`: gets the arenas.
absl::StatusOr<internal::GrantedSession> ConnectWithin(Timeout wait, const std::string& socket,
                                                       const internal::AttachRequest& request,
                                                       const WaitLimits& limits,
                                                       SessionParts& parts) {
  ASSIGN_OR_RETURN(const std::vector<std::byte> encoded,
                   protocol::EncodeLayout(parts.layout->spec()));
  constexpr std::chrono::milliseconds kPause(50);
  for (const Deadline until = Deadline::After(wait);;) {
    absl::StatusOr<internal::GrantedSession> granted =
        internal::ConnectAndAttach(socket, request, encoded, limits);
    if (granted.ok()) {
      const absl::Status mapped = MapArenas(*granted, limits, parts);
      if (!mapped.ok()) granted = mapped;
    }
    const ErrorId id = protocol::IdOf(granted.status());
    const bool is_passing =
        id == ErrorId::kNoDaemon || id == ErrorId::kDaemonGone || id == ErrorId::kRemote;
    if (!is_passing || until.Expired() || limits.deadline.Expired()) return granted;
    if (limits.Interrupted()) {
      return MakeError(ErrorId::kInterrupted, "attach was interrupted while no daemon answered");
    }
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<Attachment>> Attachment::Attach(AttachOptions options) {
  const Nodes& nodes = options.nodes;
  if (nodes.world_ranks == 0) return AttachHere(std::move(options));
  if (nodes.all_gather) return AttachOverNodes(options);
  return MakeError(
      ErrorId::kRank,
      absl::StrCat("a job of ", nodes.world_ranks, " ranks, of which ", options.world_size,
                   " are on this node, without an all_gather between its nodes"),
      "give AttachOptions::nodes.all_gather, over the ranks' process group (MPI, "
      "gloo), or start all ranks on one node");
}

absl::StatusOr<std::unique_ptr<Attachment>> Attachment::AttachHere(AttachOptions options) {
  gpu::AttachNvtxTool(NvtxTool());
  if (options.device == nullptr) options.device = std::make_shared<gpu::HostDevice>();
  options.is_on_gpu = !options.device->is_host();
  const WaitLimits limits{.deadline = Deadline::After(options.timeout),
                          .interrupt_check = &options.interrupt_check};
  ASSIGN_OR_RETURN(protocol::Layout layout, protocol::Layout::Create(options.layout));
  ASSIGN_OR_RETURN(const Timeout daemon_wait, DaemonWait(options.durability.daemon_wait));
  SessionParts parts{.job = options.job,
                     .layout = std::make_shared<const protocol::Layout>(std::move(layout)),
                     .reader = options.reader,
                     .rank = options.rank,
                     .nodes = options.nodes,
                     .daemon_wait = daemon_wait,
                     .gauge = std::make_shared<internal::SessionGauge>(),
                     .timeout = options.timeout,
                     .interrupt_check = options.interrupt_check,
                     .device = options.device};
  const internal::AttachRequest request = internal::MakeAttachRequest(options, *parts.layout);
  if (request->getWritableWeights()) parts.weights_access = MapAccess::kReadWrite;
  parts.grad_bytes_max = request->getGradArenaBytes();
  parts.extra_state_bytes = request->getExtraStateBytes();
  parts.activation_bytes = request->getActivationBytes();
  const std::string socket = SocketPath(options.socket);
  ASSIGN_OR_RETURN(const Timeout first_wait, FirstDaemonWait(options.durability.daemon_wait));
  ASSIGN_OR_RETURN(internal::GrantedSession granted,
                   ConnectWithin(first_wait, socket, request, limits, parts));
  const schema::AttachReply::Reader& reply = *granted.reply;
  parts.writes_initial = reply.getWritesInitial();
  parts.weights_on_swap = granted.terms.weights_on_swap;
  if (options.drain.value_or(!parts.layout->is_shared())) {
    parts.step_answered_when = protocol::StepAnswer::kCommitted;
  }
  for (const uint32_t partition : reply.getTrace()) parts.trace.push_back(partition);
  parts.attempt = reply.getAttempt();
  parts.prepared_step = reply.getPreparedStep();
  parts.durable_step = reply.getDurableStep();
  parts.durable_before = reply.getDurableBefore();
  const auto summary = reply.getSummary();
  const auto* const summary_begin = reinterpret_cast<const std::byte*>(summary.begin());
  parts.summary.assign(summary_begin, summary_begin + summary.size());
  parts.gauge->committed_step = granted.terms.committed_step;
  parts.step_region_offset = granted.terms.step_region_offset;
  parts.step_region_bytes = granted.terms.step_region_bytes;
  parts.trace_bytes = granted.terms.trace_bytes;
  if (options.rank == 0) parts.rank0_extra_state = parts.extra_state;
  parts.gauge->rpc_calls = granted.connection->control->thread().calls();
  parts.terms = granted.terms;
  parts.connection = std::move(granted.connection);
  parts.port = std::move(granted.port);
  if (!parts.reader) {
    std::shared_ptr<internal::RemoteArenas> arenas;
    if (internal::RemoteAddress(socket)) {
      arenas = std::make_shared<internal::RemoteArenas>(internal::RemoteArenas{
          .weights = std::move(granted.weights), .grad_arena = std::move(granted.grad_arena)});
      parts.attach_pause_max = kAgentPauseMax;
    }
    parts.attach_again = MakeAttachAgain(socket, request, parts.layout, std::move(arenas));
  }
  return Assemble(std::move(parts));
}

absl::StatusOr<std::unique_ptr<Attachment>> Attachment::Assemble(SessionParts parts) {
  const uint64_t grad_bytes_min =
      parts.reader ? protocol::kPageBytes : internal::PieceBytes(*parts.layout);
  const uint64_t weights_bytes = parts.weights->bytes().size();
  const uint64_t grad_bytes = parts.grad->bytes().size();
  const uint64_t weights_bytes_min = parts.weights_on_swap ? 0 : parts.layout->weights_bytes();
  if (weights_bytes < weights_bytes_min || parts.step_region_offset < grad_bytes_min ||
      parts.step_region_offset > grad_bytes ||
      parts.step_region_bytes > grad_bytes - parts.step_region_offset ||
      parts.activation_bytes > grad_bytes - parts.step_region_offset - parts.step_region_bytes ||
      !HasRoomForTrace(parts)) {
    return MakeError(ErrorId::kProtocol,
                     absl::StrCat("the daemon's arenas do not fit the layout: weights ",
                                  weights_bytes, " bytes, gradients ", parts.step_region_offset,
                                  " of ", grad_bytes, ", step region ", parts.step_region_bytes,
                                  ", activations ", parts.activation_bytes));
  }
  auto state = std::make_unique<State>(std::move(parts));
  const SessionParts& own = state->parts;
  if (own.trace_bytes > 0) {
    auto* const memory = own.grad->bytes().last(own.trace_bytes).data();
    state->trace.emplace(*reinterpret_cast<protocol::TraceMemory*>(memory));
    state->device_trace->Enable();
  }
  RETURN_IF_ERROR(state->RegisterArenas());
  state->window = RegisterWindow(own.weights->bytes(), own.job, WindowParts(*own.layout));
  return std::unique_ptr<Attachment>(new Attachment(std::move(state)));
}

Attachment::Attachment(std::unique_ptr<State> state) : state_(std::move(state)) {}

std::span<std::byte> Attachment::activation_room() const {
  const SessionParts& parts = state_->parts;
  if (parts.grad == nullptr) return {};
  return parts.grad->bytes().subspan(parts.step_region_offset + parts.step_region_bytes,
                                     parts.activation_bytes);
}
std::shared_ptr<const void> Attachment::activation_owner() const {
  struct Owner {
    std::shared_ptr<Mapping> mapping;
    std::shared_ptr<gpu::HostRegistration> registration;  // dies first
  };
  return std::make_shared<Owner>(Owner{state_->parts.grad, state_->grad_registration});
}

std::atomic<uint64_t>* Attachment::activation_mark() const {
  const SessionParts& parts = state_->parts;
  if (parts.grad == nullptr || parts.activation_bytes == 0) return nullptr;
  const uint64_t end = parts.step_region_offset + parts.step_region_bytes;
  std::byte* const mark = parts.grad->bytes().subspan(end - protocol::kSessionMarkBytes).data();
  return reinterpret_cast<std::atomic<uint64_t>*>(mark);
}
std::shared_ptr<internal::DeviceTrace> Attachment::device_trace() const {
  return state_->device_trace;
}

Attachment::~Attachment() {
  // In a forked child the threads do not exist and locks may be held, so the destructor destroys nothing.
  if (state_->InChild()) {
    state_.release();
    return;
  }
  state_->copy_watch.Stop();
  state_->EndIfRestarting();
  // The device reads and writes this memory until its copies have ended.
  const WaitLimits limits{.deadline = Deadline::After(kLastCopiesTimeout)};
  if (!state_->WaitForCopies([this] { return !state_->HasCopies(); }, limits).ok()) {
    state_.release();  // copies still use the state: leak it
  }
}

absl::Status Attachment::Detach() {
  State& s = *state_;
  const CallLock lock(s);
  if (s.detached && protocol::IdOf(lock.status()) != ErrorId::kForked) return absl::OkStatus();
  RETURN_IF_ERROR(lock.status());
  const WaitLimits limits{.deadline = Deadline::After(s.parts.timeout)};
  const bool is_back = s.ReattachOnce(limits);
  bool has_daemon = !s.EndIfRestarting() && is_back;
  RETURN_IF_ERROR(s.WaitForCopies([&] { return !s.HasCopies(); }, s.Limits(s.parts.timeout)));
  has_daemon = has_daemon && !s.EndIfRestarting();
  s.detached = true;
  s.open.clear();
  s.pieces.clear();
  s.fetches.clear();
  if (s.parts.connection == nullptr) return s.device_error;
  absl::Status status = s.device_error;
  for (bool asks = has_daemon && !s.is_ended; asks;) {
    status = s.parts.connection->control->Detach(limits);
    // If the connection was lost meanwhile and cannot be restored, the session ends on this side only.
    const bool is_lost = s.IsRestartingSoon(status);
    if (is_lost) status = absl::OkStatus();
    asks = is_lost && !limits.deadline.Expired() && s.ReattachOnce(limits) && !s.EndIfRestarting();
  }
  s.UpdateCalls();
  s.port.Close(DaemonGoneError());
  s.trace.reset();
  s.device_trace->Disable();
  s.parts.connection.reset();
  s.stream.reset();
  s.grad_registration.reset();
  s.parts.grad.reset();
  return status;
}

absl::StatusOr<std::vector<std::string>> Attachment::Exchange(const std::string& bytes,
                                                              Timeout timeout) {
  State& s = *state_;
  const CallLock lock(s);
  RETURN_IF_ERROR(lock.status());
  const Stopwatch stopwatch(s.gauge.wait_ns_other);
  RETURN_IF_ERROR(s.CheckHasRank());
  RETURN_IF_ERROR(s.device_error);
  if (s.parts.connection == nullptr) {
    return MakeError(ErrorId::kUnsupported, "an exchange without a daemon");
  }
  if (bytes.size() > protocol::kExchangeBytesMax) {
    return MakeError(ErrorId::kRange,
                     absl::StrCat("an exchange of ", bytes.size(), " bytes a rank; at most ",
                                  protocol::kExchangeBytesMax));
  }
  if (s.parts.nodes.world_ranks > 0) return s.parts.nodes.all_gather(bytes);
  const WaitLimits limits = s.Limits(timeout);
  while (true) {
    RETURN_IF_ERROR(s.ReattachIfRestarting(limits));
    auto all = s.parts.connection->control->Exchange(bytes, s.exchanges, limits);
    if (all.ok()) {
      ++s.exchanges;
      s.exchanged = *all;
      return all;
    }
    // The daemon knows by the number whether the others have had the answer.
    if (!s.IsRestartingSoon(all.status())) return all;
  }
}

absl::Status Attachment::CheckSession(Timeout timeout) {
  State& s = *state_;
  const CallLock lock(s, CallLock::Busy::kGiveUp);
  RETURN_IF_ERROR(lock.status());
  if (lock.gave_up()) return absl::OkStatus();  // the call that runs finds out by itself
  const Stopwatch stopwatch(s.gauge.wait_ns_other);
  RETURN_IF_ERROR(s.device_error);
  return s.Call(internal::MakeCommand(protocol::Op::kCheck), nullptr, s.Limits(timeout)).status();
}

uint32_t Attachment::rank() const { return state_->parts.rank; }
std::string_view Attachment::device_name() const { return state_->parts.device->name(); }
uint64_t Attachment::gradient_room_bytes() const { return state_->slots.capacity_bytes(); }
bool Attachment::weights_on_swap() const { return state_->parts.weights_on_swap; }
bool Attachment::writes_initial() const { return state_->parts.writes_initial; }
uint64_t Attachment::went_back_from() const { return state_->parts.went_back_from; }
uint64_t Attachment::committed_step() const { return state_->committed_step(); }
std::span<const std::byte> Attachment::extra_state() const { return state_->parts.extra_state; }
std::span<const std::byte> Attachment::rank0_extra_state() const {
  return state_->parts.rank0_extra_state;
}
std::span<const uint32_t> Attachment::trace() const { return state_->parts.trace; }
const protocol::Layout& Attachment::layout() const { return *state_->parts.layout; }
std::string Attachment::device_access() const {
  const State& s = *state_;
  const bool was_writable = s.parts.weights_access == MapAccess::kReadWrite;
  const char* const registered =
      was_writable ? "in place (mapped writable once, to register them)" : "in place";
  const size_t ring_mib = gpu::PinnedRing::kSlots * gpu::PinnedRing::kSlotBytes / protocol::kMiB;
  return absl::StrCat(
      std::string(s.parts.device->name()), " reads weights ",
      s.ring == nullptr ? registered : absl::StrCat("through a ring of ", ring_mib, " MiB"),
      s.grad_registration == nullptr ? "; it cannot reach the gradients' memory by itself" : "");
}
absl::Status Attachment::CheckPartition(uint32_t partition) const {
  return state_->CheckPartition(partition);
}
std::span<const std::byte> Attachment::weights() const { return state_->parts.weights->bytes(); }

std::span<const std::byte> Attachment::weights(uint32_t group) const {
  return weights().subspan(layout().groups()[group].weights_offset_bytes,
                           layout().partition_bytes(group));
}

std::shared_ptr<const void> Attachment::weights_owner() const { return state_->parts.weights; }

Counters Attachment::counters() const { return state_->gauge.Snapshot(); }

}  // namespace forebay::client
