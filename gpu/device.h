// SPDX-License-Identifier: Apache-2.0
// A compute device: streams of ordered work, events between them, its own memory, and host memory that it can reach.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace forebay::gpu {

// Access that the process's mapping of memory allows.
enum class HostAccess : uint8_t { kRead, kReadWrite };

// Host memory that the device reaches by itself; its destructor gives it back.
//
// Ownership  The bytes outlive the registration, which outlives the copies from and to them.
class HostRegistration {
 public:
  HostRegistration() = default;
  HostRegistration(const HostRegistration&) = delete;
  HostRegistration& operator=(const HostRegistration&) = delete;
  virtual ~HostRegistration() = default;
};

// Allocator to which DeviceMemory returns its memory.
//
// Threads  Any.
class MemorySource {
 public:
  MemorySource() = default;
  MemorySource(const MemorySource&) = delete;
  MemorySource& operator=(const MemorySource&) = delete;
  virtual ~MemorySource() = default;

  virtual void Free(std::span<std::byte> bytes) = 0;  // memory of this source
};

// Memory of the device, for the work of one stream; empty: none. Its destructor frees it behind the work
// that the stream already has; other streams' work with it has ended or been waited for by then.
class DeviceMemory {
 public:
  DeviceMemory() = default;
  DeviceMemory(std::shared_ptr<MemorySource> source, std::span<std::byte> bytes)
      : source_(std::move(source)), bytes_(bytes) {}
  DeviceMemory(DeviceMemory&& other) noexcept
      : source_(std::move(other.source_)), bytes_(std::exchange(other.bytes_, {})) {}
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(source_, other.source_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~DeviceMemory() {
    if (source_ != nullptr) source_->Free(bytes_);
  }

  // An address of the device's: the processor reads it only where the device is the host.
  std::span<std::byte> bytes() const { return bytes_; }

 private:
  std::shared_ptr<MemorySource> source_;
  std::span<std::byte> bytes_;
};

// A point in a stream's work. Outlives the stream that recorded it.
class Event {
 public:
  Event() = default;
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  virtual ~Event() = default;

  // Whether all work before it has ended; never blocks.
  //
  // Errors  E_DEVICE  the device has failed: what the work has done is unknown, and it does nothing more.
  virtual absl::StatusOr<bool> Done() const = 0;
};

// An event that also tells when the work before it ended.
class TimedEvent {
 public:
  TimedEvent() = default;
  TimedEvent(const TimedEvent&) = delete;
  TimedEvent& operator=(const TimedEvent&) = delete;
  virtual ~TimedEvent() = default;

  // When the work before it ended, by CLOCK_MONOTONIC; nothing: it has not. Never blocks.
  //
  // Errors  E_DEVICE  the device has failed.
  virtual absl::StatusOr<std::optional<uint64_t>> EndedNs() const = 0;
};

// Work that runs in order. Different streams run concurrently. If an earlier piece of work was alike, and its events and memory
// were released, new work allocates no memory of the process.
//
// Errors   E_DEVICE  of any call: the device has failed, in this call or in work begun earlier.
// Threads  One at a time.
class Stream {
 public:
  Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  virtual ~Stream() = default;  // ends what was begun first, where the stream is not borrowed

  // Begins to copy, between memory of the device and of the host either way. Both spans are of one
  // length, do not overlap and live until the copy is done. Where the host's is not registered, the call
  // may wait for the stream's earlier work.
  //
  // Errors  E_RANGE  the spans are not of one length.
  virtual absl::Status Copy(std::span<std::byte> to, std::span<const std::byte> from) = 0;

  virtual absl::StatusOr<std::shared_ptr<const Event>> Record() = 0;
  virtual absl::StatusOr<std::shared_ptr<const TimedEvent>> RecordTimed() = 0;

  // Work begun from now on starts after the event.
  //
  // Errors  E_OPTION  an event of another device.
  virtual absl::Status WaitFor(const Event& event) = 0;

  virtual absl::Status Synchronize() = 0;  // blocks until all work begun so far has ended

  // Handle for libraries of the device: a CUstream of CUDA; 0 for the host.
  virtual uintptr_t handle() const = 0;

  // Allocates memory with undefined content for work that is begun on this stream from now on.
  //
  // Errors  E_DEVICE_MEMORY  the device has too little free memory.
  virtual absl::StatusOr<DeviceMemory> Allocate(size_t size_bytes) = 0;
};

// Checks the arguments of Stream::Copy.
absl::Status CheckCopy(std::span<std::byte> to, std::span<const std::byte> from);

// Threads  Any.
class Device {
 public:
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  virtual ~Device() = default;

  virtual std::string_view name() const = 0;  // "host", "cuda:0"

  // Whether it is the processor, whose work has ended when a call returns.
  virtual bool is_host() const { return false; }

  virtual absl::StatusOr<std::unique_ptr<Stream>> MakeStream() = 0;

  // Wraps a stream of another library, given by its handle (CUDA: a CUstream; 0 is the default stream). The caller must not
  // destroy the stream before the wrapper. The wrapper's destructor waits for nothing.
  virtual absl::StatusOr<std::unique_ptr<Stream>> BorrowStream(uintptr_t handle) = 0;

  // Returns the bytes that can still be allocated. nullopt: the device has no memory limit.
  virtual absl::StatusOr<std::optional<uint64_t>> FreeBytes() = 0;

  // Checks that the device's streams can copy from or to `bytes`: memory of the device, or of the host.
  //
  // Errors  E_RANGE  memory of another device.
  virtual absl::Status CheckReach(std::span<const std::byte> bytes) const = 0;

  // Whether it takes memory that the process has mapped read-only.
  virtual bool registers_read_only() const = 0;

  // Registers mapped memory, from a page's begin on, with the device. Memory that was mapped writable may
  // become read-only (mprotect) afterwards.
  //
  // Errors  E_UNSUPPORTED  the device cannot reach this memory, or memory that is mapped so.
  virtual absl::StatusOr<std::unique_ptr<HostRegistration>> Register(
      std::span<const std::byte> bytes, HostAccess access) = 0;
};

}  // namespace forebay::gpu
