// SPDX-License-Identifier: Apache-2.0
// What a forward pass keeps for its backward, in host memory of the session's instead of the device's.
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

// Bytes are copied out behind the work that made them, on a stream of the store's, and back ahead of the work
// that needs them, on another: compute goes on beside both. They are the same to the bit.
//
// The room is AttachOptions::activation_bytes; what does not fit stays where it is. The daemon takes the
// bytes back when the session has ended.
//
// Errors     E_DEVICE  of any call: the device has failed.
// Threads    Any; calls are serialised, and none waits for the device.
// Ownership  May outlive the attachment, whose arena it keeps mapped and registered. Streams are borrowed.
class ActivationStore {
 public:
  // Of an attachment, and the device that it was attached with.
  //
  // Errors  E_OPTION  another device.
  static absl::StatusOr<std::unique_ptr<ActivationStore>> Create(
      const Attachment& attachment, std::shared_ptr<gpu::Device> device);
  ActivationStore(const ActivationStore&) = delete;
  ActivationStore& operator=(const ActivationStore&) = delete;
  ~ActivationStore();

  // Begins to copy bytes that work of `compute` begun so far has filled. They live, and are not written, until
  // HasLeft or LeaveBehind. Returns their number; nothing where the room that is left is too small.
  absl::StatusOr<std::optional<uint64_t>> Save(std::span<const std::byte> bytes,
                                               gpu::Stream& compute);
  // Whether they were copied: the memory that they came from may be freed or written.
  absl::StatusOr<bool> HasLeft(uint64_t number);
  // Work of `compute` begun from now on may free or write the memory that they came from.
  absl::Status LeaveBehind(uint64_t number, gpu::Stream& compute);

  // Begins to copy them to memory of as many bytes that work of `compute` begun from now on may write; it is
  // not freed before LoadedFor.
  //
  // Errors  E_FENCED  the session has ended, and the bytes with it; of LoadedFor too.
  absl::Status Load(uint64_t number, std::span<std::byte> to, gpu::Stream& compute);
  // Work of `compute` begun from now on finds them there, and may free it.
  absl::Status LoadedFor(uint64_t number, gpu::Stream& compute);
  // Ends a number: its room is free.
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
    uint64_t load = 0;  // of all loads
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
  const std::shared_ptr<const void> owner_;  // of the room
  const std::shared_ptr<gpu::Device> device_;
  // Says whether the room's bytes are still there; null: there is no room.
  std::atomic<uint64_t>* const mark_;
  const std::shared_ptr<internal::DeviceTrace> trace_;
  mutable protocol::Mutex mutex_;
  std::unique_ptr<gpu::Stream> out_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<gpu::Stream> in_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, Saved> saved_ ABSL_GUARDED_BY(mutex_);              // by number
  std::unique_ptr<internal::GradSlots> ranges_ ABSL_GUARDED_BY(mutex_);  // of the room; all busy
  uint64_t next_number_ ABSL_GUARDED_BY(mutex_) = 1;
  // Copied before what `in_` does next; so are lower ones.
  uint64_t left_number_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t loads_ ABSL_GUARDED_BY(mutex_) = 0;
  // Of ranges that were given back since `out_` has waited: the newest load.
  std::shared_ptr<const gpu::Event> freed_behind_ ABSL_GUARDED_BY(mutex_);
  uint64_t freed_load_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t used_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t used_bytes_max_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace forebay::client
