// Gradients a parameter at a time: pieces that are filled, delivered and flushed.

#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/internal/attachment_state.h"
#include "client/internal/stopwatch.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "protocol/units.h"

namespace forebay::client {

using internal::Stopwatch;
using internal::WaitLimits;
using protocol::ErrorId;
using protocol::kGradUnitElems;
using protocol::MakeError;
using protocol::ParamPlace;

namespace {

// Calls `visit(index, place)` for the parameters that overlap [begin, end) of a group, ascending.
template <typename Visit>
void ForEachParam(const protocol::Layout& layout, uint32_t group, uint64_t begin, uint64_t end,
                  Visit visit) {
  const protocol::GroupPlace& place = layout.groups()[group];
  const auto params = layout.params();
  const auto first = params.begin() + place.param_begin;
  const auto last = params.begin() + place.param_end;
  auto it = std::upper_bound(first, last, begin, [](uint64_t elem, const ParamPlace& param) {
    return elem < param.offset_elems + param.elems;
  });
  for (; it != last && it->offset_elems < end; ++it) {
    visit(static_cast<uint32_t>(it - params.begin()), *it);
  }
}

}  // namespace

Attachment::State::Coverage Attachment::State::CoverageOf(uint32_t group, uint64_t begin,
                                                          uint64_t end) const {
  Coverage coverage;
  ForEachParam(*parts.layout, group, begin, end, [&](uint32_t param, const ParamPlace& place) {
    if (place.trainable) (HasGradient(param) ? coverage.any : coverage.missing) = true;
  });
  return coverage;
}

// `bytes` hold elements [begin, end): those without a gradient become zero.
void Attachment::State::ZeroAbsent(uint32_t group, uint64_t begin, uint64_t end,
                                   std::span<std::byte> bytes) const {
  const uint64_t width = SizeBytes(parts.layout->spec().dtype);
  uint64_t done = begin;
  const auto zero_until = [&](uint64_t elem) {
    if (elem <= done) return;
    const auto gap = bytes.subspan((done - begin) * width, (elem - done) * width);
    std::fill(gap.begin(), gap.end(), std::byte{0});
    done = elem;
  };
  ForEachParam(*parts.layout, group, begin, end, [&](uint32_t param, const ParamPlace& place) {
    if (!HasGradient(param)) return;
    zero_until(place.offset_elems);
    done = std::min(end, place.offset_elems + place.elems);
  });
  zero_until(end);
}

// The open piece that holds the element. A new one covers its whole piece of the group, less what is
// open or delivered already.
absl::StatusOr<Attachment::State::Pieces::iterator> Attachment::State::PieceAt(
    uint32_t group, uint64_t elem, const WaitLimits& limits) {
  const ElemPlace place{group, elem};
  const auto after = pieces.upper_bound(place);
  if (after != pieces.begin()) {
    const auto piece = std::prev(after);
    if (piece->first.group == group && elem < piece->second.end) return piece;
  }
  uint64_t begin = elem / piece_elems * piece_elems;
  uint64_t end = std::min(begin + piece_elems, parts.layout->groups()[group].elems);
  const auto leave_out = [&](uint64_t other_begin, uint64_t other_end) {
    if (other_end <= elem) begin = std::max(begin, other_end);
    if (other_begin > elem) end = std::min(end, other_begin);
    return other_begin <= elem && elem < other_end;
  };
  for (const auto& [other, piece] : pieces) {
    if (other.group == group) leave_out(other.elem, piece.end);
  }
  for (auto it = delivered.lower_bound({group, 0});
       it != delivered.end() && it->first.group == group; ++it) {
    if (leave_out(it->first.elem, it->second)) {
      return MakeError(ErrorId::kGradRepeat,
                       absl::StrCat("elements ", it->first.elem, " to ", it->second, " of group ",
                                    group, " were delivered in this step already"));
    }
  }
  const uint64_t width = SizeBytes(parts.layout->spec().dtype);
  ASSIGN_OR_RETURN(OpenSlot slot, MakeSlot((end - begin) * width, limits));
  return pieces.emplace(ElemPlace{group, begin}, OpenPiece{.end = end, .slot = std::move(slot)})
      .first;
}

absl::Status Attachment::State::DeliverPiece(Pieces::iterator at, const WaitLimits& limits) {
  const auto [place, piece] = *at;
  pieces.erase(at);
  ZeroAbsent(place.group, place.elem, piece.end, piece.slot.bytes);
  return DeliverSlot(place.group, place.elem, piece.end, piece.slot, limits);
}

absl::Status Attachment::State::CopyToPieces(uint32_t param, std::span<const std::byte> bytes,
                                             const WaitLimits& limits) {
  const ParamPlace& place = parts.layout->params()[param];
  const uint64_t width = SizeBytes(parts.layout->spec().dtype);
  const uint64_t end = place.offset_elems + place.elems;
  for (uint64_t at = place.offset_elems; at < end;) {
    ASSIGN_OR_RETURN(const Pieces::iterator piece, PieceAt(place.group, at, limits));
    const uint64_t stop = std::min(end, piece->second.end);
    const auto to =
        piece->second.slot.bytes.subspan((at - piece->first.elem) * width, (stop - at) * width);
    RETURN_IF_ERROR(stream->Copy(to, bytes.subspan((at - place.offset_elems) * width, to.size())));
    RETURN_IF_ERROR(stream->Synchronize());
    at = stop;
    const bool complete = !CoverageOf(place.group, piece->first.elem, piece->second.end).missing;
    if (complete) RETURN_IF_ERROR(FlushPiece(piece, limits));
  }
  return absl::OkStatus();
}

absl::Status Attachment::AddGradient(uint32_t param, std::span<const std::byte> bytes,
                                     Timeout timeout) {
  State& s = *state_;
  const CallLock lock(s);
  RETURN_IF_ERROR(lock.status());
  const Stopwatch stopwatch(s.gauge.wait_ns_grad);
  RETURN_IF_ERROR(s.CheckHasRank());
  const protocol::Layout& layout = *s.parts.layout;
  if (param >= layout.params().size()) {
    return MakeError(ErrorId::kRange,
                     absl::StrCat("there is no parameter ", param, ": the job has ",
                                  layout.params().size(), " parameters"));
  }
  const std::string& name = layout.spec().params[param].name;
  const uint64_t want = layout.params()[param].elems * SizeBytes(layout.spec().dtype);
  if (bytes.size() != want) {
    return MakeError(ErrorId::kRange, absl::StrCat("the gradient of parameter ", name, " has ",
                                                   want, " bytes, not ", bytes.size()));
  }
  if (!layout.params()[param].trainable) {
    return MakeError(ErrorId::kUnsupported,
                     absl::StrCat("a gradient of parameter ", name, ", which is frozen"),
                     "add gradients of trainable parameters alone");
  }
  RETURN_IF_ERROR(s.port.PollAlive());
  RETURN_IF_ERROR(s.KeptErrors());
  if (s.HasGradient(param) || s.open.contains(layout.params()[param].group)) {
    return MakeError(
        ErrorId::kGradRepeat,
        absl::StrCat("a second gradient of parameter ", name, " in step ", s.committed_step() + 1),
        "gradient accumulation over several backward passes is not supported: call "
        "step after each, or drop the gradients");
  }
  s.SetGradient(param);
  const absl::Status status = s.CopyToPieces(param, bytes, s.Limits(timeout));
  if (!status.ok() && s.kept_grad_error.ok()) s.kept_grad_error = status;
  return status;
}

// ------------------------------------------------------------------------------------------ flush

// Delivers units whose parameters have all arrived, frees those of which none has, and moves the
// others to private memory, where the rest can still arrive.
absl::Status Attachment::State::FlushPiece(Pieces::iterator at, const WaitLimits& limits) {
  const auto [place, piece] = *at;
  const uint32_t group = place.group;
  const uint64_t width = SizeBytes(parts.layout->spec().dtype);
  pieces.erase(at);
  struct Run {
    uint64_t begin = 0;
    uint64_t end = 0;
    Coverage coverage;
  };
  std::vector<Run> runs;  // neighbours of equal coverage; a partly covered unit is alone
  for (uint64_t unit = place.elem; unit < piece.end; unit += kGradUnitElems) {
    const uint64_t end = std::min(unit + kGradUnitElems, piece.end);
    const Coverage coverage = CoverageOf(group, unit, end);
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
      ZeroAbsent(group, run.begin, run.end, slot.bytes);
      status = DeliverSlot(group, run.begin, run.end, slot, limits);
      continue;
    }
    if (status.ok() && run.coverage.any) status = KeepPart(group, run.begin, run.end, slot.bytes);
    if (slot.arena_offset.has_value()) slots.Free(*slot.arena_offset);
  }
  if (!status.ok() && kept_grad_error.ok()) kept_grad_error = status;  // parts of it are lost
  return status;
}

// Keeps a piece in private memory until the rest of its parameters arrives or Step is called.
absl::Status Attachment::State::KeepPart(uint32_t group, uint64_t begin, uint64_t end,
                                         std::span<const std::byte> bytes) {
  ASSIGN_OR_RETURN(std::shared_ptr<internal::Mapping> own,
                   internal::Mapping::MapPrivate(bytes.size()));
  const OpenSlot slot{
      .arena_offset = std::nullopt, .owner = own, .bytes = own->bytes().first(bytes.size())};
  std::copy(bytes.begin(), bytes.end(), slot.bytes.begin());
  pieces.emplace(ElemPlace{group, begin}, OpenPiece{.end = end, .slot = slot});
  return absl::OkStatus();
}

absl::Status Attachment::State::Flush(std::optional<uint32_t> group, const WaitLimits& limits) {
  std::vector<ElemPlace> places;
  for (const auto& [place, piece] : pieces) {
    const bool is_part =
        piece.end - place.elem <= kGradUnitElems && !piece.slot.arena_offset.has_value();
    if ((!group.has_value() || place.group == *group) && !is_part) places.push_back(place);
  }
  for (const ElemPlace& place : places) RETURN_IF_ERROR(FlushPiece(pieces.find(place), limits));
  return absl::OkStatus();
}

absl::Status Attachment::State::DeliverAllPieces(const WaitLimits& limits) {
  RETURN_IF_ERROR(Flush(std::nullopt, limits));
  while (!pieces.empty()) RETURN_IF_ERROR(DeliverPiece(pieces.begin(), limits));
  return absl::OkStatus();
}

void Attachment::State::DropPieces() {
  for (const auto& [place, piece] : pieces) {
    if (piece.slot.arena_offset.has_value()) slots.Free(*piece.slot.arena_offset);
  }
  pieces.clear();
}

absl::Status Attachment::FlushGradients(std::optional<uint32_t> group) {
  State& s = *state_;
  const CallLock lock(s);
  RETURN_IF_ERROR(lock.status());
  const Stopwatch stopwatch(s.gauge.wait_ns_grad);
  if (group.has_value()) RETURN_IF_ERROR(s.CheckGroup(*group));
  RETURN_IF_ERROR(s.port.PollAlive());
  RETURN_IF_ERROR(s.KeptErrors());
  return s.Flush(group, s.Limits(s.parts.timeout));
}

}  // namespace forebay::client
