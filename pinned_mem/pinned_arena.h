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

// Users of the segment other than this process. Selects the mode of the memfd and the descriptors of clients.
enum class Access {
  kPrivate,  // only this process
  kServed,   // clients read: mode 0400, descriptors of clients are read-only
  kShared,   // one client reads and writes the segment
};

// Fate of the pages when the destructor runs while another process has the segment open or mapped.
enum class AtEnd {
  kFreePages,       // the destructor frees the pages; clients then read zeros
  kKeepForReaders,  // the kernel frees the pages with the last descriptor or mapping
};

// Range of whole pages of an arena.
struct ArenaPart {
  uint64_t offset_bytes = 0;
  // Size of the part; > 0.
  uint64_t size_bytes = 0;
};

struct ArenaOptions {
  // Name of the segment, shown in /proc/PID/maps. At most kNameBytesMax bytes, no '/'.
  std::string name;
  // Size of the segment; > 0, a multiple of 4096.
  uint64_t capacity_bytes = 0;
  LockPolicy lock = LockPolicy::kRequired;
  Access access = Access::kPrivate;
  AtEnd at_end = AtEnd::kFreePages;
  // Preferred NUMA nodes. If a node is full, the kernel takes pages of another node.
  Placement placement = {};
  // Number of threads that touch the pages of a large arena during Create().
  int threads = 1;
  // Parts for which Create() allocates memory, ascending and without overlap; nullopt: the whole arena.
  std::optional<std::vector<ArenaPart>> parts = {};
  // Counter to which Create() adds the bytes that have got memory so far; null: no counter.
  std::shared_ptr<std::atomic<uint64_t>> populated_bytes = {};
};

// One memfd segment, with 2 MiB pages (MADV_COLLAPSE) if possible. Create() and Populate() bind, touch and lock every page. No
// later call can therefore fault a page in, move it, or find the node full. New memory is all zeros. No process may touch parts of
// an arena that have no memory.
//
// Every segment is sealed with SHRINK, GROW and SEAL: its size is fixed, and no process can stop this process from writing it
// or from freeing its pages. If a client punches a hole into a shared segment, its own bytes are lost, and this process reads
// zeros.
//
// Ownership  The arena owns the pages and the fd.
// Threads    Create(), Adopt(), Populate(), FreePart(), FreeIfUnused() and the destructor on a worker (they
//            block), one of them at a time for one arena; all else on the loop thread. The bytes may be passed to any thread.
// Source     memfd_create(2), madvise(2), set_mempolicy(2), mlock(2), fcntl(2) F_ADD_SEALS, fallocate(2),
//            Linux man-pages.
class PinnedArena {
 public:
  static constexpr size_t kNameBytesMax = 200;

  // Reserves the whole segment or nothing. Blocks while the kernel zeroes every page.
  //
  // Errors  E_RANGE       an option breaks its rule above.
  //         E_DRAM_LIMIT  too little free memory; the message gives wanted and available bytes.
  //         E_MEMLOCK     kRequired, and RLIMIT_MEMLOCK is too low: limit, need, the line to add.
  static absl::StatusOr<std::unique_ptr<PinnedArena>> Create(const ArenaOptions& options);

  // Creates an arena over the memfd that an earlier process created with the same options. `fd` comes from DuplicateFd(). The
  // pages of `parts` have memory, and retain their bytes, NUMA nodes and size. No other page gets memory.
  // Costs one system call for each 2 MiB: no page is copied.
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

  // Returns a duplicate of this process's descriptor, close-on-exec, for a keeper that holds the pages until the next process
  // adopts them. Not for clients: FreeIfUnused() does not count it.
  //
  // Errors  E_LIMIT  the process cannot open more descriptors.
  absl::StatusOr<protocol::UniqueFd> DuplicateFd() const;

  // Changes the fate of the pages at the end (ArenaOptions::at_end). Do not call it while the destructor may run.
  void SetAtEnd(AtEnd at_end);

  // Allocates the memory of a part that has no memory.
  //
  // Errors  as Create; the part then has no memory.
  absl::Status Populate(const ArenaPart& part);
  // Frees the memory of a part that has memory.
  //
  // Errors  E_INTERNAL  the kernel refuses; the bytes are unchanged.
  absl::Status FreePart(const ArenaPart& part);

  // Returns the whole segment, whose address is aligned to 2 MiB.
  std::span<std::byte> bytes() const;
  uint64_t capacity_bytes() const;
  uint64_t inode() const;  // inode of the memfd, stat(2); 0 if unknown
  // Returns the bytes of all parts that have memory.
  uint64_t populated_bytes() const;
  // Returns the bytes that the kernel has allocated to the segment (st_blocks).
  uint64_t allocated_bytes() const;
  // Returns the bytes that were on 2 MiB pages when their memory was allocated or the arena was adopted; 0 if the kernel does
  // not report this.
  uint64_t huge_bytes() const;
  // Returns the NUMA nodes on which the pages were after Create() or Adopt(), ascending. One page of each 2 MiB is checked.
  // Empty if the kernel does not report nodes.
  const std::vector<int>& numa_nodes() const;
  // Returns the node that the options prefer for an offset; -1 if they prefer no node.
  int PlacedNode(uint64_t offset_bytes) const;
  bool locked() const;
  const std::string& name() const;

  // Returns a new open file description for a client: read-only for kServed, otherwise read-write. A client cannot change the
  // flags, locks or leases of this process's description through it.
  //
  // Errors  E_LIMIT  the process cannot open more descriptors.
  //         E_RANGE  the arena is kPrivate.
  absl::StatusOr<protocol::UniqueFd> ClientFd() const;

  // Returns a read-write descriptor of a kServed arena, for a client that must map the arena writable once. Call it on one
  // thread at a time: the mode of the memfd allows writes for a moment.
  //
  // Errors  E_LIMIT  the process cannot open more descriptors.
  absl::StatusOr<protocol::UniqueFd> WritableClientFd() const;

  // Frees all pages of a kServed arena if no descriptor of ClientFd() is open or mapped in any process. Returns true if it
  // freed them. Call it once ClientFd() is no longer called. If the kernel cannot tell (no leases on memfds), the arena counts
  // as unused.
  //
  // Limits  Does not wait for other processes.
  bool FreeIfUnused();

 private:
  struct State;

 public:
  // Constructor for Create() and Adopt(), which alone can create a State.
  explicit PinnedArena(std::unique_ptr<State> state);

 private:
  // Maps the memfd, and calls `take` for every part of the options.
  static absl::StatusOr<std::unique_ptr<PinnedArena>> Map(
      const ArenaOptions& options, protocol::UniqueFd fd,
      absl::Status (State::*take)(const ArenaPart& part));

  std::unique_ptr<State> state_;
};

}  // namespace forebay::pinned_mem
