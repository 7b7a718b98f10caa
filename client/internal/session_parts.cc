// SPDX-License-Identifier: Apache-2.0
#include "client/internal/session_parts.h"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/environment.h"
#include "client/internal/attach_request.h"
#include "client/internal/control.h"
#include "client/internal/remote_agent.h"
#include "gpu/host_device.h"
#include "gpu/nvtx_range.h"
#include "protocol/error.h"
#include "protocol/layout_codec.h"
#include "protocol/os/memfd.h"
#include "protocol/os/status_macros.h"
#include "protocol/trace.h"
#include "protocol/units.h"

namespace forebay::client::internal {

using protocol::ErrorId;
using protocol::MakeError;
using protocol::UniqueFd;

namespace {

// Longest pause between attempts to attach to another node's daemon. Each attempt starts a process.
constexpr std::chrono::milliseconds kAgentPauseMax{1000};

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
absl::Status MapArenas(GrantedSession& granted, const WaitLimits& limits, SessionParts& parts) {
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
AttachAgain MakeAttachAgain(std::string socket, AttachRequest request,
                            std::shared_ptr<const protocol::Layout> layout,
                            std::shared_ptr<const RemoteArenas> arenas) {
  return [socket = std::move(socket), request = std::move(request), layout = std::move(layout),
          arenas = std::move(arenas)](const SessionBefore& before,
                                      const WaitLimits& limits) -> absl::StatusOr<GrantedSession> {
    ASSIGN_OR_RETURN(const std::vector<std::byte> encoded, protocol::EncodeLayout(layout->spec()));
    return ConnectAndAttach(socket, MakeReattachRequest(request, before), encoded, limits,
                            arenas.get());
  };
}

// A daemon that is being started again does not answer meanwhile. `parts`: gets the arenas.
absl::StatusOr<GrantedSession> ConnectWithin(Timeout wait, const std::string& socket,
                                             const AttachRequest& request, const WaitLimits& limits,
                                             SessionParts& parts) {
  ASSIGN_OR_RETURN(const std::vector<std::byte> encoded,
                   protocol::EncodeLayout(parts.layout->spec()));
  constexpr std::chrono::milliseconds kPause(50);
  for (const Deadline until = Deadline::After(wait);;) {
    absl::StatusOr<GrantedSession> granted = ConnectAndAttach(socket, request, encoded, limits);
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

Counters SessionGauge::Snapshot() const {
  return {.rpc_calls = rpc_calls,
          .commands = commands,
          .sleeps = sleeps,
          .wait_ns_fetch = wait_ns_fetch,
          .wait_ns_grad = wait_ns_grad,
          .wait_ns_step = wait_ns_step,
          .wait_ns_other = wait_ns_other,
          .fetched_bytes = fetched_bytes,
          .copied_bytes = copied_bytes,
          .grad_bytes = grad_bytes,
          .private_slots = private_slots,
          .reattaches = reattaches};
}

absl::StatusOr<SessionParts> SessionParts::Create(AttachOptions options) {
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
                     .gauge = std::make_shared<SessionGauge>(),
                     .timeout = options.timeout,
                     .interrupt_check = options.interrupt_check,
                     .device = options.device};
  const AttachRequest request = MakeAttachRequest(options, *parts.layout);
  if (request->getWritableWeights()) parts.weights_access = MapAccess::kReadWrite;
  parts.grad_bytes_max = request->getGradArenaBytes();
  parts.extra_state_bytes = request->getExtraStateBytes();
  parts.activation_bytes = request->getActivationBytes();
  const std::string socket = SocketPath(options.socket);
  ASSIGN_OR_RETURN(const Timeout first_wait, FirstDaemonWait(options.durability.daemon_wait));
  ASSIGN_OR_RETURN(GrantedSession granted,
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
    std::shared_ptr<RemoteArenas> arenas;
    if (RemoteAddress(socket)) {
      arenas = std::make_shared<RemoteArenas>(RemoteArenas{
          .weights = std::move(granted.weights), .grad_arena = std::move(granted.grad_arena)});
      parts.attach_pause_max = kAgentPauseMax;
    }
    parts.attach_again = MakeAttachAgain(socket, request, parts.layout, std::move(arenas));
  }
  return parts;
}

absl::Status SessionParts::CheckArenas() const {
  const uint64_t grad_size_min = reader ? protocol::kPageBytes : layout->largest_piece_bytes();
  const uint64_t weights_size = weights->bytes().size();
  const uint64_t grad_size = grad->bytes().size();
  const uint64_t weights_size_min = weights_on_swap ? 0 : layout->weights_bytes();
  if (weights_size < weights_size_min || step_region_offset < grad_size_min ||
      step_region_offset > grad_size || step_region_bytes > grad_size - step_region_offset ||
      activation_bytes > grad_size - step_region_offset - step_region_bytes ||
      !HasRoomForTrace(*this)) {
    return MakeError(
        ErrorId::kProtocol,
        absl::StrCat("the daemon's arenas do not fit the layout: weights ", weights_size,
                     " bytes, gradients ", step_region_offset, " of ", grad_size, ", step region ",
                     step_region_bytes, ", activations ", activation_bytes));
  }
  return absl::OkStatus();
}

WaitLimits SessionParts::Limits(Timeout call_timeout) const {
  return {.deadline = Deadline::After(call_timeout), .interrupt_check = &interrupt_check};
}

absl::Status SessionParts::CheckPartition(uint32_t partition) const {
  const size_t partitions = layout->partitions().size();
  if (partition < partitions) return absl::OkStatus();
  const char* const what = layout->is_shared() ? "group" : "partition";
  return MakeError(ErrorId::kRange, absl::StrCat("there is no ", what, " ", partition,
                                                 ": the job has ", partitions, " ", what, "s"));
}

absl::Status SessionParts::CheckOwn(uint32_t partition) const {
  RETURN_IF_ERROR(CheckPartition(partition));
  const uint32_t owner = layout->partitions()[partition].owner;
  if (layout->is_shared() || owner == rank) return absl::OkStatus();
  return MakeError(ErrorId::kRank,
                   absl::StrCat("partition ", partition, " (", layout->PartitionName(partition),
                                ") is rank ", owner, "'s; this is rank ", rank),
                   "each rank writes the parameters and gradients of its own partitions");
}

absl::Status SessionParts::CheckHasRank() const {
  if (!reader) return absl::OkStatus();
  return MakeError(ErrorId::kRank, "this session is a reader: it has no rank",
                   "attach with a rank to write parameters, deliver gradients or call step");
}

void SessionParts::CopyToArena(uint64_t arena_offset, std::span<const std::byte> bytes) const {
  std::copy(bytes.begin(), bytes.end(), grad->bytes().subspan(arena_offset).begin());
}

}  // namespace forebay::client::internal
