// SPDX-License-Identifier: Apache-2.0
// How the device reaches a session's arenas.
#pragma once

#include <span>
#include <string>

#include "client/internal/session_link.h"
#include "gpu/pinned_ring.h"

namespace forebay::client::internal {

// Owns the registrations of the arenas with the device, and the stream that gradients are copied on. CheckReach, HasEnded and
// WaitFor store errors of the device (StoredErrors::StoreDevice). The callers of the other methods store theirs.
//
// States   created  nothing is registered. Only Register may be called.
//          open     after Register. The device reads weights in place, or through a ring if it cannot reach them.
//          closed   after Close. Only registration() and description() may be called.
// Threads  One at a time, under Attachment's mutex. description() needs no mutex.
class DeviceCopies {
 public:
  DeviceCopies(const SessionParts& parts, SessionLink& link) : parts_(parts), link_(link) {}

  absl::Status Register();
  void Close();

  // Checks that the device's streams can copy from or to `bytes`, which are elements of `width` bytes.
  absl::Status CheckReach(std::span<const std::byte> bytes, uint64_t width);
  // Begins to copy weights; waits while the ring is full.
  absl::Status CopyToDevice(gpu::Stream& to_stream, std::span<std::byte> to,
                            std::span<const std::byte> from, const WaitLimits& limits);
  // Returns whether the device does no more work before the event: the work is done, or the device failed. Null: true.
  bool HasEnded(const std::shared_ptr<const gpu::Event>& event);
  // Waits until HasEnded.
  absl::Status WaitFor(const std::shared_ptr<const gpu::Event>& event, const WaitLimits& limits);

  gpu::Stream& stream() { return *stream_; }
  // Registration of the gradient arena. Null if the device cannot reach it.
  const std::shared_ptr<gpu::HostRegistration>& registration() const { return grad_registration_; }
  // See Attachment::device_access.
  const std::string& description() const { return description_; }

 private:
  std::string Describe() const;

  const SessionParts& parts_;
  SessionLink& link_;
  std::string description_;  // const from Register on
  std::unique_ptr<gpu::HostRegistration> weights_registration_;
  std::shared_ptr<gpu::HostRegistration> grad_registration_;
  std::unique_ptr<gpu::PinnedRing> ring_;  // null: the device reads the weights by itself
  std::unique_ptr<gpu::Stream> stream_;
};

}  // namespace forebay::client::internal
