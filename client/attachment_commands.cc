// SPDX-License-Identifier: Apache-2.0
// The initial parameters, leases, reads of states.

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/internal/attachment_state.h"
#include "client/internal/stopwatch.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"

namespace forebay::client {

using internal::BusyRange;
using internal::MakeCommand;
using internal::Stopwatch;
using internal::WaitLimits;
using protocol::Command;
using protocol::Completion;
using protocol::ErrorId;
using protocol::MakeError;
using protocol::Op;

absl::StatusOr<uint16_t> internal::StateNumber(const protocol::Layout& layout,
                                               std::string_view state) {
  const protocol::Optimizer optimizer = layout.spec().optimizer;
  const std::vector<std::string> states = protocol::StateNames(optimizer);
  const auto found = std::find(states.begin(), states.end(), state);
  if (found != states.end()) return static_cast<uint16_t>(found - states.begin());
  return MakeError(ErrorId::kRange,
                   absl::StrCat("optimizer ", std::string(Name(optimizer)), " has no state \"",
                                std::string(state), "\""),
                   absl::StrCat("its states are ", absl::StrJoin(states, ", ")));
}

namespace {

constexpr uint64_t kReadPieceElemsMax = uint64_t{1} << 20;

// A parameter and one of its states as the wire numbers them.
struct StateIndex {
  uint32_t param = 0;
  uint16_t state = 0;
};

absl::StatusOr<StateIndex> IndexOf(const protocol::Layout& layout, const StateRange& range,
                                   uint64_t elems) {
  const protocol::LayoutSpec& spec = layout.spec();
  const auto param = std::find_if(spec.params.begin(), spec.params.end(),
                                  [&](const auto& one) { return one.name == range.param; });
  if (param == spec.params.end()) {
    return MakeError(ErrorId::kRange, absl::StrCat("the layout has no parameter ", range.param));
  }
  ASSIGN_OR_RETURN(const uint16_t state, internal::StateNumber(layout, range.state));
  const auto index = static_cast<uint32_t>(param - spec.params.begin());
  const uint64_t param_elems = layout.params()[index].elems;
  if (elems > param_elems || range.first_elem > param_elems - elems) {
    return MakeError(ErrorId::kRange, absl::StrCat(elems, " elements from element ",
                                                   range.first_elem, " on are outside parameter ",
                                                   range.param, ", which has ", param_elems));
  }
  return StateIndex{.param = index, .state = state};
}

absl::Status UnknownTicket(const FetchTicket& ticket) {
  return MakeError(ErrorId::kLease,
                   absl::StrCat("fetch ticket ", ticket.id, " of partition ", ticket.partition,
                                " was finished or cancelled, or is of another attachment"),
                   "finish or cancel each fetch once, in the session that started it");
}

}  // namespace

absl::Status Attachment::WriteInitial(uint32_t partition, std::span<const std::byte> bytes,
                                      Timeout timeout) {
  State& s = *state_;
  const CallLock lock(s);
  RETURN_IF_ERROR(lock.status());
  const Stopwatch stopwatch(s.gauge.wait_ns_other);
  RETURN_IF_ERROR(s.parts.CheckHasRank());
  RETURN_IF_ERROR(s.parts.CheckOwn(partition));
  const uint64_t partition_bytes = s.parts.layout->partition_bytes(partition);
  if (bytes.size() != partition_bytes) {
    return MakeError(ErrorId::kRange,
                     absl::StrCat(s.parts.layout->is_shared() ? "group " : "partition ", partition,
                                  " has ", partition_bytes, " bytes, not ", bytes.size()));
  }
  return s.SendElements(MakeCommand(Op::kWriteInitial, partition), bytes,
                        SizeBytes(s.parts.layout->spec().dtype), s.parts.Limits(timeout));
}

absl::Status Attachment::InitialDone(Timeout timeout) {
  State& s = *state_;
  const CallLock lock(s);
  RETURN_IF_ERROR(lock.status());
  const Stopwatch stopwatch(s.gauge.wait_ns_other);
  return s.Call(MakeCommand(Op::kInitialDone), nullptr, s.parts.Limits(timeout)).status();
}

absl::StatusOr<Lease> Attachment::State::LeaseOf(uint32_t partition, const Completion& completion) {
  const protocol::Layout& layout = *parts.layout;
  const uint64_t offset = completion.offset_bytes;
  const uint64_t size = layout.partition_bytes(partition);
  const uint64_t window_bytes = parts.weights->bytes().size();
  const bool fits =
      completion.length_bytes == size && offset <= window_bytes && size <= window_bytes - offset;
  const bool is_there =
      !layout.is_shared() || offset == layout.groups()[partition].weights_offset_bytes;
  if (!fits || !is_there) {
    return MakeError(
        ErrorId::kProtocol,
        absl::StrCat("partition ", partition, " has ", size, " bytes; the daemon says ",
                     completion.length_bytes, " at ", offset, " of the window of ", window_bytes));
  }
  gauge.fetched_bytes += size;
  return Lease{.id = completion.lease_id,
               .partition = partition,
               .bytes = parts.weights->bytes().subspan(offset, size)};
}

absl::StatusOr<FetchTicket> Attachment::StartFetch(uint32_t partition) {
  State& s = *state_;
  const CallLock lock(s);
  RETURN_IF_ERROR(lock.status());
  const Stopwatch stopwatch(s.gauge.wait_ns_fetch);
  RETURN_IF_ERROR(s.parts.CheckPartition(partition));
  RETURN_IF_ERROR(s.port.Poll());  // a daemon that is being restarted is waited for by FinishFetch
  RETURN_IF_ERROR(s.KeptReleaseError());
  ASSIGN_OR_RETURN(std::shared_ptr<State::Answer> answer,
                   s.Start(MakeCommand(Op::kFetch, partition), s.parts.Limits(s.parts.timeout)));
  s.fetches.emplace(++s.last_ticket, std::move(answer));
  return FetchTicket{.id = s.last_ticket, .partition = partition};
}

absl::StatusOr<bool> Attachment::IsFetchDone(const FetchTicket& ticket) {
  State& s = *state_;
  const CallLock lock(s);
  RETURN_IF_ERROR(lock.status());
  RETURN_IF_ERROR(s.waiter.PollAlive(s.parts.Limits(s.parts.timeout)));
  const auto fetch = s.fetches.find(ticket.id);
  if (fetch == s.fetches.end()) return UnknownTicket(ticket);
  return fetch->second->arrived;
}

absl::StatusOr<Lease> Attachment::FinishFetch(const FetchTicket& ticket, Timeout timeout) {
  State& s = *state_;
  const CallLock lock(s);
  RETURN_IF_ERROR(lock.status());
  const Stopwatch stopwatch(s.gauge.wait_ns_fetch);
  const auto fetch = s.fetches.find(ticket.id);
  if (fetch == s.fetches.end()) return UnknownTicket(ticket);
  const std::shared_ptr<State::Answer> answer = fetch->second;
  const WaitLimits limits = s.parts.Limits(timeout);
  RETURN_IF_ERROR(s.WaitFor(*answer, limits));
  s.fetches.erase(fetch);
  RETURN_IF_ERROR(answer->status);
  ASSIGN_OR_RETURN(Lease lease, s.LeaseOf(ticket.partition, answer->completion));
  s.Note({.lane = protocol::ClientLane::kFetch,
          .name = s.parts.GroupName(ticket.partition),
          .start_ns = stopwatch.begin_ns(),
          .bytes = lease.bytes.size()});
  return lease;
}

absl::Status Attachment::CancelFetch(const FetchTicket& ticket) {
  State& s = *state_;
  const CallLock lock(s);
  RETURN_IF_ERROR(lock.status());
  const auto fetch = s.fetches.find(ticket.id);
  if (fetch == s.fetches.end()) return UnknownTicket(ticket);
  s.Abandon(*fetch->second);
  s.fetches.erase(fetch);
  return absl::OkStatus();
}

absl::StatusOr<Lease> Attachment::Fetch(uint32_t partition, Timeout timeout) {
  ASSIGN_OR_RETURN(const FetchTicket ticket, StartFetch(partition));
  absl::StatusOr<Lease> lease = FinishFetch(ticket, timeout);
  const ErrorId id = protocol::IdOf(lease.status());
  // CancelFetch releases the lease if the answer arrives later.
  if (id == ErrorId::kTimeout || id == ErrorId::kInterrupted) CancelFetch(ticket).IgnoreError();
  return lease;
}

absl::Status Attachment::Release(const Lease& lease) {
  State& s = *state_;
  const CallLock lock(s);
  RETURN_IF_ERROR(lock.status());
  const Stopwatch stopwatch(s.gauge.wait_ns_other);
  RETURN_IF_ERROR(s.port.Poll());
  Command command = MakeCommand(Op::kRelease, lease.partition);
  command.lease_id = lease.id;
  RETURN_IF_ERROR(s.Post(command, s.parts.Limits(s.parts.timeout)));
  return s.KeptReleaseError();
}

absl::Status Attachment::CheckStateRange(const StateRange& range, uint64_t elems) const {
  return IndexOf(*state_->parts.layout, range, elems).status();
}

absl::StatusOr<uint64_t> Attachment::ReadState(const StateRange& range, std::span<float> out,
                                               Timeout timeout) {
  State& s = *state_;
  const CallLock lock(s);
  RETURN_IF_ERROR(lock.status());
  const Stopwatch stopwatch(s.gauge.wait_ns_other);
  ASSIGN_OR_RETURN(const StateIndex index, IndexOf(*s.parts.layout, range, out.size()));
  const WaitLimits limits = s.parts.Limits(timeout);
  const uint64_t piece_elems_max =
      std::min(s.slots.largest_bytes() / sizeof(float), kReadPieceElemsMax);
  uint64_t updates = 0;
  uint64_t step = 0;
  if (out.empty()) {
    Command command = MakeCommand(Op::kReadState, index.param);
    command.kind = index.state;
    ASSIGN_OR_RETURN(const Completion completion, s.Call(command, nullptr, limits));
    return completion.offset_bytes;
  }
  for (uint64_t done = 0; done < out.size();) {
    const std::span<float> piece = out.subspan(done, std::min(piece_elems_max, out.size() - done));
    ASSIGN_OR_RETURN(BusyRange arena, s.WaitForRange(piece.size_bytes(), limits));
    Command command = MakeCommand(Op::kReadState, index.param);
    command.kind = index.state;
    command.arena_offset_bytes = arena.offset_bytes();
    command.length_bytes = piece.size_bytes();
    command.element_offset = range.first_elem + done;
    ASSIGN_OR_RETURN(const Completion completion, s.Call(command, &arena, limits));
    updates = completion.offset_bytes;
    // For a reader, the job may commit steps between two pieces.
    const uint64_t step_before = std::exchange(step, completion.committed_step);
    if (done > 0 && step != step_before) {
      done = 0;
      continue;
    }
    const auto read = s.parts.grad->bytes().subspan(arena.offset_bytes(), piece.size_bytes());
    std::copy(read.begin(), read.end(), std::as_writable_bytes(piece).begin());
    done += piece.size();
  }
  return updates;
}

}  // namespace forebay::client
