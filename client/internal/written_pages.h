// SPDX-License-Identifier: Apache-2.0
// Parts of a read-only shared-memory window that this process has written: private copies at the same addresses.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace forebay::client::internal {

// A range of bytes in a window.
struct WindowRange {
  uint64_t begin_bytes = 0;
  uint64_t end_bytes = 0;

  bool operator==(const WindowRange&) const = default;
};

// Tracks which pages of a window this process has made private. The window is cut into chunks. A chunk is in one of three
// states:
//
// shared   a read-only mapping of the shared file, in which writes of other processes show
// changing a thread with a fault in the chunk maps the file privately; other threads wait for the mapping
// own      a private mapping of the file that can be written: the kernel copies each page at its first write
//
// Threads  MakeOwn: any, also in a signal handler. Ranges and GiveBack: while no other thread writes into the window.
class WrittenPages {
 public:
  static constexpr uint64_t kChunkBytesMin = uint64_t{2} << 20;
  // Each chunk takes at most two mappings, so that all of them stay far below the kernel's limit for a process
  // (vm.max_map_count, 65530).
  static constexpr uint64_t kChunksMax = uint64_t{1} << 13;

  // `window` begins at a page and maps `file` from its first byte on. `file` must outlive the object.
  WrittenPages(std::span<const std::byte> window, int file);

  // Makes the chunk at `address`, which lies in the window, private to this process. Returns false if the system refuses the
  // mapping. Async-signal-safe.
  bool MakeOwn(uintptr_t address);

  bool empty() const { return !has_own_; }
  std::vector<WindowRange> Ranges() const;  // ascending; neighbours are joined

  // Drops this process's writes: the window shows the file's bytes again.
  void GiveBack();

 private:
  enum class Chunk : uint8_t { kShared, kChanging, kOwn };

  bool Map(const WindowRange& range, int protection, int kind) const;

  const uintptr_t begin_;
  const uint64_t size_bytes_;
  const uint64_t chunk_bytes_;
  const uint64_t chunk_count_;
  const int file_;
  const std::unique_ptr<std::atomic<Chunk>[]> chunks_;
  std::atomic<bool> has_own_{false};
};

}  // namespace forebay::client::internal
