// SPDX-License-Identifier: Apache-2.0
// The seam to the disk: asynchronous reads, writes and flushes of registered files, and the one
// place where the reactor sleeps. Production: io_uring, or threads where io_uring is forbidden.
// Tests: a simulated disk.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace forebay::nvme {

// Offset, length and memory of every transfer are multiples of this; meets O_DIRECT on 4Kn disks.
inline constexpr size_t kIoAlignment = 4096;

enum class FileIndex : uint32_t {};

enum class IoKind : uint8_t { kRead, kWrite, kFlush, kEvent };

// A request for Submit(). kWrite reads `data`, kRead writes it, and for kFlush it is null.
struct IoRequest {
  IoKind kind = IoKind::kFlush;
  FileIndex file{};
  uint64_t offset_bytes = 0;
  std::byte* data = nullptr;
  size_t size_bytes = 0;
  uint64_t token = 0;  // copied to the Completion; requests may share a token
};

struct Completion {
  uint64_t token = 0;
  // Number of bytes of a read or write, which may be fewer than requested; 0 for a flush; the counter for an event. Negative:
  // -errno.
  int64_t result = 0;
  IoKind kind = IoKind::kFlush;

  bool operator==(const Completion&) const = default;
};

// Ownership  Files, buffers and eventfds stay the caller's. The memory of a transfer belongs to the
//            engine from Submit() to its completion. The destructor waits for transfers in flight.
// Threads    RegisterFile(), RegisterBuffer() on the creating thread before the first use; from the
//            first Submit(), WatchEventFd() or Wait() on, everything on the thread of that first call.
// Limits     At most kBacklogMax transfers queued or in flight, kFilesMax files, kWatchesMax
//            watches. Only Wait() blocks; no heap allocation after the creation, registrations
//            aside.
class IoEngine {
 public:
  static constexpr uint32_t kBacklogMax = 4096;
  static constexpr uint32_t kFilesMax = 64;
  static constexpr uint32_t kWatchesMax = 4096;
  static constexpr uint32_t kBufferPiecesMax = 1024;
  static constexpr uint64_t kBufferPieceBytesMax = uint64_t{1} << 30;
  static constexpr std::chrono::nanoseconds kForever = std::chrono::nanoseconds::max();

  IoEngine() = default;
  IoEngine(const IoEngine&) = delete;
  IoEngine& operator=(const IoEngine&) = delete;
  virtual ~IoEngine() = default;

  virtual std::string_view name() const = 0;  // "io_uring", "threads", "simulated"

  // Registers `fd` for transfers. The caller must not close `fd` before UnregisterFile() or the end of the engine.
  //
  // Errors  kResourceExhausted  kFilesMax reached, or the kernel refused.
  virtual absl::StatusOr<FileIndex> RegisterFile(int fd) = 0;

  // Unregisters the file, which the kernel may hold open until then. No transfer of the file may be in flight. Ignores unknown
  // indices.
  virtual void UnregisterFile(FileIndex file) = 0;

  // Registers memory that transfers use often with the kernel, in pieces of at most kBufferPieceBytesMax. Best effort: returns
  // false and registers nothing if the memory cannot be registered (RLIMIT_MEMLOCK, or an engine without this feature).
  // Transfers then are only slower.
  virtual bool RegisterBuffer(std::span<std::byte> bytes) = 0;

  // Undoes a RegisterBuffer() of the same span. Does nothing if RegisterBuffer() returned false. Transfers in flight are not
  // disturbed.
  virtual void UnregisterBuffer(std::span<std::byte> bytes) = 0;

  // Queues one transfer or flush, which starts in the next Wait() at the latest. A flush covers the writes whose completions
  // were returned. Requests are not ordered otherwise. Each successful call gives exactly one Completion.
  //
  // Errors  kInvalidArgument    unknown file, misaligned, or empty; nothing was queued.
  //         kResourceExhausted  kBacklogMax reached. Retry after completions.
  virtual absl::Status Submit(const IoRequest& request) = 0;

  // Watches the eventfd `fd` (blocking or not) until UnwatchEventFd(): Wait() reports writes to it with `token`, and drains its
  // counter. A counter that is already above zero is reported too.
  //
  // Errors  kInvalidArgument    not an eventfd, or watched already.
  //         kResourceExhausted  kWatchesMax reached.
  virtual absl::Status WatchEventFd(int fd, uint64_t token) = 0;

  // Ends the watch of an eventfd: no later Wait() reports it, even if a write to it is pending. The counter may or may not have
  // been drained. Call it before closing `fd`. Ignores unknown descriptors.
  virtual void UnwatchEventFd(int fd) = 0;

  // Starts queued requests and sleeps until one completes or `timeout` has passed (0: does not sleep). Returns the number of
  // elements of `out` that were filled; 0 only on a timeout or a signal. `out` must not be empty.
  //
  // Errors  kInternal  the engine itself is broken; nothing further will complete.
  virtual absl::StatusOr<size_t> Wait(std::chrono::nanoseconds timeout,
                                      std::span<Completion> out) = 0;

 protected:
  // Makes the checks that every engine makes in Submit().
  absl::Status Check(const IoRequest& request) const;

  // Returns the lowest free index; kResourceExhausted if no index is free.
  absl::StatusOr<FileIndex> AllocateFileIndex();

  // Frees the index. Returns false if it was free already.
  bool ReleaseFileIndex(FileIndex file);

 private:
  std::array<bool, kFilesMax> file_taken_{};
};

}  // namespace forebay::nvme
