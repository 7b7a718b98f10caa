// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/reactor.h"

#include <array>
#include <chrono>

#include "daemon/exec/clock.h"
#include "protocol/os/status_macros.h"

namespace forebay::daemon {
namespace {

constexpr uint64_t kInboxToken = 1;
constexpr uint64_t kRunnerToken = 2;
constexpr size_t kCompletionsPerTurn = 64;

}  // namespace

Reactor::Reactor(nvme::IoEngine& engine, Executor& executor, TaskRunner& runner, LoopInbox& inbox)
    : engine_(engine), executor_(executor), runner_(runner), inbox_(inbox) {}

absl::Status Reactor::Run(const bool& stopping) {
  RETURN_IF_ERROR(engine_.WatchEventFd(inbox_.fd(), kInboxToken));
  RETURN_IF_ERROR(engine_.WatchEventFd(runner_.wake_fd(), kRunnerToken));
  std::array<nvme::Completion, kCompletionsPerTurn> completions;
  uint64_t stop_ns = 0;
  while (true) {
    inbox_.DrainAll([this](LoopCall& call) { call(executor_); });
    runner_.RunFinished();
    const bool more = executor_.PollSessions();
    if (stopping) {
      if (stop_ns == 0) stop_ns = MonotonicNs();
      if (executor_.idle()) break;
      if (executor_.waits_for_swap_alone() && MonotonicNs() - stop_ns >= kStopWaitNs) break;
    }

    const auto sleep = executor_.Tick();
    const auto timeout = more ? std::chrono::nanoseconds(0) : sleep;
    ASSIGN_OR_RETURN(const size_t count, engine_.Wait(timeout, completions));
    for (size_t i = 0; i < count; ++i) executor_.OnCompletion(completions[i]);
  }
  engine_.UnwatchEventFd(inbox_.fd());
  engine_.UnwatchEventFd(runner_.wake_fd());
  return absl::OkStatus();
}

}  // namespace forebay::daemon
