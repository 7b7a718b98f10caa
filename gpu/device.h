// What computes: streams of ordered work, events between them, and host memory a device may reach.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace forebay::gpu {

enum class HostAccess : uint8_t { kRead, kReadWrite };

// Host memory that the device reaches by itself; its destructor gives it back.
//
// Ownership  The bytes outlive the registration.
class HostRegistration {
 public:
  HostRegistration() = default;
  HostRegistration(const HostRegistration&) = delete;
  HostRegistration& operator=(const HostRegistration&) = delete;
  virtual ~HostRegistration() = default;
};

// A point in a stream's work. Outlives the stream that recorded it, not the device.
class Event {
 public:
  Event() = default;
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  virtual ~Event() = default;

  virtual bool Done() const = 0;  // all work before it has ended; never blocks
};

// Work that runs in order; streams run beside each other.
//
// Threads  One at a time.
class Stream {
 public:
  Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  virtual ~Stream() = default;  // ends what was begun first

  // Begins to copy. Both spans are of one length, do not overlap and live until the copy is done.
  virtual absl::Status Copy(std::span<std::byte> to, std::span<const std::byte> from) = 0;

  virtual absl::StatusOr<std::unique_ptr<Event>> Record() = 0;

  // Work begun from now on starts after the event. The event must be done or its stream alive.
  virtual absl::Status WaitFor(const Event& event) = 0;

  virtual absl::Status Synchronize() = 0;  // blocks until all work begun so far has ended
};

// Threads  Any.
class Device {
 public:
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  virtual ~Device() = default;

  virtual std::string_view name() const = 0;

  virtual absl::StatusOr<std::unique_ptr<Stream>> MakeStream() = 0;

  // Makes mapped memory known to the device. `access` says how the process has mapped it.
  //
  // Errors  E_UNSUPPORTED  the device cannot reach memory that is mapped so.
  virtual absl::StatusOr<std::unique_ptr<HostRegistration>> Register(
      std::span<const std::byte> bytes, HostAccess access) = 0;
};

}  // namespace forebay::gpu
