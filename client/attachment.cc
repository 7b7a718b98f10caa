// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/internal/attachment_state.h"
#include "client/internal/deadline.h"
#include "client/internal/mapping.h"
#include "client/internal/session_parts.h"
#include "client/internal/stopwatch.h"
#include "client/window_registry.h"
#include "protocol/error.h"
#include "protocol/os/mutex.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"

namespace forebay::client {
namespace {

using internal::DaemonGoneError;
using internal::Deadline;
using internal::MapAccess;
using internal::Mapping;
using internal::SessionParts;
using internal::Stopwatch;
using internal::WaitLimits;
using protocol::ErrorId;
using protocol::MakeError;

constexpr Timeout kLastCopiesTimeout = std::chrono::seconds(10);

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
  ASSIGN_OR_RETURN(SessionParts parts, SessionParts::Create(std::move(options)));
  return Assemble(std::move(parts));
}

absl::StatusOr<std::unique_ptr<Attachment>> Attachment::Assemble(SessionParts parts) {
  RETURN_IF_ERROR(parts.CheckArenas());
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
  RETURN_IF_ERROR(s.WaitForCopies([&] { return !s.HasCopies(); }, s.parts.Limits(s.parts.timeout)));
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
  RETURN_IF_ERROR(s.parts.CheckHasRank());
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
  const WaitLimits limits = s.parts.Limits(timeout);
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
  return s.Call(internal::MakeCommand(protocol::Op::kCheck), nullptr, s.parts.Limits(timeout))
      .status();
}

uint32_t Attachment::rank() const { return state_->parts.rank; }
std::string_view Attachment::device_name() const { return state_->parts.device->name(); }
uint64_t Attachment::gradient_room_bytes() const { return state_->slots.capacity_bytes(); }
bool Attachment::weights_on_swap() const { return state_->parts.weights_on_swap; }
bool Attachment::writes_initial() const { return state_->parts.writes_initial; }
uint64_t Attachment::went_back_from() const { return state_->parts.went_back_from; }
uint64_t Attachment::committed_step() const { return state_->parts.committed_step(); }
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
  return state_->parts.CheckPartition(partition);
}
std::span<const std::byte> Attachment::weights() const { return state_->parts.weights->bytes(); }

std::span<const std::byte> Attachment::weights(uint32_t group) const {
  return weights().subspan(layout().groups()[group].weights_offset_bytes,
                           layout().partition_bytes(group));
}

std::shared_ptr<const void> Attachment::weights_owner() const { return state_->parts.weights; }

Counters Attachment::counters() const { return state_->gauge.Snapshot(); }

}  // namespace forebay::client
