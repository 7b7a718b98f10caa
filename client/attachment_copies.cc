// SPDX-License-Identifier: Apache-2.0
// Copies on the device that are under way: what waits for them, and who waits for that.

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "client/internal/attachment_state.h"
#include "client/internal/stopwatch.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"

namespace forebay::client {

using internal::MakeCommand;
using internal::WaitLimits;
using protocol::Command;
using protocol::Completion;
using protocol::ErrorId;
using protocol::MakeError;
using protocol::Op;

absl::Status Attachment::State::RegisterArenas() {
  gpu::Device& device = *parts.device;
  const bool is_writable = parts.weights_access == internal::MapAccess::kReadWrite;
  auto registered = device.Register(
      parts.weights->bytes(), is_writable ? gpu::HostAccess::kReadWrite : gpu::HostAccess::kRead);
  if (is_writable) parts.weights->MakeReadOnly();
  if (registered.ok()) {
    weights_registration = *std::move(registered);
  } else if (protocol::IdOf(registered.status()) == ErrorId::kUnsupported) {
    ASSIGN_OR_RETURN(ring, gpu::PinnedRing::Create(device));
  } else {
    return registered.status();
  }
  registered = device.Register(parts.grad->bytes(), gpu::HostAccess::kReadWrite);
  if (registered.ok()) {
    grad_registration = *std::move(registered);
  } else if (protocol::IdOf(registered.status()) != ErrorId::kUnsupported) {
    return registered.status();
  }
  ASSIGN_OR_RETURN(stream, device.MakeStream());
  return absl::OkStatus();
}

absl::Status Attachment::State::CheckReach(std::span<const std::byte> bytes, uint64_t width) {
  if (reinterpret_cast<uintptr_t>(bytes.data()) % width != 0) {
    return MakeError(ErrorId::kRange, absl::StrCat("an address that is no multiple of the ", width,
                                                   " bytes that an element has"));
  }
  return KeepDeviceError(parts.device->CheckReach(bytes));
}

absl::Status Attachment::State::CopyToDevice(gpu::Stream& to_stream, std::span<std::byte> to,
                                             std::span<const std::byte> from,
                                             const WaitLimits& limits) {
  if (ring == nullptr) return to_stream.Copy(to, from);
  size_t begun = 0;
  absl::Status status;
  const auto copy = [&] {
    const absl::StatusOr<size_t> bytes =
        ring->Begin(to_stream, to.subspan(begun), from.subspan(begun));
    status.Update(bytes.status());
    begun += bytes.value_or(0);
    return !status.ok() || begun == from.size();
  };
  RETURN_IF_ERROR(WaitForCopies(copy, limits));
  return status;
}

absl::Status Attachment::State::KeepDeviceError(absl::Status status) {
  if (protocol::IdOf(status) == ErrorId::kDevice && device_error.ok()) device_error = status;
  return status;
}

bool Attachment::State::HasEnded(const gpu::Event& event) {
  const absl::StatusOr<bool> done = event.Done();
  return !KeepDeviceError(done.status()).ok() || *done;
}

void Attachment::State::EndAfterDeviceError() {
  constexpr std::chrono::seconds kPatience{5};  // afterwards the daemon sees the process end
  if (is_ended) return;
  is_ended = true;
  if (parts.connection != nullptr) {
    const WaitLimits limits{.deadline = internal::Deadline::After(kPatience)};
    parts.connection->control->Detach(limits).IgnoreError();
  }
  port.Close(device_error);
}

bool Attachment::State::LookAtCopies() {
  // False where the ring is full.
  const auto send = [this](const Command& command, internal::CommandPort::OnDone on_done,
                           absl::Status& kept) {
    const absl::StatusOr<bool> sent = port.TrySend(command, on_done);
    if (!sent.ok() && kept.ok()) kept = sent.status();
    if (sent.ok() && *sent) gauge.commands = port.commands();
    return sent;
  };
  const auto give_back = [&](uint64_t lease) {
    Command command = MakeCommand(Op::kRelease);
    command.lease_id = lease;
    return send(command, OnPosted(), kept_release_error);
  };
  while (!late_leases.empty()) {
    const uint64_t lease = late_leases.back();
    late_leases.pop_back();  // before it is sent: sending may handle answers, which add leases
    if (give_back(lease).value_or(true)) continue;
    late_leases.push_back(lease);
    break;
  }
  copies.remove_if([&](CopiesInFlight& copy) {
    std::pmr::vector<uint64_t>& leases = copy.leases;
    if (!HasEnded(*copy.done)) return false;
    while (!leases.empty() && give_back(leases.back()).value_or(true)) leases.pop_back();
    return leases.empty();
  });
  gradient_copies.remove_if([this](const GradientCopy& copy) { return HasEnded(*copy.done); });
  unsent.remove_if([&](UnsentGradient& gradient) {
    if (!HasEnded(gradient.copied)) return false;
    if (!device_error.ok()) return true;  // what was copied is unknown
    const absl::StatusOr<bool> sent =
        send(gradient.command, OnGradientDone(gradient.range.offset_bytes()), kept_grad_error);
    if (sent.value_or(false)) gradient.range.HandOver();
    return sent.value_or(true);
  });
  return HasCopies();
}

void Attachment::State::AskWhetherItGoesOn() {
  const auto now = std::chrono::steady_clock::now();
  if (has_asked || now < next_question) return;
  next_question = now + kQuestionPeriod;
  internal::CommandPort::OnDone on_answer = [this](const Completion& completion,
                                                   const absl::Status& status) {
    UpdateCommittedStep(completion);
    has_asked = false;
    over = status;
  };
  const absl::StatusOr<bool> sent = port.TrySend(MakeCommand(Op::kCheck), on_answer);
  if (!sent.ok()) return;  // the port says so to every call
  has_asked = *sent;
  if (*sent) gauge.commands = port.commands();
}

absl::Status Attachment::State::WaitForCopies(absl::FunctionRef<bool()> ended,
                                              const WaitLimits& limits) {
  constexpr std::chrono::microseconds kPause{20};
  constexpr int kLooks = internal::kInterruptPeriod / kPause;
  for (int looks = 1;; ++looks) {
    AskWhetherItGoesOn();
    LookAtCopies();
    port.Poll().IgnoreError();  // copies end even if the daemon has died
    if (ended()) return absl::OkStatus();
    RETURN_IF_ERROR(over);
    if (port.is_restarting()) RETURN_IF_ERROR(Reattach(limits));
    if (looks % kLooks == 0 && limits.Interrupted()) {
      return MakeError(ErrorId::kInterrupted, "the call was interrupted; its outcome is unknown");
    }
    if (limits.deadline.Expired()) {
      return MakeError(ErrorId::kTimeout,
                       "the call's time ran out before the device's copies ended",
                       "the device's stream waits for something: call again");
    }
    std::this_thread::sleep_for(kPause);
  }
}

absl::Status Attachment::State::EndWeightCopies(const WaitLimits& limits) {
  RETURN_IF_ERROR(WaitForCopies([this] { return !HasWeightCopies(); }, limits));
  return KeptReleaseError();
}

}  // namespace forebay::client
