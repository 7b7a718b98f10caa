// SPDX-License-Identifier: Apache-2.0
// Holds activations, which a forward pass saves for its backward pass, in host memory of the session instead of device memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"
#include "gpu/device.h"
#include "protocol/os/mutex.h"

namespace forebay::client {

namespace internal {
class GradSlots;
}  // namespace internal

// Copies bytes out after the work that filled them, on a stream of the store, and back before the work that needs them, on
// another stream of the store. Both copies overlap with compute. Loaded bytes equal the saved bytes.
//
// The room has MemoryOptions::activation_bytes. Bytes that do not fit stay in device memory. The daemon takes the room back
// when the session has ended.
//
// Errors     E_DEVICE  of any call: the device has failed.
// Threads    Any; calls are serialised, and none waits for the device.
// Ownership  May outlive the attachment, whose arena it keeps mapped and registered. Streams are borrowed.
class ActivationStore {
 public:
  // Creates the store of an attachment. `device` must be the device that the attachment was attached with.
  //
  // Errors  E_OPTION  another device.
  static absl::StatusOr<std::unique_ptr<ActivationStore>> Create(
      const Attachment& attachment, std::shared_ptr<gpu::Device> device);
  ActivationStore(const ActivationStore&) = delete;
  ActivationStore& operator=(const ActivationStore&) = delete;
  ~ActivationStore();

  // Begins to copy `bytes`, which work begun on `compute` so far fills. The caller neither frees nor writes `bytes` before
  // HasLeft is true or LeaveBehind was called. Returns the number of the saved bytes, or nothing if the room has too little
  // free space.
  absl::StatusOr<std::optional<uint64_t>> Save(std::span<const std::byte> bytes,
                                               gpu::Stream& compute);
  // Returns whether the saved bytes were copied out. Their source may then be freed or written.
  absl::StatusOr<bool> HasLeft(uint64_t number);
  // Makes `compute` wait for the copy: work begun on `compute` from now on may free or write the source of the saved bytes.
  absl::Status LeaveBehind(uint64_t number, gpu::Stream& compute);

  // Begins to copy saved bytes to `to`, which has their size and which work begun on `compute` from now on may write. The
  // caller does not free `to` before LoadedFor was called.
  //
  // Errors  E_FENCED  the session has ended, and the saved bytes are lost. LoadedFor returns E_FENCED too.
  absl::Status Load(uint64_t number, std::span<std::byte> to, gpu::Stream& compute);
  // Makes `compute` wait for the load: work begun on `compute` from now on finds the bytes in `to`, and may free `to`.
  absl::Status LoadedFor(uint64_t number, gpu::Stream& compute);
  // Frees the room of saved bytes. Their number is invalid afterwards.
  absl::Status Drop(uint64_t number);

  uint64_t room_bytes() const { return room_.size(); }
  uint64_t used_bytes() const;
  uint64_t used_bytes_max() const;

 private:
  struct Saved {
    uint64_t offset = 0;
    uint64_t size_bytes = 0;
    std::shared_ptr<const gpu::Event> left;
    std::shared_ptr<const gpu::Event> loaded;
    uint64_t load = 0;  // number of the newest load, counted over all loads
  };

  ActivationStore(const Attachment& attachment, std::shared_ptr<gpu::Device> device);

  absl::StatusOr<std::shared_ptr<const gpu::Event>> BeginSave(std::span<const std::byte> bytes,
                                                              uint64_t offset, gpu::Stream& compute)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckKept() const;
  absl::StatusOr<Saved*> Find(uint64_t number) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::optional<uint64_t> Take(uint64_t size_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void GiveBack(uint64_t offset, uint64_t size_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::span<std::byte> room_;
  const std::shared_ptr<const void> owner_;  // keeps `room_` mapped
  const std::shared_ptr<gpu::Device> device_;
  // Nonzero as long as the bytes of `room_` are intact. Null if `room_` is empty.
  std::atomic<uint64_t>* const mark_;
  const std::shared_ptr<internal::DeviceTrace> trace_;
  mutable protocol::Mutex mutex_;
  std::unique_ptr<gpu::Stream> out_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<gpu::Stream> in_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, Saved> saved_ ABSL_GUARDED_BY(mutex_);              // by number
  std::unique_ptr<internal::GradSlots> ranges_ ABSL_GUARDED_BY(mutex_);  // busy ranges of `room_`
  uint64_t next_number_ ABSL_GUARDED_BY(mutex_) = 1;
  // Saved bytes up to this number were copied out before the next work of `in_`.
  uint64_t left_number_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t loads_ ABSL_GUARDED_BY(mutex_) = 0;
  // Event after the newest load from a range that was freed since `out_` last waited. The next save waits for it.
  std::shared_ptr<const gpu::Event> freed_behind_ ABSL_GUARDED_BY(mutex_);
  uint64_t freed_load_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t used_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t used_bytes_max_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace forebay::client
