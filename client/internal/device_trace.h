// SPDX-License-Identifier: Apache-2.0
// Records when work on a device's streams began and ended, by the device's clock.
#pragma once

#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "gpu/device.h"
#include "protocol/os/mutex.h"
#include "protocol/trace.h"

namespace forebay::client::internal {

// Records the times of work on a device's streams for the trace. No thread waits for that work. Work of a failed device is not
// recorded.
//
// Threads  Any.
class DeviceTrace {
 public:
  // Records nothing until Enable.
  DeviceTrace() = default;
  DeviceTrace(const DeviceTrace&) = delete;
  DeviceTrace& operator=(const DeviceTrace&) = delete;

  void Enable();
  void Disable();  // also drops all records

  // Marks the point before work of the stream. Returns null if this work is not recorded.
  std::shared_ptr<const gpu::TimedEvent> Begin(gpu::Stream& stream);
  // Records the work of the same stream since Begin as `event`. The event's times are ignored, and its name lives until Take.
  void End(gpu::Stream& stream, std::shared_ptr<const gpu::TimedEvent> begun,
           const protocol::ClientEvent& event);

  // Passes the events of work that has ended to `take`, with their times, and drops them.
  // Returns  Number of events that were lost since the last call because there were too many.
  uint64_t Take(absl::FunctionRef<void(const protocol::ClientEvent&)> take);

 private:
  struct Work {
    std::shared_ptr<const gpu::TimedEvent> begun;
    std::shared_ptr<const gpu::TimedEvent> ended;
    protocol::ClientEvent event;
  };

  protocol::Mutex mutex_;
  bool is_enabled_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<Work> works_ ABSL_GUARDED_BY(mutex_);  // at most kTraceRecords
  uint64_t left_out_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace forebay::client::internal
