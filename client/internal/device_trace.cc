// SPDX-License-Identifier: Apache-2.0
#include "client/internal/device_trace.h"

#include <optional>
#include <utility>

#include "absl/status/statusor.h"
#include "protocol/wire.h"

namespace forebay::client::internal {

void DeviceTrace::Enable() {
  const protocol::MutexLock lock(mutex_);
  is_enabled_ = true;
}

void DeviceTrace::Disable() {
  const protocol::MutexLock lock(mutex_);
  is_enabled_ = false;
  works_.clear();
}

std::shared_ptr<const gpu::TimedEvent> DeviceTrace::Begin(gpu::Stream& stream) {
  {
    const protocol::MutexLock lock(mutex_);
    if (!is_enabled_) return nullptr;
    if (works_.size() >= protocol::kTraceRecords) {
      ++left_out_;
      return nullptr;
    }
  }
  auto begun = stream.RecordTimed();
  return begun.ok() ? *std::move(begun) : nullptr;
}

void DeviceTrace::End(gpu::Stream& stream, std::shared_ptr<const gpu::TimedEvent> begun,
                      const protocol::ClientEvent& event) {
  if (begun == nullptr) return;
  auto ended = stream.RecordTimed();
  if (!ended.ok()) return;
  const protocol::MutexLock lock(mutex_);
  if (!is_enabled_) return;
  works_.push_back({.begun = std::move(begun), .ended = *std::move(ended), .event = event});
}

uint64_t DeviceTrace::Take(absl::FunctionRef<void(const protocol::ClientEvent&)> take) {
  const protocol::MutexLock lock(mutex_);
  std::erase_if(works_, [&](const Work& work) {
    const absl::StatusOr<std::optional<uint64_t>> end_ns = work.ended->EndedNs();
    if (!end_ns.ok()) return true;
    if (!end_ns->has_value()) return false;
    const absl::StatusOr<std::optional<uint64_t>> start_ns = work.begun->EndedNs();
    if (!start_ns.ok()) return true;
    protocol::ClientEvent event = work.event;
    event.start_ns = start_ns->value_or(**end_ns);
    event.end_ns = **end_ns;
    take(event);
    return true;
  });
  return std::exchange(left_out_, 0);
}

}  // namespace forebay::client::internal
