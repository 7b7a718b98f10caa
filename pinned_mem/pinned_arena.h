// SPDX-License-Identifier: Apache-2.0
// Page-locked, NUMA-bound host memory that is shared with training processes by file descriptor.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinned_mem/numa_placement.h"
#include "protocol/os/unique_fd.h"

namespace forebay::pinned_mem {

enum class LockPolicy {
  kRequired,
  kBestEffort,  // continues unlocked; locked() reports it
};

// Who uses the segment besides this process; decides mode and descriptors.
enum class Access {
  kPrivate,  // nobody
  kServed,   // clients read: mode 0400, descriptors of clients are read-only
  kShared,   // one client reads and writes
};

// Fate of the pages when the destructor runs while another process has the segment open or mapped.
enum class AtEnd {
  kFreePages,       // frees them; a client reads zeros from then on
  kKeepForReaders,  // leaves them to the kernel, which frees them with the last descriptor or mapping
};

// On whole pages.
struct ArenaPart {
  uint64_t offset_bytes = 0;
  // > 0.
  uint64_t size_bytes = 0;
};

struct ArenaOptions {
  // Shown in /proc/PID/maps. At most kNameBytesMax bytes, no '/'.
  std::string name;
  // > 0, a multiple of 4096.
  uint64_t capacity_bytes = 0;
  LockPolicy lock = LockPolicy::kRequired;
  Access access = Access::kPrivate;
  AtEnd at_end = AtEnd::kFreePages;
  // Nodes that are preferred: where one is full the kernel takes another.
  Placement placement = {};
  // Threads that touch the pages of a large arena; they live as long as Create().
  int threads = 1;
  // Parts that Create() gives memory, ascending, apart from each other; nothing: the whole arena.
  std::optional<std::vector<ArenaPart>> parts = {};
  // Grows by the bytes that have memory while Create() runs; null: nobody looks.
  std::shared_ptr<std::atomic<uint64_t>> populated_bytes = {};
};

// One memfd segment, used whole or handed out in ranges; 2 MiB pages by MADV_COLLAPSE where
// possible. Every page is bound, touched and locked before Create() or Populate() returns, so no later
// call can fault a page in, move it, or find the node full. New memory is all zeros. Where parts of
// an arena have no memory, nobody touches them.
//
// Every segment is sealed with SHRINK, GROW and SEAL: its size is fixed for everybody, and nobody
// can stop this process from writing it or from freeing its pages. A client that punches a hole
// into a shared segment loses its own bytes; this process then reads zeros.
//
// Ownership  The arena owns the pages and the fd. Ranges borrow: all must die before the arena.
// Threads    Create(), Adopt(), Populate(), FreePart(), FreeIfUnused() and the destructor on a worker (they
//            block), one of them at a time for one arena; all else on the loop thread. The bytes of a
//            live range may be given to any thread.
// Limits     At most kMaxRanges live ranges.
// Source     memfd_create(2), madvise(2), set_mempolicy(2), mlock(2), fcntl(2) F_ADD_SEALS, fallocate(2),
//            Linux man-pages.
class PinnedArena {
 public:
  // Bytes; enough for O_DIRECT on disks with 4 KiB sectors.
  static constexpr uint64_t kRangeAlignment = 4096;
  static constexpr int kMaxRanges = 1 << 16;
  static constexpr size_t kNameBytesMax = 200;

  // The right to use one byte range. Move-only; its destructor gives the range back.
  class [[nodiscard]] Range {
   public:
    Range(Range&& other) noexcept;
    Range& operator=(Range&& other) noexcept;
    ~Range();

    // The address is fixed while the range lives; not zeroed.
    std::span<std::byte> bytes() const;
    // From the start of the segment; clients add it to their mapping.
    uint64_t offset_bytes() const;

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

  // An arena over the memfd that an earlier process made with the same options, from a descriptor of
  // DuplicateFd(). The pages of `parts` have memory, and keep their bytes, NUMA nodes and size;
  // no other page gets any. All ranges are free. Costs a system call for 2 MiB: no page is copied.
  //
  // Ownership  An error closes the descriptor; it frees no page that somebody else has.
  // Errors     E_RANGE       an option breaks its rule.
  //            E_CORRUPT     not such a memfd, or a page of `parts` has lost its memory: where.
  //            E_DRAM_LIMIT  too little free memory to bring pages back from swap.
  //            E_MEMLOCK     as Create.
  static absl::StatusOr<std::unique_ptr<PinnedArena>> Adopt(const ArenaOptions& options,
                                                            protocol::UniqueFd fd);

  PinnedArena(const PinnedArena&) = delete;
  PinnedArena& operator=(const PinnedArena&) = delete;
  ~PinnedArena();

  // Our own open file description once more, close-on-exec: for whoever keeps the pages until the
  // next process adopts them. Not for clients. FreeIfUnused() does not count it.
  //
  // Errors  E_LIMIT  no descriptor is left.
  absl::StatusOr<protocol::UniqueFd> DuplicateFd() const;

  // Another end than that of the options. Not while the destructor may run.
  void SetAtEnd(AtEnd at_end);

  // Gives memory to a part that has none.
  //
  // Errors  as Create; the part then has no memory.
  absl::Status Populate(const ArenaPart& part);
  // Takes the memory of a part that has some.
  //
  // Errors  E_INTERNAL  the kernel refuses; the bytes are what they were.
  absl::Status FreePart(const ArenaPart& part);

  // Allocates `size_bytes` > 0, rounded up to the page. O(log ranges), no system call. The bytes
  // are what the previous owner of the range left.
  //
  // Errors  E_RANGE  size 0, or above the capacity.
  //         E_LIMIT  no free run is long enough now, or kMaxRanges are live. Retry after a range
  //                  has died.
  absl::StatusOr<Range> Allocate(uint64_t size_bytes);

  // The whole segment; aligned to 2 MiB.
  std::span<std::byte> bytes() const;
  uint64_t capacity_bytes() const;
  uint64_t inode() const;  // inode of the memfd, stat(2); 0: the system does not tell
  // Bytes of all parts that have memory.
  uint64_t populated_bytes() const;
  // st_blocks of the segment: what the kernel counts.
  uint64_t allocated_bytes() const;
  // Bytes that were on 2 MiB pages when they got memory; for an adopted arena, when it was adopted. 0 if the kernel does not
  // tell.
  uint64_t huge_bytes() const;
  // NUMA nodes on which the pages were after Create() or Adopt(), ascending, one page of 2 MiB looked at.
  // Empty: the kernel does not say.
  const std::vector<int>& numa_nodes() const;
  // The node that options asked for at an offset; -1: none.
  int PlacedNode(uint64_t offset_bytes) const;
  // Not allocated.
  uint64_t free_bytes() const;
  bool locked() const;
  const std::string& name() const;

  // A new open file description for a client: read-only if kServed, else read-write. Nothing that
  // the client does to it (flags, locks, leases) changes ours.
  //
  // Errors  E_LIMIT  no descriptor is left.
  //         E_RANGE  the arena is kPrivate.
  absl::StatusOr<protocol::UniqueFd> ClientFd() const;

  // kServed: one for reading and writing, for a client that has to map it writable once. From one
  // thread: the file's mode lets its owner write for a moment.
  //
  // Errors  E_LIMIT  no descriptor is left.
  absl::StatusOr<protocol::UniqueFd> WritableClientFd() const;

  // kServed: frees all pages if no descriptor of ClientFd() is open or mapped anywhere, and returns
  // true; else does nothing and returns false. To be called when ClientFd() no longer is. Where the
  // kernel cannot answer (no leases on memfds), that counts as "nobody".
  //
  // Limits  Does not wait for anybody.
  bool FreeIfUnused();

 private:
  struct State;

 public:
  // For Create() and Adopt(): nobody else has a State.
  explicit PinnedArena(std::unique_ptr<State> state);

 private:
  // Maps the memfd, and takes every part of the options by `take`.
  static absl::StatusOr<std::unique_ptr<PinnedArena>> Map(
      const ArenaOptions& options, protocol::UniqueFd fd,
      absl::Status (State::*take)(const ArenaPart& part));

  std::unique_ptr<State> state_;
};

}  // namespace forebay::pinned_mem
