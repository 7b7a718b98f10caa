// Copies on the device that are under way: what waits for them, and who waits for that.

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

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

bool Attachment::State::LookAtCopies() {
  // False where the ring is full.
  const auto send = [this](const Command& command, const internal::CommandPort::OnDone& on_done,
                           absl::Status& kept) {
    const absl::StatusOr<bool> sent = port.TrySend(command, on_done);
    if (!sent.ok() && kept.ok()) kept = sent.status();
    if (sent.ok() && *sent) ++gauge.commands;
    return sent;
  };
  const auto give_back = [&](uint64_t lease) {
    Command command = MakeCommand(Op::kRelease);
    command.lease_id = lease;
    return send(command, OnPosted(), kept_release_error);
  };
  copies.remove_if([&](CopiesInFlight& copy) {
    std::vector<uint64_t>& leases = copy.leases;
    if (!copy.done->Done()) return false;
    while (!leases.empty() && give_back(leases.back()).value_or(true)) leases.pop_back();
    return leases.empty();
  });
  gradient_copies.remove_if([](const GradientCopy& copy) { return copy.done->Done(); });
  unsent.remove_if([&](UnsentGradient& gradient) {
    if (!HasEnded(gradient.copied)) return false;
    const absl::StatusOr<bool> sent =
        send(gradient.command, OnGradientDone(gradient.range.offset_bytes()), kept_grad_error);
    if (sent.value_or(false)) gradient.range.HandOver();
    return sent.value_or(true);
  });
  return HasCopies();
}

absl::Status Attachment::State::WaitForCopies(const std::function<bool()>& ended,
                                              const WaitLimits& limits) {
  constexpr std::chrono::microseconds kPause{20};
  constexpr int kLooks = internal::kInterruptPeriod / kPause;
  for (int looks = 1;; ++looks) {
    LookAtCopies();
    if (ended()) return absl::OkStatus();
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
  RETURN_IF_ERROR(WaitForCopies([this] { return copies.empty(); }, limits));
  return KeptReleaseError();
}

}  // namespace forebay::client
