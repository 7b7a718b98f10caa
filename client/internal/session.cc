#include "client/internal/session.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/internal/stopwatch.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"

namespace forebay::client::internal {
namespace {

using protocol::Command;
using protocol::Completion;
using protocol::ErrorId;
using protocol::MakeError;
using protocol::Op;

// Zeroes what lies between the parameters of a group (format int8 aligns them).
void ZeroGaps(const protocol::Layout& layout, uint32_t group, std::span<std::byte> bytes) {
  const uint64_t width = SizeBytes(layout.spec().dtype);
  const protocol::GroupPlace& place = layout.groups()[group];
  uint64_t end = 0;
  for (uint32_t i = place.param_begin; i < place.param_end; ++i) {
    const protocol::ParamPlace& param = layout.params()[i];
    const auto gap = bytes.subspan(end * width, (param.offset_elems - end) * width);
    std::fill(gap.begin(), gap.end(), std::byte{0});
    end = param.offset_elems + param.elems;
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<Session>> Session::Create(Options options) {
  const uint64_t largest = options.layout->largest_group_bytes();
  const uint64_t weights_bytes = options.weights->bytes().size();
  const uint64_t grad_bytes = options.grad->bytes().size();
  if (weights_bytes < options.layout->weights_bytes() || options.step_region_offset < largest ||
      options.step_region_offset > grad_bytes ||
      options.step_region_bytes > grad_bytes - options.step_region_offset) {
    return MakeError(ErrorId::kProtocol,
                     absl::StrCat("the daemon's arenas do not fit the layout: weights ",
                                  weights_bytes, " bytes, gradients ", options.step_region_offset,
                                  " of ", grad_bytes, ", step region ", options.step_region_bytes));
  }
  std::unique_ptr<Session> session(new Session(std::move(options)));
  const Options& own = session->options_;
  ASSIGN_OR_RETURN(session->weights_registration_,
                   own.device->Register(own.weights->bytes(), gpu::HostAccess::kRead));
  ASSIGN_OR_RETURN(session->grad_registration_,
                   own.device->Register(own.grad->bytes(), gpu::HostAccess::kReadWrite));
  ASSIGN_OR_RETURN(session->stream_, own.device->MakeStream());
  return session;
}

Session::Session(Options options)
    : options_(std::move(options)),
      gauge_(*options_.gauge),
      port_(std::move(options_.port)),
      slots_({.capacity_bytes = std::min(options_.step_region_offset, options_.grad_bytes_max),
              .largest_bytes = options_.layout->largest_group_bytes()}) {}

WaitLimits Session::Limits(Timeout timeout) const {
  return {.deadline = Deadline::After(timeout), .interrupt_check = &options_.interrupt_check};
}

absl::Status Session::CheckGroup(uint32_t group) const {
  const size_t groups = options_.layout->groups().size();
  if (group < groups) return absl::OkStatus();
  return MakeError(ErrorId::kRange, absl::StrCat("group ", group, " of ", groups));
}

absl::Status Session::DrainKeptReleaseError() {
  return std::exchange(kept_release_error_, absl::OkStatus());
}

absl::Status Session::DrainKeptErrors() {
  RETURN_IF_ERROR(port_.Poll());
  RETURN_IF_ERROR(DrainKeptReleaseError());
  return kept_grad_error_;
}

// ---------------------------------------- commands

void Session::Learn(const Completion& completion) {
  if (completion.committed_step > committed_step()) {
    gauge_.committed_step = completion.committed_step;
  }
}

void Session::OnAnswer(const Completion& completion, const absl::Status& status, Answer& answer) {
  Learn(completion);
  answer.arrived = true;
  answer.completion = completion;
  answer.status = status;
  if (!answer.abandoned) return;
  if (answer.range.has_value()) slots_.Free(*answer.range);
  if (status.ok() && static_cast<Op>(completion.op) == Op::kFetch) {
    orphan_leases_.push_back(completion.lease_id);
  }
}

void Session::Keep(const Completion& completion, const absl::Status& status) {
  const bool of_release = static_cast<Op>(completion.op) == Op::kRelease;
  absl::Status& kept = of_release ? kept_release_error_ : kept_grad_error_;
  if (kept.ok()) kept = status;
}

absl::StatusOr<std::shared_ptr<Session::Answer>> Session::Begin(const Command& command,
                                                                const WaitLimits& limits) {
  auto answer = std::make_shared<Answer>();
  RETURN_IF_ERROR(port_.Send(
      command, limits, [this, answer](const Completion& completion, const absl::Status& status) {
        OnAnswer(completion, status, *answer);
      }));
  ++gauge_.commands;
  return answer;
}

absl::StatusOr<Completion> Session::Ask(const Command& command, BusyRange* range,
                                        const WaitLimits& limits) {
  ASSIGN_OR_RETURN(const std::shared_ptr<Answer> answer, Begin(command, limits));
  const absl::Status waited = port_.Wait([&] { return answer->arrived; }, limits);
  gauge_.sleeps = port_.sleeps();
  if (!waited.ok()) {
    answer->abandoned = true;
    if (range != nullptr) answer->range = range->HandOver();
    return waited;
  }
  RETURN_IF_ERROR(ReleaseOrphans(limits));
  RETURN_IF_ERROR(answer->status);
  return answer->completion;
}

absl::Status Session::Post(const Command& command, const WaitLimits& limits) {
  RETURN_IF_ERROR(
      port_.Send(command, limits, [this](const Completion& completion, const absl::Status& status) {
        Learn(completion);
        Keep(completion, status);
      }));
  ++gauge_.commands;
  return absl::OkStatus();
}

absl::Status Session::ReleaseOrphans(const WaitLimits& limits) {
  while (!orphan_leases_.empty()) {
    Command command = MakeCommand(Op::kRelease);
    command.lease_id = orphan_leases_.back();
    RETURN_IF_ERROR(Post(command, limits));
    orphan_leases_.pop_back();
  }
  return absl::OkStatus();
}

absl::StatusOr<BusyRange> Session::WaitForRange(uint64_t size_bytes, const WaitLimits& limits) {
  std::optional<uint64_t> offset;
  RETURN_IF_ERROR(port_.Wait(
      [&] {
        if (!offset.has_value()) offset = slots_.AllocateBusy(size_bytes);
        return offset.has_value();
      },
      limits));
  gauge_.sleeps = port_.sleeps();
  return BusyRange(slots_, *offset);
}

absl::Status Session::CopyIn(uint64_t arena_offset, std::span<const std::byte> bytes) {
  RETURN_IF_ERROR(stream_->Copy(options_.grad->bytes().subspan(arena_offset, bytes.size()), bytes));
  return stream_->Synchronize();
}

// ---------------------------------------- parameters, leases

absl::Status Session::WriteInitial(uint32_t group, std::span<const std::byte> bytes,
                                   Timeout timeout) {
  const Stopwatch stopwatch(gauge_.wait_ns_other);
  RETURN_IF_ERROR(CheckGroup(group));
  const protocol::Layout& layout = *options_.layout;
  const uint64_t padded_bytes = layout.group_bytes(group);
  const uint64_t plain_bytes = layout.groups()[group].elems * SizeBytes(layout.spec().dtype);
  if (bytes.size() != padded_bytes && bytes.size() != plain_bytes) {
    return MakeError(ErrorId::kRange,
                     absl::StrCat("group ", group, " has ", plain_bytes, " bytes (", padded_bytes,
                                  " with padding), not ", bytes.size()));
  }
  const WaitLimits limits = Limits(timeout);
  ASSIGN_OR_RETURN(BusyRange range, WaitForRange(padded_bytes, limits));
  RETURN_IF_ERROR(CopyIn(range.offset_bytes(), bytes.first(plain_bytes)));
  const auto padding = options_.grad->bytes().subspan(range.offset_bytes() + plain_bytes,
                                                      padded_bytes - plain_bytes);
  std::fill(padding.begin(), padding.end(), std::byte{0});
  Command command = MakeCommand(Op::kWriteInitial, group);
  command.arena_offset_bytes = range.offset_bytes();
  command.length_bytes = padded_bytes;
  return Ask(command, &range, limits).status();
}

absl::Status Session::InitialDone(Timeout timeout) {
  const Stopwatch stopwatch(gauge_.wait_ns_other);
  return Ask(MakeCommand(Op::kInitialDone), nullptr, Limits(timeout)).status();
}

absl::StatusOr<Lease> Session::Fetch(uint32_t group, Timeout timeout) {
  const Stopwatch stopwatch(gauge_.wait_ns_fetch);
  RETURN_IF_ERROR(CheckGroup(group));
  RETURN_IF_ERROR(port_.Poll());
  RETURN_IF_ERROR(DrainKeptReleaseError());
  ASSIGN_OR_RETURN(const Completion completion,
                   Ask(MakeCommand(Op::kFetch, group), nullptr, Limits(timeout)));
  const uint64_t offset = options_.layout->groups()[group].weights_offset_bytes;
  const uint64_t size = options_.layout->group_bytes(group);
  if (completion.offset_bytes != offset || completion.length_bytes != size) {
    return MakeError(ErrorId::kProtocol,
                     absl::StrCat("group ", group, " lies at ", offset, " with ", size,
                                  " bytes; the daemon says at ", completion.offset_bytes, " with ",
                                  completion.length_bytes));
  }
  gauge_.fetched_bytes += size;
  return Lease{.id = completion.lease_id,
               .group = group,
               .bytes = options_.weights->bytes().subspan(offset, size)};
}

absl::Status Session::Release(const Lease& lease) {
  const Stopwatch stopwatch(gauge_.wait_ns_other);
  RETURN_IF_ERROR(port_.Poll());
  Command command = MakeCommand(Op::kRelease, lease.group);
  command.lease_id = lease.id;
  RETURN_IF_ERROR(Post(command, Limits(options_.timeout)));
  return DrainKeptReleaseError();
}

// ---------------------------------------- gradients

absl::StatusOr<std::span<std::byte>> Session::GradSlot(uint32_t group, GradFill fill,
                                                       Timeout timeout) {
  const Stopwatch stopwatch(gauge_.wait_ns_grad);
  RETURN_IF_ERROR(CheckGroup(group));
  RETURN_IF_ERROR(port_.PollAlive());
  RETURN_IF_ERROR(DrainKeptErrors());
  const auto found = open_.find(group);
  if (found != open_.end()) return found->second.bytes;
  ASSIGN_OR_RETURN(OpenSlot slot, MakeSlot(group, Limits(timeout)));
  const protocol::Layout& layout = *options_.layout;
  const uint64_t plain_bytes = layout.groups()[group].elems * SizeBytes(layout.spec().dtype);
  if (slot.arena_offset.has_value()) {
    const auto stale = fill == GradFill::kZero ? slot.bytes : slot.bytes.subspan(plain_bytes);
    if (!stale.empty()) std::memset(stale.data(), 0, stale.size());
    if (fill == GradFill::kPadding) ZeroGaps(layout, group, slot.bytes);
  }
  const std::span<std::byte> bytes = slot.bytes;
  open_.emplace(group, std::move(slot));
  return bytes;
}

absl::StatusOr<Session::OpenSlot> Session::MakeSlot(uint32_t group, const WaitLimits& limits) {
  const uint64_t size_bytes = options_.layout->group_bytes(group);
  std::optional<uint64_t> offset = slots_.AllocateOpen(size_bytes);
  if (!offset.has_value() && slots_.FitsWithoutBusy(size_bytes)) {
    RETURN_IF_ERROR(port_.Wait(
        [&] {
          if (!offset.has_value()) offset = slots_.AllocateOpen(size_bytes);
          return offset.has_value();
        },
        limits));
    gauge_.sleeps = port_.sleeps();
  }
  if (offset.has_value()) {
    return OpenSlot{.arena_offset = offset,
                    .owner = options_.grad,
                    .bytes = options_.grad->bytes().subspan(*offset, size_bytes)};
  }
  ASSIGN_OR_RETURN(std::shared_ptr<Mapping> own, Mapping::MapPrivate(size_bytes));
  ++gauge_.private_slots;
  const std::span<std::byte> bytes = own->bytes();
  return OpenSlot{.arena_offset = std::nullopt, .owner = std::move(own), .bytes = bytes};
}

std::shared_ptr<const void> Session::grad_owner(uint32_t group) const {
  const auto found = open_.find(group);
  return found == open_.end() ? nullptr : found->second.owner;
}

absl::Status Session::GradReady(uint32_t group) {
  const Stopwatch stopwatch(gauge_.wait_ns_grad);
  RETURN_IF_ERROR(CheckGroup(group));
  RETURN_IF_ERROR(DrainKeptErrors());
  const auto found = open_.find(group);
  if (found == open_.end()) {
    return MakeError(ErrorId::kNotReady,
                     absl::StrCat("group ", group, " has no open gradient slot"),
                     "ask for the slot first, and deliver each group once a step");
  }
  const WaitLimits limits = Limits(options_.timeout);
  if (!found->second.arena_offset.has_value()) {
    ASSIGN_OR_RETURN(BusyRange range, WaitForRange(found->second.bytes.size(), limits));
    RETURN_IF_ERROR(CopyIn(range.offset_bytes(), found->second.bytes));
    open_.erase(found);
    return SendGradient(group, std::move(range), limits);
  }
  const uint64_t offset = *found->second.arena_offset;
  slots_.Deliver(offset);
  open_.erase(found);
  return SendGradient(group, BusyRange(slots_, offset), limits);
}

absl::Status Session::SendGradient(uint32_t group, BusyRange range, const WaitLimits& limits) {
  Command command = MakeCommand(Op::kGradReady, group);
  command.kind = static_cast<uint16_t>(protocol::GradKind::kPartial);
  command.step = committed_step() + 1;
  command.arena_offset_bytes = range.offset_bytes();
  command.length_bytes = options_.layout->group_bytes(group);
  const absl::Status sent =
      port_.Send(command, limits,
                 [this, offset = range.offset_bytes()](const Completion& completion,
                                                       const absl::Status& status) {
                   Learn(completion);
                   slots_.Free(offset);
                   Keep(completion, status);
                 });
  if (!sent.ok()) {
    // The gradient is gone with its slot: no step may pass without it.
    if (kept_grad_error_.ok()) kept_grad_error_ = sent;
    return sent;
  }
  range.HandOver();
  ++gauge_.commands;
  gauge_.grad_bytes += command.length_bytes;
  return absl::OkStatus();
}

absl::Status Session::DropGradients() {
  const absl::Status polled = port_.PollAlive();
  for (const auto& [group, slot] : open_) {
    if (slot.arena_offset.has_value()) slots_.Free(*slot.arena_offset);
  }
  open_.clear();
  kept_grad_error_ = absl::OkStatus();
  return polled;
}

}  // namespace forebay::client::internal
