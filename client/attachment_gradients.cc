// SPDX-License-Identifier: Apache-2.0
// Gradient slots and their delivery.

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/internal/attachment_state.h"
#include "client/internal/stopwatch.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"

namespace forebay::client {

using internal::BusyRange;
using internal::MakeCommand;
using internal::Mapping;
using internal::Stopwatch;
using internal::WaitLimits;
using protocol::Command;
using protocol::Completion;
using protocol::ErrorId;
using protocol::MakeError;
using protocol::Op;

absl::StatusOr<std::span<std::byte>> Attachment::GradSlot(uint32_t partition, GradFill fill,
                                                          Timeout timeout) {
  State& s = *state_;
  const CallLock lock(s);
  RETURN_IF_ERROR(lock.status());
  const Stopwatch stopwatch(s.gauge.wait_ns_grad);
  RETURN_IF_ERROR(s.parts.CheckHasRank());
  RETURN_IF_ERROR(s.parts.CheckOwn(partition));
  const WaitLimits limits = s.parts.Limits(timeout);
  RETURN_IF_ERROR(s.waiter.PollAlive(limits));
  RETURN_IF_ERROR(s.KeptErrors(limits));
  const auto found = s.open.find(partition);
  if (found != s.open.end()) return found->second.bytes;
  ASSIGN_OR_RETURN(State::OpenSlot slot,
                   s.MakeSlot(s.parts.layout->gradient_bytes(partition), limits));
  if (slot.arena_offset.has_value() && fill == GradFill::kZero) {
    std::memset(slot.bytes.data(), 0, slot.bytes.size());
  }
  const std::span<std::byte> bytes = slot.bytes;
  s.open.emplace(partition, std::move(slot));
  return bytes;
}

absl::StatusOr<Attachment::State::OpenSlot> Attachment::State::MakeSlot(uint64_t size_bytes,
                                                                        const WaitLimits& limits) {
  std::optional<uint64_t> offset;
  if (size_bytes <= internal::PieceBytes(*parts.layout)) {
    offset = slots.AllocateOpen(size_bytes);
    if (!offset.has_value() && slots.FitsWithoutBusy(size_bytes)) {
      const auto allocate = [&] {
        if (!offset.has_value()) offset = slots.AllocateOpen(size_bytes);
        return offset.has_value() || !over.ok();
      };
      RETURN_IF_ERROR(waiter.Wait(allocate, limits));
      if (!offset.has_value()) return over;
      gauge.sleeps = port.sleeps();
    }
  }
  if (offset.has_value()) {
    return OpenSlot{.arena_offset = offset,
                    .owner = parts.grad,
                    .bytes = parts.grad->bytes().subspan(*offset, size_bytes)};
  }
  ASSIGN_OR_RETURN(std::shared_ptr<Mapping> own, Mapping::MapPrivate(size_bytes));
  ++gauge.private_slots;
  const std::span<std::byte> bytes = own->bytes().first(size_bytes);
  return OpenSlot{.arena_offset = std::nullopt, .owner = std::move(own), .bytes = bytes};
}

std::shared_ptr<const void> Attachment::grad_owner(uint32_t partition) {
  State& s = *state_;
  const CallLock lock(s);
  const auto found = lock.status().ok() ? s.open.find(partition) : s.open.end();
  return found == s.open.end() ? nullptr : found->second.owner;
}

absl::Status Attachment::GradReady(uint32_t partition) {
  State& s = *state_;
  const CallLock lock(s);
  RETURN_IF_ERROR(lock.status());
  const Stopwatch stopwatch(s.gauge.wait_ns_grad);
  RETURN_IF_ERROR(s.parts.CheckOwn(partition));
  const WaitLimits limits = s.parts.Limits(s.parts.timeout);
  RETURN_IF_ERROR(s.KeptErrors(limits));
  const auto found = s.open.find(partition);
  if (found == s.open.end()) {
    return MakeError(
        ErrorId::kNotReady,
        absl::StrCat(s.parts.layout->DescribePartition(partition), " has no open gradient slot"),
        "ask for the slot first, and deliver each once a step");
  }
  const State::OpenSlot slot = found->second;
  const protocol::Layout& layout = *s.parts.layout;
  const uint64_t elems = layout.partitions()[partition].gradient_elems;
  s.open.erase(found);
  for (const protocol::BoxPlace& place : layout.boxes_of(partition)) {
    if (layout.params()[place.box.param].trainable) s.SetGradient(place.box.param);
  }
  s.ZeroAbsent(partition, 0, elems, slot.bytes);  // zeros in place of frozen parameters
  const absl::Status delivered = s.DeliverSlot(partition, 0, elems, slot, limits);
  s.Note({.lane = protocol::ClientLane::kGradient,
          .name = s.parts.GroupName(partition),
          .start_ns = stopwatch.begin_ns(),
          .bytes = slot.bytes.size()});
  return delivered;
}

absl::Status Attachment::State::DeliverSlot(uint32_t partition, uint64_t begin, uint64_t end,
                                            const OpenSlot& slot, const WaitLimits& limits) {
  if (slot.arena_offset.has_value()) {
    slots.Deliver(*slot.arena_offset);
    return SendGradient(partition, begin, end, BusyRange(slots, *slot.arena_offset), slot.copied,
                        limits);
  }
  RETURN_IF_ERROR(WaitForCopies([&] { return HasEnded(slot.copied); }, limits));
  const uint64_t width = parts.grad_width();
  for (uint64_t at = begin; at < end; at += piece_elems) {
    const uint64_t elems = std::min(piece_elems, end - at);
    absl::StatusOr<BusyRange> range = WaitForRange(elems * width, limits);
    absl::Status status = range.status();
    if (status.ok()) {
      parts.CopyToArena(range->offset_bytes(),
                        slot.bytes.subspan((at - begin) * width, elems * width));
      status = SendGradient(partition, at, at + elems, *std::move(range), nullptr, limits);
    }
    if (status.ok()) continue;
    if (kept_grad_error.ok()) kept_grad_error = status;  // the step must fail
    return status;
  }
  return absl::OkStatus();
}

absl::Status Attachment::State::SendGradient(uint32_t partition, uint64_t begin, uint64_t end,
                                             BusyRange range,
                                             std::shared_ptr<const gpu::Event> copied,
                                             const WaitLimits& limits) {
  Command command = MakeCommand(Op::kGradReady, partition);
  command.kind = static_cast<uint16_t>(pass);
  command.step = parts.committed_step() + 1;
  command.attempt = attempt;
  command.arena_offset_bytes = range.offset_bytes();
  command.element_offset = begin;
  command.length_bytes = (end - begin) * parts.grad_width();
  if (HasEnded(copied)) {
    const absl::Status sent = waiter.Send(command, limits, OnGradientDone(range.offset_bytes()));
    if (!sent.ok()) {
      // The gradient is lost with its slot: no step may be applied without it.
      if (kept_grad_error.ok()) kept_grad_error = sent;
      return sent;
    }
    range.HandOver();
    gauge.commands = port.commands();
  } else {
    unsent.push_back({.command = command, .range = std::move(range), .copied = std::move(copied)});
  }
  delivered[{partition, begin}] = end;
  has_delivered = true;
  gauge.grad_bytes += command.length_bytes;
  return absl::OkStatus();
}

internal::CommandPort::OnDone Attachment::State::OnGradientDone(uint64_t arena_offset) {
  return [this, arena_offset](const Completion& completion, const absl::Status& status) {
    UpdateCommittedStep(completion);
    slots.Free(arena_offset);
    KeepError(completion, status);
  };
}

void Attachment::State::BeginAttempt(uint64_t number) {
  attempt = number;
  delivered.clear();
  pass = 0;
  has_delivered = has_asked_norm = false;
  std::fill(presence.begin(), presence.end(), 0);
  std::fill(pass_presence.begin(), pass_presence.end(), 0);
}

absl::Status Attachment::BeginPass() {
  State& s = *state_;
  const CallLock lock(s);
  RETURN_IF_ERROR(lock.status());
  const Stopwatch stopwatch(s.gauge.wait_ns_grad);
  const WaitLimits limits = s.parts.Limits(s.parts.timeout);
  RETURN_IF_ERROR(s.KeptErrors(limits));
  RETURN_IF_ERROR(s.CheckAskedNoNorm("another backward pass"));
  if (s.pass + 1 == protocol::kGradPassesMax) {
    return MakeError(
        ErrorId::kLimit,
        absl::StrCat("more than ", protocol::kGradPassesMax, " backward passes in a step"),
        "call step more often, or run larger batches");
  }
  RETURN_IF_ERROR(s.DeliverAllPieces(limits));
  s.delivered.clear();
  ++s.pass;
  std::fill(s.pass_presence.begin(), s.pass_presence.end(), 0);
  return absl::OkStatus();
}

absl::StatusOr<double> Attachment::GradNorm(std::optional<uint32_t> param, Timeout timeout) {
  State& s = *state_;
  const CallLock lock(s);
  RETURN_IF_ERROR(lock.status());
  const Stopwatch stopwatch(s.gauge.wait_ns_grad);
  RETURN_IF_ERROR(s.parts.CheckHasRank());
  const WaitLimits limits = s.parts.Limits(timeout);
  RETURN_IF_ERROR(s.KeptErrors(limits));
  RETURN_IF_ERROR(s.DeliverAllPieces(limits));
  Command command = MakeCommand(Op::kGradNorm, param.value_or(protocol::kAllParams));
  command.attempt = s.attempt;
  if (s.parts.layout->is_shared()) s.has_delivered = s.has_asked_norm = true;
  ASSIGN_OR_RETURN(const Completion completion, s.Call(command, nullptr, limits));
  return completion.norm;
}

absl::Status Attachment::DropGradients() {
  State& s = *state_;
  const CallLock lock(s);
  RETURN_IF_ERROR(lock.status());
  const WaitLimits limits = s.parts.Limits(s.parts.timeout);
  const absl::Status polled = s.waiter.PollAlive(limits);
  // Copies still in flight would write into slots of the next attempt.
  RETURN_IF_ERROR(s.WaitForCopies([&] { return s.gradient_copies.empty(); }, limits));
  s.DropOpen();
  s.BeginAttempt(s.has_delivered ? s.attempt + 1 : s.attempt);
  return polled;
}

// Frees all open slots and pieces. No copy into them is in flight.
void Attachment::State::DropOpen() {
  for (const auto& [partition, slot] : open) {
    if (slot.arena_offset.has_value()) slots.Free(*slot.arena_offset);
  }
  open.clear();
  DropPieces();
  kept_grad_error = absl::OkStatus();
}

}  // namespace forebay::client
