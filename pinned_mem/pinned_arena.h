// Page-locked, NUMA-bound host memory that is shared with training processes by file descriptor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "protocol/os/unique_fd.h"

namespace forebay::pinned_mem {

enum class LockPolicy { kRequired, kBestEffort };

// Who touches the segment; decides mode and seals.
enum class Access {
  kPrivate,  // this process alone; its descriptor is never sent
  kServed,   // clients read: mode 0400, and only ReadOnlyFd() is sent
  kShared,  // one client writes too: segment_fd() is sent, SealAfterMapping() once it has mapped it
};

struct ArenaOptions {
  std::string name;             // shown in /proc/PID/maps; at most kNameBytesMax bytes, no '/'
  int numa_node = 0;            // hwloc logical index, >= 0
  uint64_t capacity_bytes = 0;  // > 0, a multiple of 4096
  LockPolicy lock = LockPolicy::kRequired;  // kBestEffort: goes on unlocked, locked() tells
  Access access = Access::kPrivate;
};

// One memfd segment, used whole or handed out in ranges; 2 MiB pages by MADV_COLLAPSE where
// possible. Every page is bound, touched and locked before Create() returns, so no later call can
// fault a page in, move it, or find the node full. A new segment is all zeros.
//
// Every segment is sealed against SHRINK and GROW: its size is fixed for all who hold it.
//
// Ownership  The arena owns the pages and the fd. Ranges borrow: all must die before the arena.
// Threads    Create() on a worker (it blocks); all else on the loop thread. The bytes of a live
//            range may be given to any thread.
// Limits     At most kMaxRanges live ranges.
// Source     memfd_create(2), madvise(2), mbind(2), mlock(2), fcntl(2) F_ADD_SEALS, Linux
//            man-pages.
class PinnedArena {
 public:
  static constexpr uint64_t kRangeAlignment = 4096;  // bytes; meets O_DIRECT on 4Kn disks
  static constexpr int kMaxRanges = 1 << 16;
  static constexpr size_t kNameBytesMax = 200;

  // The right to use one byte range. Move-only; its destructor gives the range back.
  class [[nodiscard]] Range {
   public:
    Range(Range&& other) noexcept;
    Range& operator=(Range&& other) noexcept;
    ~Range();

    std::span<std::byte> bytes() const;  // fixed address for the range's life; not zeroed
    uint64_t offset_bytes() const;       // from the segment's start; clients add it to their map

   private:
    friend class PinnedArena;
    Range(PinnedArena& arena, uint64_t offset_bytes, uint64_t size_bytes);
    void Release();

    PinnedArena* arena_;
    uint64_t offset_bytes_;
    uint64_t size_bytes_;
  };

  // Reserves the whole segment or nothing. Blocks while the kernel zeroes every page.
  //
  // Errors  E_RANGE       an option breaks its rule above.
  //         E_DRAM_LIMIT  too little free memory; the message gives wanted and available bytes.
  //         E_MEMLOCK     kRequired, and RLIMIT_MEMLOCK is too low: limit, need, the line to add.
  static absl::StatusOr<std::unique_ptr<PinnedArena>> Create(const ArenaOptions& options);

  PinnedArena(const PinnedArena&) = delete;
  PinnedArena& operator=(const PinnedArena&) = delete;
  ~PinnedArena();

  // Takes `size_bytes` > 0, rounded up to the page. O(log ranges), no system call. The bytes are
  // what the range's last owner left.
  //
  // Errors  E_RANGE  size 0, or above the capacity.
  //         E_LIMIT  no free run is long enough now, or kMaxRanges live. Retry after a range died.
  absl::StatusOr<Range> Allocate(uint64_t size_bytes);

  std::span<std::byte> bytes() const;  // the whole segment; aligned to 2 MiB
  uint64_t capacity_bytes() const;
  uint64_t allocated_bytes() const;  // st_blocks of the segment, as the kernel counts it
  uint64_t huge_bytes() const;       // on 2 MiB pages when made
  uint64_t free_bytes() const;       // not taken
  bool locked() const;
  const std::string& name() const;

  const protocol::UniqueFd& segment_fd() const;  // writable; the arena keeps ownership

  // A new descriptor that cannot be made writable by another user: opened O_RDONLY, and with
  // kServed the mode 0400 bars opening it again for writing.
  absl::StatusOr<protocol::UniqueFd> ReadOnlyFd() const;

  // kShared only: no new writable mapping, no hole and no further seal from here on. The mappings
  // that exist stay writable. Call it when the client has mapped, before a byte of its is believed.
  // A repeat is harmless.
  absl::Status SealAfterMapping();
  bool IsSealed() const;  // asks the kernel for all four seals

 private:
  struct State;

 public:
  explicit PinnedArena(
      std::unique_ptr<State> state);  // for Create() alone: nobody else has a State

 private:
  std::unique_ptr<State> state_;
};

}  // namespace forebay::pinned_mem
