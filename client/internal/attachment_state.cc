// SPDX-License-Identifier: Apache-2.0
#include "client/internal/attachment_state.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/internal/stopwatch.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"
#include "protocol/wire.h"

namespace forebay::client {

using internal::BusyRange;
using internal::WaitLimits;
using protocol::Command;
using protocol::Completion;
using protocol::ErrorId;
using protocol::MakeError;
using protocol::Op;

namespace {

internal::GradSlots::Options SlotOptions(const internal::SessionParts& parts) {
  const uint64_t bytes = std::min(parts.step_region_offset, parts.grad_bytes_max);
  // A reader's arena takes pieces of states, not whole partitions.
  const uint64_t largest_bytes = parts.reader
                                     ? bytes / protocol::kCacheLineBytes * protocol::kCacheLineBytes
                                     : internal::PieceBytes(*parts.layout);
  return {.capacity_bytes = bytes, .largest_bytes = largest_bytes};
}

std::vector<std::vector<uint32_t>> OwnBoxes(const internal::SessionParts& parts) {
  const protocol::Layout& layout = *parts.layout;
  std::vector<std::vector<uint32_t>> own(layout.params().size());
  for (uint32_t i = 0; i < layout.boxes().size(); ++i) {
    const protocol::BoxPlace& place = layout.boxes()[i];
    const bool is_own =
        layout.is_shared() || layout.partitions()[place.partition].owner == parts.rank;
    if (is_own) own[place.box.param].push_back(i);
  }
  return own;
}

}  // namespace

void Attachment::State::Note(protocol::ClientEvent event) {
  if (!trace.has_value()) return;
  event.end_ns = protocol::MonotonicNs();
  trace->Add(event);
}

Attachment::State::State(internal::SessionParts session_parts)
    : pid(::getpid()),
      parts(std::move(session_parts)),
      gauge(*parts.gauge),
      port(std::move(parts.port), &memory),
      waiter(
          port,
          [this] {
            AskWhetherItGoesOn();
            return LookAtCopies();
          },
          [this](const WaitLimits& limits) { return Reattach(limits); }),
      slots(SlotOptions(parts), &memory),
      piece_elems(protocol::kGradPieceBytesMax / parts.grad_width()),
      own_boxes(OwnBoxes(parts)),
      pass_presence(protocol::PresenceWords(parts.layout->params().size()), 0),
      presence(protocol::PresenceWords(parts.layout->params().size()), 0),
      attempt(parts.attempt),
      copy_watch(mutex, [this] { return !detached && LookAtCopies(); }) {}

bool Attachment::State::InChild() const { return ::getpid() != pid; }

absl::Status Attachment::State::KeptReleaseError() {
  RETURN_IF_ERROR(device_error);
  return std::exchange(kept_release_error, absl::OkStatus());
}

absl::Status Attachment::State::KeptErrors(const WaitLimits& limits) {
  RETURN_IF_ERROR(device_error);
  RETURN_IF_ERROR(waiter.Poll(limits));
  RETURN_IF_ERROR(KeptReleaseError());
  return kept_grad_error;
}

// ---------------------------------------- commands

void Attachment::State::UpdateCommittedStep(const Completion& completion) {
  if (completion.committed_step > parts.committed_step()) {
    gauge.committed_step = completion.committed_step;
    BeginAttempt(0);
  }
}

void Attachment::State::OnAnswer(const Completion& completion, const absl::Status& status,
                                 Answer& answer) {
  UpdateCommittedStep(completion);
  answer.arrived = true;
  answer.completion = completion;
  answer.status = status;
  if (answer.abandoned) Abandon(answer);
}

void Attachment::State::Abandon(Answer& answer) {
  answer.abandoned = true;
  if (!answer.arrived) return;
  if (answer.range.has_value()) slots.Free(*std::exchange(answer.range, std::nullopt));
  if (answer.status.ok() && answer.completion.lease_id != 0) {
    late_leases.push_back(answer.completion.lease_id);
  }
}

void Attachment::State::KeepError(const Completion& completion, const absl::Status& status) {
  const bool of_release = static_cast<Op>(completion.op) == Op::kRelease;
  absl::Status& kept = of_release ? kept_release_error : kept_grad_error;
  if (kept.ok()) kept = status;
}

absl::StatusOr<std::shared_ptr<Attachment::State::Answer>> Attachment::State::Start(
    const Command& command, const WaitLimits& limits) {
  const auto answer =
      std::allocate_shared<Answer>(std::pmr::polymorphic_allocator<Answer>(&memory), this);
  // Captures one pointer only: with two, the callback would need allocated memory.
  auto on_done = [answer](const Completion& completion, const absl::Status& status) {
    answer->session->OnAnswer(completion, status, *answer);
  };
  RETURN_IF_ERROR(waiter.Send(command, limits, std::move(on_done)));
  gauge.commands = port.commands();
  return answer;
}

absl::Status Attachment::State::WaitFor(const Answer& answer, const WaitLimits& limits) {
  const absl::Status waited = waiter.Wait([&answer] { return answer.arrived; }, limits);
  gauge.sleeps = port.sleeps();
  return waited;
}

absl::StatusOr<Completion> Attachment::State::Call(const Command& command, BusyRange* range,
                                                   const WaitLimits& limits) {
  ASSIGN_OR_RETURN(const std::shared_ptr<Answer> answer, Start(command, limits));
  const absl::Status waited = WaitFor(*answer, limits);
  if (!waited.ok()) {
    if (range != nullptr) answer->range = range->HandOver();
    Abandon(*answer);
    return waited;
  }
  RETURN_IF_ERROR(answer->status);
  return answer->completion;
}

absl::Status Attachment::State::Post(const Command& command, const WaitLimits& limits) {
  RETURN_IF_ERROR(waiter.Send(command, limits, OnPosted()));
  gauge.commands = port.commands();
  return absl::OkStatus();
}

internal::CommandPort::OnDone Attachment::State::OnPosted() {
  return [this](const Completion& completion, const absl::Status& status) {
    UpdateCommittedStep(completion);
    KeepError(completion, status);
  };
}

absl::StatusOr<BusyRange> Attachment::State::WaitForRange(uint64_t size_bytes,
                                                          const WaitLimits& limits) {
  std::optional<uint64_t> offset;
  const auto allocate = [&] {
    if (!offset.has_value()) offset = slots.AllocateBusy(size_bytes);
    return offset.has_value() || !over.ok();
  };
  RETURN_IF_ERROR(waiter.Wait(allocate, limits));
  if (!offset.has_value()) return over;
  gauge.sleeps = port.sleeps();
  return BusyRange(slots, *offset);
}

absl::Status Attachment::State::SendElements(protocol::Command command,
                                             std::span<const std::byte> bytes, uint64_t width,
                                             const WaitLimits& limits) {
  const uint64_t first_elem = command.element_offset;
  const uint64_t elems = parts.layout->partitions()[command.partition].elems;
  const uint64_t unit = width * std::min(elems, protocol::kGradUnitElems);
  const uint64_t piece_bytes_max = internal::PieceBytes(*parts.layout) / unit * unit;
  for (uint64_t begin = 0; begin < bytes.size(); begin += piece_bytes_max) {
    const auto piece = bytes.subspan(begin, std::min(piece_bytes_max, bytes.size() - begin));
    ASSIGN_OR_RETURN(BusyRange range, WaitForRange(piece.size(), limits));
    parts.CopyToArena(range.offset_bytes(), piece);
    command.arena_offset_bytes = range.offset_bytes();
    command.length_bytes = piece.size();
    command.element_offset = first_elem + begin / width;
    RETURN_IF_ERROR(Call(command, &range, limits).status());
  }
  return absl::OkStatus();
}

// ---------------------------------------- the lock of a call

Attachment::CallLock::CallLock(State& state, Busy busy) : state_(state) {
  const std::string& job = state.parts.job;
  if (state.InChild()) {
    status_ =
        MakeError(ErrorId::kForked,
                  absl::StrCat("job ", job, ": this attachment belongs to process ", state.pid),
                  "attach in the process that trains; a forked child may only read the weights");
    return;
  }
  if (busy == Busy::kGiveUp) {
    lock_ = std::unique_lock<protocol::Mutex>(state.mutex, std::try_to_lock);
    if (!lock_.owns_lock()) return;
  } else {
    lock_ = std::unique_lock<protocol::Mutex>(state.mutex);
  }
  state.next_question = std::chrono::steady_clock::now() + State::kQuestionPeriod;
  if (state.detached) {
    status_ = MakeError(ErrorId::kFenced, absl::StrCat("job ", job, ": this session was detached"),
                        "attach again");
  }
}

Attachment::CallLock::~CallLock() {
  if (!lock_.owns_lock()) return;
  if (state_.LookAtCopies()) state_.copy_watch.Begin();
  if (!state_.device_error.ok()) state_.EndAfterDeviceError();
  state_.UpdateCalls();
}

}  // namespace forebay::client
