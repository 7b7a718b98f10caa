// SPDX-License-Identifier: Apache-2.0
// The loop thread: sleeps in the IoEngine, wakes for doorbells, disk, workers and calls.
#pragma once

#include <cstdint>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "daemon/exec/executor.h"
#include "daemon/exec/loop_queue.h"
#include "daemon/exec/task_runner.h"
#include "nvme/io/io_engine.h"

namespace forebay::daemon {

// A call that another thread sends to the loop thread.
using LoopCall = absl::AnyInvocable<void(Executor&)>;
using LoopInbox = LoopQueue<LoopCall>;

// Threads  Run() on the loop thread, which is the only one that touches executor, runner and engine
//          while it runs.
class Reactor {
 public:
  static constexpr uint64_t kStopWaitNs = 5'000'000'000;

  Reactor(nvme::IoEngine& engine, Executor& executor, TaskRunner& runner, LoopInbox& inbox);

  // Runs the loop until a call has set `stopping` and the executor is idle, or waits only for a disk that has not answered for
  // kStopWaitNs.
  //
  // Errors  E_INTERNAL and those of IoEngine::Wait: the engine is broken, and the loop cannot continue.
  absl::Status Run(const bool& stopping);

 private:
  nvme::IoEngine& engine_;
  Executor& executor_;
  TaskRunner& runner_;
  LoopInbox& inbox_;
};

}  // namespace forebay::daemon
