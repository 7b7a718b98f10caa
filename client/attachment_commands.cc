// The initial parameters, leases, reads of states.

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
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

namespace {

constexpr uint64_t kReadPieceBytesMax = uint64_t{4} << 20;

absl::Status UnknownTicket(const FetchTicket& ticket) {
  return MakeError(ErrorId::kLease,
                   absl::StrCat("fetch ticket ", ticket.id, " of group ", ticket.group,
                                " was finished or cancelled, or is of another attachment"));
}

}  // namespace

absl::Status Attachment::WriteInitial(uint32_t group, std::span<const std::byte> bytes,
                                      Timeout timeout) {
  State& s = *state_;
  const Turn turn(s);
  RETURN_IF_ERROR(turn.status());
  const Stopwatch stopwatch(s.gauge.wait_ns_other);
  RETURN_IF_ERROR(s.CheckHasRank());
  RETURN_IF_ERROR(s.CheckGroup(group));
  const protocol::Layout& layout = *s.parts.layout;
  const uint64_t padded_bytes = layout.group_bytes(group);
  const uint64_t plain_bytes = layout.groups()[group].elems * SizeBytes(layout.spec().dtype);
  if (bytes.size() != padded_bytes && bytes.size() != plain_bytes) {
    return MakeError(ErrorId::kRange,
                     absl::StrCat("group ", group, " has ", plain_bytes, " bytes (", padded_bytes,
                                  " with padding), not ", bytes.size()));
  }
  const WaitLimits limits = s.Limits(timeout);
  const uint64_t piece_bytes_max = internal::PieceBytes(layout);
  for (uint64_t begin = 0; begin < padded_bytes; begin += piece_bytes_max) {
    const uint64_t piece_bytes = std::min(piece_bytes_max, padded_bytes - begin);
    const uint64_t given = std::min(begin + piece_bytes, plain_bytes);
    const uint64_t copied = given - std::min(begin, given);
    ASSIGN_OR_RETURN(BusyRange range, s.WaitForRange(piece_bytes, limits));
    RETURN_IF_ERROR(s.CopyToArena(range.offset_bytes(), bytes.subspan(given - copied, copied)));
    const auto padding =
        s.parts.grad->bytes().subspan(range.offset_bytes() + copied, piece_bytes - copied);
    std::fill(padding.begin(), padding.end(), std::byte{0});
    Command command = MakeCommand(Op::kWriteInitial, group);
    command.arena_offset_bytes = range.offset_bytes();
    command.length_bytes = piece_bytes;
    command.element_offset = begin / SizeBytes(layout.spec().dtype);
    RETURN_IF_ERROR(s.Call(command, &range, limits).status());
  }
  return absl::OkStatus();
}

absl::Status Attachment::InitialDone(Timeout timeout) {
  State& s = *state_;
  const Turn turn(s);
  RETURN_IF_ERROR(turn.status());
  const Stopwatch stopwatch(s.gauge.wait_ns_other);
  return s.Call(MakeCommand(Op::kInitialDone), nullptr, s.Limits(timeout)).status();
}

absl::StatusOr<Lease> Attachment::State::LeaseOf(uint32_t group, const Completion& completion) {
  const uint64_t offset = parts.layout->groups()[group].weights_offset_bytes;
  const uint64_t size = parts.layout->group_bytes(group);
  if (completion.offset_bytes != offset || completion.length_bytes != size) {
    return MakeError(ErrorId::kProtocol,
                     absl::StrCat("group ", group, " lies at ", offset, " with ", size,
                                  " bytes; the daemon says at ", completion.offset_bytes, " with ",
                                  completion.length_bytes));
  }
  gauge.fetched_bytes += size;
  return Lease{.id = completion.lease_id,
               .group = group,
               .bytes = parts.weights->bytes().subspan(offset, size)};
}

absl::StatusOr<FetchTicket> Attachment::StartFetch(uint32_t group) {
  State& s = *state_;
  const Turn turn(s);
  RETURN_IF_ERROR(turn.status());
  const Stopwatch stopwatch(s.gauge.wait_ns_fetch);
  RETURN_IF_ERROR(s.CheckGroup(group));
  RETURN_IF_ERROR(s.port.Poll());
  RETURN_IF_ERROR(s.KeptReleaseError());
  ASSIGN_OR_RETURN(std::shared_ptr<internal::Answer> answer,
                   s.Start(MakeCommand(Op::kFetch, group), s.Limits(s.parts.timeout)));
  s.fetches.emplace(++s.last_ticket, std::move(answer));
  return FetchTicket{.id = s.last_ticket, .group = group};
}

absl::StatusOr<bool> Attachment::IsFetchDone(const FetchTicket& ticket) {
  State& s = *state_;
  const Turn turn(s);
  RETURN_IF_ERROR(turn.status());
  RETURN_IF_ERROR(s.port.PollAlive());
  const auto fetch = s.fetches.find(ticket.id);
  if (fetch == s.fetches.end()) return UnknownTicket(ticket);
  return fetch->second->arrived;
}

absl::StatusOr<Lease> Attachment::FinishFetch(const FetchTicket& ticket, Timeout timeout) {
  State& s = *state_;
  const Turn turn(s);
  RETURN_IF_ERROR(turn.status());
  const Stopwatch stopwatch(s.gauge.wait_ns_fetch);
  const auto fetch = s.fetches.find(ticket.id);
  if (fetch == s.fetches.end()) return UnknownTicket(ticket);
  const std::shared_ptr<internal::Answer> answer = fetch->second;
  const WaitLimits limits = s.Limits(timeout);
  RETURN_IF_ERROR(s.WaitFor(*answer, limits));
  s.fetches.erase(fetch);
  RETURN_IF_ERROR(s.ReleaseOrphans(limits));
  RETURN_IF_ERROR(answer->status);
  return s.LeaseOf(ticket.group, answer->completion);
}

absl::Status Attachment::CancelFetch(const FetchTicket& ticket) {
  State& s = *state_;
  const Turn turn(s);
  RETURN_IF_ERROR(turn.status());
  const auto fetch = s.fetches.find(ticket.id);
  if (fetch == s.fetches.end()) return UnknownTicket(ticket);
  s.Abandon(*fetch->second);
  s.fetches.erase(fetch);
  return s.ReleaseOrphans(s.Limits(s.parts.timeout));
}

absl::StatusOr<Lease> Attachment::Fetch(uint32_t group, Timeout timeout) {
  ASSIGN_OR_RETURN(const FetchTicket ticket, StartFetch(group));
  absl::StatusOr<Lease> lease = FinishFetch(ticket, timeout);
  const ErrorId id = protocol::IdOf(lease.status());
  // The lease of an answer that comes too late is given back.
  if (id == ErrorId::kTimeout || id == ErrorId::kInterrupted) CancelFetch(ticket).IgnoreError();
  return lease;
}

absl::Status Attachment::Release(const Lease& lease) {
  State& s = *state_;
  const Turn turn(s);
  RETURN_IF_ERROR(turn.status());
  const Stopwatch stopwatch(s.gauge.wait_ns_other);
  RETURN_IF_ERROR(s.port.Poll());
  Command command = MakeCommand(Op::kRelease, lease.group);
  command.lease_id = lease.id;
  RETURN_IF_ERROR(s.Post(command, s.Limits(s.parts.timeout)));
  return s.KeptReleaseError();
}

absl::Status Attachment::ReadState(const StateRange& range, std::span<std::byte> out,
                                   Timeout timeout) {
  State& s = *state_;
  const Turn turn(s);
  RETURN_IF_ERROR(turn.status());
  const Stopwatch stopwatch(s.gauge.wait_ns_other);
  RETURN_IF_ERROR(s.CheckGroup(range.group));
  const protocol::LayoutSpec& spec = s.parts.layout->spec();
  const auto planes = protocol::StatePlanes(spec.optimizer, spec.format, spec.dtype);
  const uint64_t padded = s.parts.layout->groups()[range.group].padded_elems;
  const protocol::Plane plane = range.plane < planes.size()
                                    ? planes[range.plane]
                                    : protocol::Plane{{}, protocol::DType::kInt8};
  const uint64_t width = protocol::SizeBytes(plane.dtype);
  const uint64_t elems = out.size() / width * plane.elems_per_value;
  if (range.plane >= planes.size() || out.size() % width != 0 || elems > padded ||
      range.element_offset > padded - elems || range.element_offset % plane.elems_per_value != 0) {
    return MakeError(ErrorId::kRange,
                     absl::StrCat("plane ", range.plane, " of ", planes.size(), ", elements ",
                                  range.element_offset, " to ", range.element_offset, " + ", elems,
                                  " of ", padded, " in group ", range.group));
  }
  const WaitLimits limits = s.Limits(timeout);
  const uint64_t piece_bytes_max = std::min(s.slots.largest_bytes(), kReadPieceBytesMax);
  for (uint64_t done = 0; done < out.size();) {
    const uint64_t piece_bytes = std::min(piece_bytes_max, out.size() - done);
    ASSIGN_OR_RETURN(BusyRange arena, s.WaitForRange(protocol::RoundUp(piece_bytes, 64), limits));
    Command command = MakeCommand(Op::kReadState, range.group);
    command.kind = static_cast<uint16_t>(range.plane);
    command.arena_offset_bytes = arena.offset_bytes();
    command.length_bytes = piece_bytes;
    command.element_offset = range.element_offset + done / width * plane.elems_per_value;
    RETURN_IF_ERROR(s.Call(command, &arena, limits).status());
    RETURN_IF_ERROR(
        s.stream->Copy(out.subspan(done, piece_bytes),
                       s.parts.grad->bytes().subspan(arena.offset_bytes(), piece_bytes)));
    RETURN_IF_ERROR(s.stream->Synchronize());
    done += piece_bytes;
  }
  return absl::OkStatus();
}

}  // namespace forebay::client
