// SPDX-License-Identifier: Apache-2.0
#include "client/internal/gradient_sender.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gpu/nvtx_range.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"

namespace forebay::client::internal {

using protocol::BoxPlace;
using protocol::Command;
using protocol::Completion;
using protocol::ErrorId;
using protocol::kGradUnitElems;
using protocol::MakeError;
using protocol::Op;

namespace {

std::vector<std::vector<uint32_t>> OwnBoxes(const SessionParts& parts) {
  const protocol::Layout& layout = *parts.layout;
  std::vector<std::vector<uint32_t>> own(layout.params().size());
  for (uint32_t i = 0; i < layout.boxes().size(); ++i) {
    const BoxPlace& place = layout.boxes()[i];
    const bool is_own =
        layout.is_shared() || layout.partitions()[place.partition].owner == parts.rank;
    if (is_own) own[place.box.param].push_back(i);
  }
  return own;
}

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

GradientSender::GradientSender(const SessionParts& parts, SessionLink& link, DeviceCopies& device,
                               SessionTrace& trace)
    : parts_(parts),
      link_(link),
      device_(device),
      trace_(trace),
      own_boxes_(OwnBoxes(parts)),
      attempt_(parts.attempt),
      presence_(protocol::PresenceWords(parts.layout->params().size()), 0),
      pass_presence_(presence_) {}

// ---------------------------------------- open slots and pieces

GradientSender::Coverage GradientSender::CoverageOf(uint32_t partition, uint64_t begin,
                                                    uint64_t end) const {
  Coverage coverage;
  ForEachBox(*parts_.layout, partition, begin, end, [&](const BoxPlace& place) {
    const uint32_t param = place.box.param;
    if (!parts_.layout->params()[param].trainable) return;
    (HasGradient(param) ? coverage.any : coverage.missing) = true;
  });
  return coverage;
}

void GradientSender::ZeroAbsent(uint32_t partition, uint64_t begin, uint64_t end,
                                std::span<std::byte> bytes) const {
  const uint64_t width = parts_.grad_width();
  uint64_t done = begin;
  const auto zero_until = [&](uint64_t elem) {
    if (elem <= done) return;
    const auto gap = bytes.subspan((done - begin) * width, (elem - done) * width);
    std::fill(gap.begin(), gap.end(), std::byte{0});
    done = elem;
  };
  ForEachBox(*parts_.layout, partition, begin, end, [&](const BoxPlace& place) {
    if (!HasGradient(place.box.param)) return;
    zero_until(place.partition_elem);
    done = std::min(end, place.partition_elem + place.box.elems());
  });
  zero_until(end);
}

absl::StatusOr<std::span<std::byte>> GradientSender::GradSlot(uint32_t partition, GradFill fill,
                                                              const WaitLimits& limits) {
  RETURN_IF_ERROR(parts_.CheckHasRank());
  RETURN_IF_ERROR(parts_.CheckOwn(partition));
  RETURN_IF_ERROR(link_.CheckStoredAlive(limits));
  const auto found = open_.find(partition);
  if (found != open_.end()) return found->second.bytes;
  ASSIGN_OR_RETURN(OpenSlot slot, MakeSlot(parts_.layout->gradient_bytes(partition), limits));
  if (slot.arena_offset.has_value() && fill == GradFill::kZero) {
    std::memset(slot.bytes.data(), 0, slot.bytes.size());
  }
  const std::span<std::byte> bytes = slot.bytes;
  open_.emplace(partition, std::move(slot));
  return bytes;
}

std::shared_ptr<const void> GradientSender::grad_owner(uint32_t partition) const {
  const auto found = open_.find(partition);
  return found == open_.end() ? nullptr : found->second.owner;
}

absl::Status GradientSender::GradReady(uint32_t partition, const WaitLimits& limits) {
  const uint64_t start_ns = protocol::MonotonicNs();
  RETURN_IF_ERROR(parts_.CheckOwn(partition));
  RETURN_IF_ERROR(link_.CheckStored(limits));
  const auto found = open_.find(partition);
  if (found == open_.end()) {
    return MakeError(
        ErrorId::kNotReady,
        absl::StrCat(parts_.layout->DescribePartition(partition), " has no open gradient slot"),
        "ask for the slot first, and deliver each once a step");
  }
  const OpenSlot slot = found->second;
  const protocol::Layout& layout = *parts_.layout;
  const uint64_t elems = layout.partitions()[partition].gradient_elems;
  open_.erase(found);
  for (const protocol::BoxPlace& place : layout.boxes_of(partition)) {
    if (layout.params()[place.box.param].trainable) SetGradient(place.box.param);
  }
  ZeroAbsent(partition, 0, elems, slot.bytes);  // zeros in place of frozen parameters
  const absl::Status delivered = DeliverSlot(partition, 0, elems, slot, limits);
  trace_.Note({.lane = protocol::ClientLane::kGradient,
               .name = parts_.GroupName(partition),
               .start_ns = start_ns,
               .bytes = slot.bytes.size()});
  return delivered;
}

absl::StatusOr<GradientSender::Pieces::iterator> GradientSender::PieceAt(uint32_t partition,
                                                                         uint64_t elem,
                                                                         const WaitLimits& limits) {
  const ElemPlace place{partition, elem};
  const auto after = pieces_.upper_bound(place);
  if (after != pieces_.begin()) {
    const auto piece = std::prev(after);
    if (piece->first.partition == partition && elem < piece->second.end) return piece;
  }
  const uint64_t piece_elems = parts_.piece_elems();
  uint64_t begin = elem / piece_elems * piece_elems;
  uint64_t end =
      std::min(begin + piece_elems, parts_.layout->partitions()[partition].gradient_elems);
  const auto leave_out = [&](uint64_t other_begin, uint64_t other_end) {
    if (other_end <= elem) begin = std::max(begin, other_end);
    if (other_begin > elem) end = std::min(end, other_begin);
    return other_begin <= elem && elem < other_end;
  };
  for (const auto& [other, piece] : pieces_) {
    if (other.partition == partition) leave_out(other.elem, piece.end);
  }
  for (auto it = delivered_.lower_bound({partition, 0});
       it != delivered_.end() && it->first.partition == partition; ++it) {
    if (leave_out(it->first.elem, it->second)) {
      return MakeError(ErrorId::kGradRepeat, absl::StrCat("elements ", it->first.elem, " to ",
                                                          it->second, " of partition ", partition,
                                                          " were delivered in this step already"));
    }
  }
  const uint64_t width = parts_.grad_width();
  ASSIGN_OR_RETURN(OpenSlot slot, MakeSlot((end - begin) * width, limits));
  return pieces_
      .emplace(ElemPlace{partition, begin}, OpenPiece{.end = end, .slot = std::move(slot)})
      .first;
}

absl::Status GradientSender::CopyBoxToPieces(const BoxPlace& place,
                                             std::span<const std::byte> bytes,
                                             const std::shared_ptr<const void>& keep,
                                             const WaitLimits& limits) {
  const uint64_t width = parts_.grad_width();
  const uint64_t end = place.partition_elem + place.box.elems();
  gpu::Stream& stream = device_.stream();
  for (uint64_t at = place.partition_elem; at < end;) {
    ASSIGN_OR_RETURN(const Pieces::iterator piece, PieceAt(place.partition, at, limits));
    const uint64_t stop = std::min(end, piece->second.end);
    OpenSlot& slot = piece->second.slot;
    const auto to = slot.bytes.subspan((at - piece->first.elem) * width, (stop - at) * width);
    auto begun = trace_.device()->Begin(stream);
    RETURN_IF_ERROR(link_.errors().StoreDevice(
        stream.Copy(to, bytes.subspan((at - place.partition_elem) * width, to.size()))));
    trace_.device()->End(stream, std::move(begun),
                         {.lane = protocol::ClientLane::kGradientsFromDevice,
                          .name = parts_.ParamName(place.box.param),
                          .bytes = to.size()});
    absl::StatusOr<std::shared_ptr<const gpu::Event>> copied = stream.Record();
    if (!copied.ok()) {
      stream.Synchronize().IgnoreError();  // nothing else says when the copy has ended
      return link_.errors().StoreDevice(copied.status());
    }
    slot.copied = *std::move(copied);
    copies_.push_back({.done = slot.copied, .keep = keep});
    at = stop;
    const bool complete =
        !CoverageOf(place.partition, piece->first.elem, piece->second.end).missing;
    if (complete) RETURN_IF_ERROR(FlushPiece(piece, limits));
  }
  return absl::OkStatus();
}

absl::Status GradientSender::CheckGradient(uint32_t param, std::span<const std::byte> bytes,
                                           const WaitLimits& limits) {
  RETURN_IF_ERROR(parts_.CheckHasRank());
  const protocol::Layout& layout = *parts_.layout;
  if (param >= layout.params().size()) {
    return MakeError(ErrorId::kRange,
                     absl::StrCat("there is no parameter ", param, ": the job has ",
                                  layout.params().size(), " parameters"));
  }
  const std::string& name = layout.spec().params[param].name;
  if (own_boxes_[param].empty()) {
    return MakeError(ErrorId::kRank,
                     absl::StrCat("a gradient of parameter ", name, ", of which rank ", parts_.rank,
                                  " owns nothing"),
                     "each rank delivers the reduced gradient of its own shard");
  }
  uint64_t want = 0;
  for (const uint32_t index : own_boxes_[param]) {
    want += layout.boxes()[index].box.elems() * parts_.grad_width();
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
  RETURN_IF_ERROR(link_.CheckStoredAlive(limits));
  RETURN_IF_ERROR(CheckAskedNoNorm("a gradient of parameter ", name));
  const auto is_open = [&](uint32_t index) {
    return open_.contains(layout.boxes()[index].partition);
  };
  if (HasGradient(param) || std::ranges::any_of(own_boxes_[param], is_open)) {
    return MakeError(ErrorId::kGradRepeat,
                     absl::StrCat("a second gradient of parameter ", name, " in step ",
                                  parts_.committed_step() + 1),
                     "call BeginPass before the gradients of a further backward pass");
  }
  return absl::OkStatus();
}

absl::Status GradientSender::CopyGradient(uint32_t param, std::span<const std::byte> bytes,
                                          const std::shared_ptr<const void>& keep,
                                          const WaitLimits& limits) {
  const gpu::NvtxRange range("forebay.gradient", parts_.ParamName(param));
  const protocol::ClientEvent event{.lane = protocol::ClientLane::kGradient,
                                    .name = parts_.ParamName(param),
                                    .start_ns = protocol::MonotonicNs(),
                                    .bytes = bytes.size()};
  SetGradient(param);
  absl::Status status;
  for (const uint32_t index : own_boxes_[param]) {
    const BoxPlace& place = parts_.layout->boxes()[index];
    const uint64_t size_bytes = place.box.elems() * parts_.grad_width();
    if (status.ok()) status = CopyBoxToPieces(place, bytes.first(size_bytes), keep, limits);
    bytes = bytes.subspan(size_bytes);
  }
  trace_.Note(event);
  link_.errors().gradient.Update(status);
  return status;
}

absl::Status GradientSender::AddGradient(uint32_t param, std::span<const std::byte> bytes,
                                         const WaitLimits& limits) {
  RETURN_IF_ERROR(CheckGradient(param, bytes, limits));
  const absl::Status status = CopyGradient(param, bytes, nullptr, limits);
  // `bytes` are the caller's again
  RETURN_IF_ERROR(link_.errors().StoreDevice(device_.stream().Synchronize()));
  return status;
}

absl::Status GradientSender::AddGradientAfter(uint32_t param, std::span<const std::byte> bytes,
                                              gpu::Stream& ready,
                                              const std::shared_ptr<const void>& keep,
                                              const WaitLimits& limits) {
  RETURN_IF_ERROR(CheckGradient(param, bytes, limits));
  RETURN_IF_ERROR(device_.CheckReach(bytes, parts_.grad_width()));
  const absl::StatusOr<std::shared_ptr<const gpu::Event>> computed = ready.Record();
  RETURN_IF_ERROR(link_.errors().StoreDevice(computed.status()));
  RETURN_IF_ERROR(link_.errors().StoreDevice(device_.stream().WaitFor(**computed)));
  return CopyGradient(param, bytes, keep, limits);
}

absl::Status GradientSender::FlushPiece(Pieces::iterator at, const WaitLimits& limits) {
  const auto [place, piece] = *at;
  const uint32_t partition = place.partition;
  const uint64_t width = parts_.grad_width();
  pieces_.erase(at);
  struct Run {
    uint64_t begin = 0;
    uint64_t end = 0;
    Coverage coverage;
  };
  // Neighbours of equal coverage; a partly covered unit is alone.
  std::pmr::vector<Run> runs(link_.memory());
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
      link_.slots().Split(*rest.arena_offset, size_bytes);
      rest.arena_offset = *rest.arena_offset + size_bytes;
    }
    if (status.ok() && run.coverage.any && !run.coverage.missing) {
      ZeroAbsent(partition, run.begin, run.end, slot.bytes);
      status = DeliverSlot(partition, run.begin, run.end, slot, limits);
      continue;
    }
    if (status.ok() && run.coverage.any) {
      status = RetainPart(partition, run.begin, run.end, slot, limits);
    }
    FreeSlot(slot);
  }
  link_.errors().gradient.Update(status);  // parts of it are lost
  return status;
}

absl::Status GradientSender::RetainPart(uint32_t partition, uint64_t begin, uint64_t end,
                                        const OpenSlot& slot, const WaitLimits& limits) {
  RETURN_IF_ERROR(device_.WaitFor(slot.copied, limits));
  ASSIGN_OR_RETURN(std::shared_ptr<Mapping> own, Mapping::MapPrivate(slot.bytes.size()));
  const OpenSlot part{
      .arena_offset = std::nullopt, .owner = own, .bytes = own->bytes().first(slot.bytes.size())};
  std::copy(slot.bytes.begin(), slot.bytes.end(), part.bytes.begin());
  pieces_.emplace(ElemPlace{partition, begin}, OpenPiece{.end = end, .slot = part});
  return absl::OkStatus();
}

absl::Status GradientSender::Flush(std::optional<uint32_t> partition, const WaitLimits& limits) {
  std::pmr::vector<ElemPlace> places(link_.memory());
  for (const auto& [place, piece] : pieces_) {
    const bool is_part =
        piece.end - place.elem <= kGradUnitElems && !piece.slot.arena_offset.has_value();
    if ((!partition.has_value() || place.partition == *partition) && !is_part)
      places.push_back(place);
  }
  for (const ElemPlace& place : places) RETURN_IF_ERROR(FlushPiece(pieces_.find(place), limits));
  return absl::OkStatus();
}

absl::Status GradientSender::FlushGradients(std::optional<uint32_t> partition,
                                            const WaitLimits& limits) {
  if (partition.has_value()) RETURN_IF_ERROR(parts_.CheckPartition(*partition));
  RETURN_IF_ERROR(link_.CheckStoredAlive(limits));
  return Flush(partition, limits);
}

absl::Status GradientSender::DeliverAll(const WaitLimits& limits) {
  RETURN_IF_ERROR(Flush(std::nullopt, limits));
  while (!pieces_.empty()) {
    const auto [place, piece] = *pieces_.begin();
    pieces_.erase(pieces_.begin());
    ZeroAbsent(place.partition, place.elem, piece.end, piece.slot.bytes);
    RETURN_IF_ERROR(DeliverSlot(place.partition, place.elem, piece.end, piece.slot, limits));
  }
  RETURN_IF_ERROR(link_.WaitForCopies([this] { return unsent_.empty(); }, limits));
  return link_.errors().gradient;
}

absl::Status GradientSender::DropGradients(const WaitLimits& limits) {
  const absl::Status polled = link_.PollAlive(limits);
  // Copies still in flight would write into slots of the next attempt.
  RETURN_IF_ERROR(link_.WaitForCopies([this] { return copies_.empty(); }, limits));
  DropAll();
  return polled;
}

void GradientSender::DropAll() {
  for (const auto& [partition, slot] : open_) FreeSlot(slot);
  for (const auto& [place, piece] : pieces_) FreeSlot(piece.slot);
  Close();
  link_.errors().gradient = absl::OkStatus();
  BeginAttempt(has_delivered_ ? attempt_ + 1 : attempt_);
}

void GradientSender::Close() {
  open_.clear();
  pieces_.clear();
}

// ---------------------------------------- delivery

absl::Status GradientSender::BeginPass(const WaitLimits& limits) {
  RETURN_IF_ERROR(link_.CheckStored(limits));
  RETURN_IF_ERROR(CheckAskedNoNorm("another backward pass"));
  if (pass_ + 1 == protocol::kGradPassesMax) {
    return MakeError(
        ErrorId::kLimit,
        absl::StrCat("more than ", protocol::kGradPassesMax, " backward passes in a step"),
        "call step more often, or run larger batches");
  }
  RETURN_IF_ERROR(DeliverAll(limits));
  delivered_.clear();
  ++pass_;
  std::fill(pass_presence_.begin(), pass_presence_.end(), 0);
  return absl::OkStatus();
}

absl::StatusOr<double> GradientSender::GradNorm(std::optional<uint32_t> param,
                                                const WaitLimits& limits) {
  RETURN_IF_ERROR(parts_.CheckHasRank());
  RETURN_IF_ERROR(link_.CheckStored(limits));
  RETURN_IF_ERROR(DeliverAll(limits));
  Command command = MakeCommand(Op::kGradNorm, param.value_or(protocol::kAllParams));
  command.attempt = attempt_;
  if (parts_.layout->is_shared()) has_delivered_ = has_asked_norm_ = true;
  ASSIGN_OR_RETURN(const Completion completion, link_.Call(command, nullptr, limits));
  return completion.norm;
}

absl::StatusOr<GradientSender::OpenSlot> GradientSender::MakeSlot(uint64_t size_bytes,
                                                                  const WaitLimits& limits) {
  std::optional<uint64_t> offset;
  if (size_bytes <= parts_.layout->largest_piece_bytes()) {
    offset = link_.slots().AllocateOpen(size_bytes);
    if (!offset.has_value() && link_.slots().FitsWithoutBusy(size_bytes)) {
      const auto allocate = [&] { return link_.slots().AllocateOpen(size_bytes); };
      ASSIGN_OR_RETURN(offset, link_.WaitForOffset(allocate, limits));
    }
  }
  if (offset.has_value()) {
    return OpenSlot{.arena_offset = offset,
                    .owner = parts_.grad,
                    .bytes = parts_.grad->bytes().subspan(*offset, size_bytes)};
  }
  ASSIGN_OR_RETURN(std::shared_ptr<Mapping> own, Mapping::MapPrivate(size_bytes));
  ++parts_.gauge->private_slots;
  const std::span<std::byte> bytes = own->bytes().first(size_bytes);
  return OpenSlot{.arena_offset = std::nullopt, .owner = std::move(own), .bytes = bytes};
}

void GradientSender::FreeSlot(const OpenSlot& slot) {
  if (slot.arena_offset.has_value()) link_.slots().Free(*slot.arena_offset);
}

absl::Status GradientSender::DeliverSlot(uint32_t partition, uint64_t begin, uint64_t end,
                                         const OpenSlot& slot, const WaitLimits& limits) {
  if (slot.arena_offset.has_value()) {
    link_.slots().Deliver(*slot.arena_offset);
    return SendGradient(partition, begin, end, BusyRange(link_.slots(), *slot.arena_offset),
                        slot.copied, limits);
  }
  RETURN_IF_ERROR(device_.WaitFor(slot.copied, limits));
  const uint64_t width = parts_.grad_width();
  for (uint64_t at = begin; at < end; at += parts_.piece_elems()) {
    const uint64_t elems = std::min(parts_.piece_elems(), end - at);
    absl::StatusOr<BusyRange> range = link_.WaitForRange(elems * width, limits);
    absl::Status status = range.status();
    if (status.ok()) {
      parts_.CopyToArena(range->offset_bytes(),
                         slot.bytes.subspan((at - begin) * width, elems * width));
      status = SendGradient(partition, at, at + elems, *std::move(range), nullptr, limits);
    }
    if (status.ok()) continue;
    link_.errors().gradient.Update(status);  // the step must fail
    return status;
  }
  return absl::OkStatus();
}

absl::Status GradientSender::SendGradient(uint32_t partition, uint64_t begin, uint64_t end,
                                          BusyRange range, std::shared_ptr<const gpu::Event> copied,
                                          const WaitLimits& limits) {
  Command command = MakeCommand(Op::kGradReady, partition);
  command.kind = static_cast<uint16_t>(pass_);
  command.step = parts_.committed_step() + 1;
  command.attempt = attempt_;
  command.arena_offset_bytes = range.offset_bytes();
  command.element_offset = begin;
  command.length_bytes = (end - begin) * parts_.grad_width();
  if (device_.HasEnded(copied)) {
    const absl::Status sent = link_.Send(command, limits, OnGradientDone(range.offset_bytes()));
    // After an error the gradient is lost with its slot: no step may be applied without it.
    link_.errors().gradient.Update(sent);
    RETURN_IF_ERROR(sent);
    range.HandOver();
  } else {
    unsent_.push_back({.command = command, .range = std::move(range), .copied = std::move(copied)});
  }
  delivered_[{partition, begin}] = end;
  has_delivered_ = true;
  parts_.gauge->grad_bytes += command.length_bytes;
  return absl::OkStatus();
}

CommandPort::OnDone GradientSender::OnGradientDone(uint64_t arena_offset) {
  return [this, arena_offset](const Completion& completion, const absl::Status& status) {
    link_.UpdateCommittedStep(completion);
    link_.slots().Free(arena_offset);
    link_.errors().gradient.Update(status);
  };
}

void GradientSender::BeginAttempt(uint64_t number) {
  attempt_ = number;
  delivered_.clear();
  pass_ = 0;
  has_delivered_ = has_asked_norm_ = false;
  std::fill(presence_.begin(), presence_.end(), 0);
  std::fill(pass_presence_.begin(), pass_presence_.end(), 0);
}

void GradientSender::SetGradient(uint32_t param) {
  protocol::SetPresent(presence_, param);
  protocol::SetPresent(pass_presence_, param);
}

absl::Status GradientSender::CheckAskedNoNorm(std::string_view what, std::string_view name) const {
  if (!has_asked_norm_) return absl::OkStatus();
  return MakeError(
      ErrorId::kStep,
      absl::StrCat(std::string(what), std::string(name), " in step ", parts_.committed_step() + 1,
                   " after this rank has asked for a norm"),
      "ask for norms after the last backward of a step, or drop the gradients");
}

bool GradientSender::LookAtCopies() {
  copies_.remove_if([this](const GradientCopy& copy) { return device_.HasEnded(copy.done); });
  StoredErrors& errors = link_.errors();
  unsent_.remove_if([&](UnsentGradient& gradient) {
    if (!device_.HasEnded(gradient.copied)) return false;
    if (!errors.device.ok()) return true;  // the copied bytes are unknown
    CommandPort::OnDone on_done = OnGradientDone(gradient.range.offset_bytes());
    const absl::StatusOr<bool> sent = link_.TrySend(gradient.command, on_done);
    errors.gradient.Update(sent.status());
    if (sent.value_or(false)) gradient.range.HandOver();
    return sent.value_or(true);  // false while the ring is full
  });
  return !copies_.empty() || !unsent_.empty();
}

}  // namespace forebay::client::internal
