// SPDX-License-Identifier: Apache-2.0
// Records a session's events in the trace of its rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "absl/strings/str_cat.h"
#include "client/internal/device_trace.h"
#include "protocol/os/clock.h"
#include "protocol/trace.h"

namespace forebay::client::internal {

// Threads  One at a time, under Attachment's mutex; device(): any.
class SessionTrace {
 public:
  // Begins to record in `memory`, the part of the arena that holds the trace. Nothing is recorded before Open and after Close.
  void Open(std::span<std::byte> memory) {
    writer_.emplace(*reinterpret_cast<protocol::TraceMemory*>(memory.data()));
    device_->Enable();
  }
  void Close() {
    writer_.reset();
    device_->Disable();
  }
  // Adds an event, with the present time as its end.
  void Note(protocol::ClientEvent event) {
    if (!writer_.has_value()) return;
    event.end_ns = protocol::MonotonicNs();
    writer_->Add(event);
  }
  // Adds step `t` and the device's events, and completes the step in the trace.
  void NoteStep(uint64_t t, uint64_t start_ns) {
    if (!writer_.has_value()) return;
    writer_->LeaveOut(
        device_->Take([&](const protocol::ClientEvent& event) { writer_->Add(event); }));
    Note({.lane = protocol::ClientLane::kStep,
          .name = absl::StrCat("step ", t),
          .start_ns = start_ns});
    writer_->Committed(t);
  }
  const std::shared_ptr<DeviceTrace>& device() const { return device_; }

 private:
  std::optional<protocol::TraceWriter> writer_;
  const std::shared_ptr<DeviceTrace> device_ = std::make_shared<DeviceTrace>();
};

}  // namespace forebay::client::internal
