// SPDX-License-Identifier: Apache-2.0
#include "client/internal/written_pages.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "protocol/os/check.h"
#include "protocol/units.h"

namespace forebay::client::internal {

using protocol::RoundUp;

static_assert(std::atomic<uint8_t>::is_always_lock_free, "a signal handler uses it");

WrittenPages::WrittenPages(std::span<const std::byte> window, int file)
    : begin_(reinterpret_cast<uintptr_t>(window.data())),
      size_bytes_(RoundUp(window.size(), protocol::kPageBytes)),
      chunk_bytes_(std::max(kChunkBytesMin, RoundUp(size_bytes_ / kChunksMax, kChunkBytesMin))),
      chunk_count_((size_bytes_ + chunk_bytes_ - 1) / chunk_bytes_),
      file_(file),
      chunks_(std::make_unique<std::atomic<Chunk>[]>(chunk_count_)) {
  FOREBAY_CHECK(begin_ % protocol::kPageBytes == 0);
}

bool WrittenPages::Map(const WindowRange& range, int protection, int kind) const {
  void* const address = reinterpret_cast<void*>(begin_ + range.begin_bytes);
  // A signal handler runs this code, so it makes the system call itself: mmap() of ThreadSanitizer takes locks, and counts as a
  // write of the whole range.
  return ::syscall(SYS_mmap, address, range.end_bytes - range.begin_bytes, protection,
                   kind | MAP_FIXED, file_, static_cast<off_t>(range.begin_bytes)) != -1;
}

bool WrittenPages::MakeOwn(uintptr_t address) {
  const uint64_t index = (address - begin_) / chunk_bytes_;
  std::atomic<Chunk>& chunk = chunks_[index];
  for (;;) {
    Chunk before = Chunk::kShared;
    if (chunk.compare_exchange_strong(before, Chunk::kChanging)) break;
    if (before == Chunk::kOwn) return true;  // another thread made the chunk private
    ::sched_yield();
  }
  const WindowRange range{.begin_bytes = index * chunk_bytes_,
                          .end_bytes = std::min((index + 1) * chunk_bytes_, size_bytes_)};
  // The private mapping shows the file's pages until they are written.
  const bool is_mapped = Map(range, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE);
  if (is_mapped) has_own_ = true;
  chunk = is_mapped ? Chunk::kOwn : Chunk::kShared;
  return is_mapped;
}

std::vector<WindowRange> WrittenPages::Ranges() const {
  std::vector<WindowRange> ranges;
  for (uint64_t index = 0; index < chunk_count_ && has_own_; ++index) {
    if (chunks_[index] != Chunk::kOwn) continue;
    const uint64_t begin = index * chunk_bytes_;
    const uint64_t end = std::min(begin + chunk_bytes_, size_bytes_);
    if (!ranges.empty() && ranges.back().end_bytes == begin) {
      ranges.back().end_bytes = end;
    } else {
      ranges.push_back({.begin_bytes = begin, .end_bytes = end});
    }
  }
  return ranges;
}

void WrittenPages::GiveBack() {
  for (const WindowRange& range : Ranges()) {
    FOREBAY_CHECK(Map(range, PROT_READ, MAP_SHARED));
    for (uint64_t at = range.begin_bytes; at < range.end_bytes; at += chunk_bytes_) {
      chunks_[at / chunk_bytes_] = Chunk::kShared;
    }
  }
  has_own_ = false;
}

}  // namespace forebay::client::internal
