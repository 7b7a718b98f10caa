// SPDX-License-Identifier: Apache-2.0
// A queue of calls from the data threads to the control thread, which runs an event loop of kj.
#pragma once

#include <kj/async-unix.h>
#include <kj/async.h>

#include <memory>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "daemon/exec/loop_queue.h"
#include "protocol/doorbell.h"
#include "protocol/os/status_macros.h"

namespace forebay::gateway {

using ControlQueue = daemon::LoopQueue<absl::AnyInvocable<void()>>;

inline constexpr size_t kControlCallsMax = 8192;

// Runs the calls in the queue until this object is destroyed.
class ControlQueueDrain {
 public:
  ControlQueueDrain(kj::UnixEventPort& port, ControlQueue& queue)
      : queue_(queue),
        observer_(port, queue.fd(), kj::UnixEventPort::FdObserver::OBSERVE_READ),
        draining_(Drain().eagerlyEvaluate(nullptr)) {}

 private:
  // Arms the observer before it empties the queue: a call that is pushed in between wakes the observer again.
  kj::Promise<void> Drain() {
    auto next = observer_.whenBecomesReadable();
    protocol::DrainDoorbell(queue_.fd());
    queue_.DrainAll([](absl::AnyInvocable<void()>& call) { call(); });
    return next.then([this] { return Drain(); });
  }

  ControlQueue& queue_;
  kj::UnixEventPort::FdObserver observer_;
  kj::Promise<void> draining_;
};

}  // namespace forebay::gateway
