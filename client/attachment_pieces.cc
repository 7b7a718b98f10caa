// SPDX-License-Identifier: Apache-2.0
// Gradients a parameter at a time: pieces that are filled, delivered and flushed.

#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/internal/attachment_state.h"
#include "client/internal/stopwatch.h"
#include "gpu/nvtx_range.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"

namespace forebay::client {

using internal::Stopwatch;
using internal::WaitLimits;
using protocol::BoxPlace;
using protocol::ErrorId;
using protocol::kGradUnitElems;
using protocol::MakeError;

namespace {

// Calls `visit(place)` for the boxes that overlap [begin, end) of a partition, ascending.
template <typename Visit>
void ForEachBox(const protocol::Layout& layout, uint32_t partition, uint64_t begin, uint64_t end,
                Visit visit) {
  const auto boxes = layout.boxes_of(partition);
  auto it =
      std::upper_bound(boxes.begin(), boxes.end(), begin, [](uint64_t elem, const BoxPlace& place) {
        return elem < place.partition_elem + place.box.elems();
      });
  for (; it != boxes.end() && it->partition_elem < end; ++it) visit(*it);
}

}  // namespace

Attachment::State::Coverage Attachment::State::CoverageOf(uint32_t partition, uint64_t begin,
                                                          uint64_t end) const {
  Coverage coverage;
  ForEachBox(*parts.layout, partition, begin, end, [&](const BoxPlace& place) {
    const uint32_t param = place.box.param;
    if (!parts.layout->params()[param].trainable) return;
    (HasGradient(param) ? coverage.any : coverage.missing) = true;
  });
  return coverage;
}

// `bytes` hold elements [begin, end): those without a gradient become zero.
void Attachment::State::ZeroAbsent(uint32_t partition, uint64_t begin, uint64_t end,
                                   std::span<std::byte> bytes) const {
  const uint64_t width = parts.grad_width();
  uint64_t done = begin;
  const auto zero_until = [&](uint64_t elem) {
    if (elem <= done) return;
    const auto gap = bytes.subspan((done - begin) * width, (elem - done) * width);
    std::fill(gap.begin(), gap.end(), std::byte{0});
    done = elem;
  };
  ForEachBox(*parts.layout, partition, begin, end, [&](const BoxPlace& place) {
    if (!HasGradient(place.box.param)) return;
    zero_until(place.partition_elem);
    done = std::min(end, place.partition_elem + place.box.elems());
  });
  zero_until(end);
}

// The open piece that holds the element. A new one covers its whole piece of the partition, less what is
// open or delivered already.
absl::StatusOr<Attachment::State::Pieces::iterator> Attachment::State::PieceAt(
    uint32_t partition, uint64_t elem, const WaitLimits& limits) {
  const ElemPlace place{partition, elem};
  const auto after = pieces.upper_bound(place);
  if (after != pieces.begin()) {
    const auto piece = std::prev(after);
    if (piece->first.partition == partition && elem < piece->second.end) return piece;
  }
  uint64_t begin = elem / piece_elems * piece_elems;
  uint64_t end =
      std::min(begin + piece_elems, parts.layout->partitions()[partition].gradient_elems);
  const auto leave_out = [&](uint64_t other_begin, uint64_t other_end) {
    if (other_end <= elem) begin = std::max(begin, other_end);
    if (other_begin > elem) end = std::min(end, other_begin);
    return other_begin <= elem && elem < other_end;
  };
  for (const auto& [other, piece] : pieces) {
    if (other.partition == partition) leave_out(other.elem, piece.end);
  }
  for (auto it = delivered.lower_bound({partition, 0});
       it != delivered.end() && it->first.partition == partition; ++it) {
    if (leave_out(it->first.elem, it->second)) {
      return MakeError(ErrorId::kGradRepeat, absl::StrCat("elements ", it->first.elem, " to ",
                                                          it->second, " of partition ", partition,
                                                          " were delivered in this step already"));
    }
  }
  const uint64_t width = parts.grad_width();
  ASSIGN_OR_RETURN(OpenSlot slot, MakeSlot((end - begin) * width, limits));
  return pieces.emplace(ElemPlace{partition, begin}, OpenPiece{.end = end, .slot = std::move(slot)})
      .first;
}

absl::Status Attachment::State::DeliverPiece(Pieces::iterator at, const WaitLimits& limits) {
  const auto [place, piece] = *at;
  pieces.erase(at);
  ZeroAbsent(place.partition, place.elem, piece.end, piece.slot.bytes);
  return DeliverSlot(place.partition, place.elem, piece.end, piece.slot, limits);
}

absl::Status Attachment::State::CopyBoxToPieces(const BoxPlace& place,
                                                std::span<const std::byte> bytes,
                                                const std::shared_ptr<const void>& keep,
                                                const WaitLimits& limits) {
  const uint64_t width = parts.grad_width();
  const uint64_t end = place.partition_elem + place.box.elems();
  for (uint64_t at = place.partition_elem; at < end;) {
    ASSIGN_OR_RETURN(const Pieces::iterator piece, PieceAt(place.partition, at, limits));
    const uint64_t stop = std::min(end, piece->second.end);
    OpenSlot& slot = piece->second.slot;
    const auto to = slot.bytes.subspan((at - piece->first.elem) * width, (stop - at) * width);
    auto begun = device_trace->Begin(*stream);
    RETURN_IF_ERROR(KeepDeviceError(
        stream->Copy(to, bytes.subspan((at - place.partition_elem) * width, to.size()))));
    device_trace->End(*stream, std::move(begun),
                      {.lane = protocol::ClientLane::kGradientsFromDevice,
                       .name = parts.ParamName(place.box.param),
                       .bytes = to.size()});
    absl::StatusOr<std::shared_ptr<const gpu::Event>> copied = stream->Record();
    if (!copied.ok()) {
      stream->Synchronize().IgnoreError();  // nothing else says when the copy has ended
      return KeepDeviceError(copied.status());
    }
    slot.copied = *std::move(copied);
    gradient_copies.push_back({.done = slot.copied, .keep = keep});
    at = stop;
    const bool complete =
        !CoverageOf(place.partition, piece->first.elem, piece->second.end).missing;
    if (complete) RETURN_IF_ERROR(FlushPiece(piece, limits));
  }
  return absl::OkStatus();
}

// Refuses a delivery after GradNorm with shared attachment, because other ranks may have received their norms already.
absl::Status Attachment::State::CheckAskedNoNorm(std::string_view what,
                                                 std::string_view name) const {
  if (!has_asked_norm) return absl::OkStatus();
  return MakeError(
      ErrorId::kStep,
      absl::StrCat(std::string(what), std::string(name), " in step ", parts.committed_step() + 1,
                   " after this rank has asked for a norm"),
      "ask for norms after the last backward of a step, or drop the gradients");
}

absl::Status Attachment::State::CheckGradient(uint32_t param, std::span<const std::byte> bytes,
                                              const WaitLimits& limits) {
  RETURN_IF_ERROR(parts.CheckHasRank());
  const protocol::Layout& layout = *parts.layout;
  if (param >= layout.params().size()) {
    return MakeError(ErrorId::kRange,
                     absl::StrCat("there is no parameter ", param, ": the job has ",
                                  layout.params().size(), " parameters"));
  }
  const std::string& name = layout.spec().params[param].name;
  if (own_boxes[param].empty()) {
    return MakeError(ErrorId::kRank,
                     absl::StrCat("a gradient of parameter ", name, ", of which rank ", parts.rank,
                                  " owns nothing"),
                     "each rank delivers the reduced gradient of its own shard");
  }
  uint64_t want = 0;
  for (const uint32_t index : own_boxes[param]) {
    want += layout.boxes()[index].box.elems() * parts.grad_width();
  }
  if (bytes.size() != want) {
    return MakeError(ErrorId::kRange, absl::StrCat("the gradient of parameter ", name, " has ",
                                                   want, " bytes, not ", bytes.size()));
  }
  if (!layout.params()[param].trainable) {
    return MakeError(ErrorId::kUnsupported,
                     absl::StrCat("a gradient of parameter ", name, ", which is frozen"),
                     "add gradients of trainable parameters alone");
  }
  RETURN_IF_ERROR(waiter.PollAlive(limits));
  RETURN_IF_ERROR(KeptErrors(limits));
  RETURN_IF_ERROR(CheckAskedNoNorm("a gradient of parameter ", name));
  const auto is_open = [&](uint32_t index) {
    return open.contains(layout.boxes()[index].partition);
  };
  if (HasGradient(param) || std::ranges::any_of(own_boxes[param], is_open)) {
    return MakeError(ErrorId::kGradRepeat,
                     absl::StrCat("a second gradient of parameter ", name, " in step ",
                                  parts.committed_step() + 1),
                     "call BeginPass before the gradients of a further backward pass");
  }
  return absl::OkStatus();
}

absl::Status Attachment::State::AddGradient(uint32_t param, std::span<const std::byte> bytes,
                                            const std::shared_ptr<const void>& keep,
                                            const WaitLimits& limits) {
  const gpu::NvtxRange range("forebay.gradient", parts.ParamName(param));
  const protocol::ClientEvent event{.lane = protocol::ClientLane::kGradient,
                                    .name = parts.ParamName(param),
                                    .start_ns = protocol::MonotonicNs(),
                                    .bytes = bytes.size()};
  SetGradient(param);
  absl::Status status;
  for (const uint32_t index : own_boxes[param]) {
    const BoxPlace& place = parts.layout->boxes()[index];
    const uint64_t size_bytes = place.box.elems() * parts.grad_width();
    if (status.ok()) status = CopyBoxToPieces(place, bytes.first(size_bytes), keep, limits);
    bytes = bytes.subspan(size_bytes);
  }
  Note(event);
  if (!status.ok() && kept_grad_error.ok()) kept_grad_error = status;
  return status;
}

absl::Status Attachment::AddGradient(uint32_t param, std::span<const std::byte> bytes,
                                     Timeout timeout) {
  State& s = *state_;
  const CallLock lock(s);
  RETURN_IF_ERROR(lock.status());
  const Stopwatch stopwatch(s.gauge.wait_ns_grad);
  const WaitLimits limits = s.parts.Limits(timeout);
  RETURN_IF_ERROR(s.CheckGradient(param, bytes, limits));
  const absl::Status status = s.AddGradient(param, bytes, nullptr, limits);
  // `bytes` are the caller's again
  RETURN_IF_ERROR(s.KeepDeviceError(s.stream->Synchronize()));
  return status;
}

absl::Status Attachment::AddGradient(uint32_t param, std::span<const std::byte> bytes,
                                     gpu::Stream& ready, const std::shared_ptr<const void>& keep,
                                     Timeout timeout) {
  State& s = *state_;
  const CallLock lock(s);
  RETURN_IF_ERROR(lock.status());
  const Stopwatch stopwatch(s.gauge.wait_ns_grad);
  const WaitLimits limits = s.parts.Limits(timeout);
  RETURN_IF_ERROR(s.CheckGradient(param, bytes, limits));
  RETURN_IF_ERROR(s.CheckReach(bytes, s.parts.grad_width()));
  const absl::StatusOr<std::shared_ptr<const gpu::Event>> computed = ready.Record();
  RETURN_IF_ERROR(s.KeepDeviceError(computed.status()));
  RETURN_IF_ERROR(s.KeepDeviceError(s.stream->WaitFor(**computed)));
  return s.AddGradient(param, bytes, keep, limits);
}

// ------------------------------------------------------------------------------------------ flush

// Delivers units whose parameters have all arrived, frees those of which none has, and moves the
// others to private memory, where the rest can still arrive.
absl::Status Attachment::State::FlushPiece(Pieces::iterator at, const WaitLimits& limits) {
  const auto [place, piece] = *at;
  const uint32_t partition = place.partition;
  const uint64_t width = parts.grad_width();
  pieces.erase(at);
  struct Run {
    uint64_t begin = 0;
    uint64_t end = 0;
    Coverage coverage;
  };
  // Neighbours of equal coverage; a partly covered unit is alone.
  std::pmr::vector<Run> runs(&memory);
  for (uint64_t unit = place.elem; unit < piece.end; unit += kGradUnitElems) {
    const uint64_t end = std::min(unit + kGradUnitElems, piece.end);
    const Coverage coverage = CoverageOf(partition, unit, end);
    const bool joins = !runs.empty() && runs.back().coverage.any == coverage.any &&
                       !(coverage.any && (coverage.missing || runs.back().coverage.missing));
    if (joins) {
      runs.back().end = end;
    } else {
      runs.push_back({.begin = unit, .end = end, .coverage = coverage});
    }
  }
  absl::Status status;
  OpenSlot rest = piece.slot;
  for (const Run& run : runs) {
    OpenSlot slot = rest;
    const uint64_t size_bytes = (run.end - run.begin) * width;
    slot.bytes = rest.bytes.first(size_bytes);
    rest.bytes = rest.bytes.subspan(size_bytes);
    if (rest.arena_offset.has_value() && !rest.bytes.empty()) {
      slots.Split(*rest.arena_offset, size_bytes);
      rest.arena_offset = *rest.arena_offset + size_bytes;
    }
    if (status.ok() && run.coverage.any && !run.coverage.missing) {
      ZeroAbsent(partition, run.begin, run.end, slot.bytes);
      status = DeliverSlot(partition, run.begin, run.end, slot, limits);
      continue;
    }
    if (status.ok() && run.coverage.any) {
      status = KeepPart(partition, run.begin, run.end, slot, limits);
    }
    if (slot.arena_offset.has_value()) slots.Free(*slot.arena_offset);
  }
  if (!status.ok() && kept_grad_error.ok()) kept_grad_error = status;  // parts of it are lost
  return status;
}

// Keeps a piece in private memory until the rest of its parameters arrives or Step is called.
absl::Status Attachment::State::KeepPart(uint32_t partition, uint64_t begin, uint64_t end,
                                         const OpenSlot& slot, const WaitLimits& limits) {
  RETURN_IF_ERROR(WaitForCopies([&] { return HasEnded(slot.copied); }, limits));
  ASSIGN_OR_RETURN(std::shared_ptr<internal::Mapping> own,
                   internal::Mapping::MapPrivate(slot.bytes.size()));
  const OpenSlot kept{
      .arena_offset = std::nullopt, .owner = own, .bytes = own->bytes().first(slot.bytes.size())};
  std::copy(slot.bytes.begin(), slot.bytes.end(), kept.bytes.begin());
  pieces.emplace(ElemPlace{partition, begin}, OpenPiece{.end = end, .slot = kept});
  return absl::OkStatus();
}

absl::Status Attachment::State::Flush(std::optional<uint32_t> partition, const WaitLimits& limits) {
  std::pmr::vector<ElemPlace> places(&memory);
  for (const auto& [place, piece] : pieces) {
    const bool is_part =
        piece.end - place.elem <= kGradUnitElems && !piece.slot.arena_offset.has_value();
    if ((!partition.has_value() || place.partition == *partition) && !is_part)
      places.push_back(place);
  }
  for (const ElemPlace& place : places) RETURN_IF_ERROR(FlushPiece(pieces.find(place), limits));
  return absl::OkStatus();
}

absl::Status Attachment::State::DeliverAllPieces(const WaitLimits& limits) {
  RETURN_IF_ERROR(Flush(std::nullopt, limits));
  while (!pieces.empty()) RETURN_IF_ERROR(DeliverPiece(pieces.begin(), limits));
  RETURN_IF_ERROR(WaitForCopies([&] { return unsent.empty(); }, limits));
  return kept_grad_error;
}

void Attachment::State::DropPieces() {
  for (const auto& [place, piece] : pieces) {
    if (piece.slot.arena_offset.has_value()) slots.Free(*piece.slot.arena_offset);
  }
  pieces.clear();
}

absl::Status Attachment::FlushGradients(std::optional<uint32_t> partition) {
  State& s = *state_;
  const CallLock lock(s);
  RETURN_IF_ERROR(lock.status());
  const Stopwatch stopwatch(s.gauge.wait_ns_grad);
  if (partition.has_value()) RETURN_IF_ERROR(s.parts.CheckPartition(*partition));
  const WaitLimits limits = s.parts.Limits(s.parts.timeout);
  RETURN_IF_ERROR(s.waiter.PollAlive(limits));
  RETURN_IF_ERROR(s.KeptErrors(limits));
  return s.Flush(partition, limits);
}

}  // namespace forebay::client
