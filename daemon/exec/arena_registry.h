// Every segment of shared memory the daemon has made, for the ledger that `forebay mem` shows.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "pinned_mem/pinned_arena.h"
#include "protocol/os/unique_fd.h"

namespace forebay::daemon {

enum class ArenaKind : uint8_t { kWeights, kState, kStep, kStaging, kGrad, kRing, kExtraState };

const char* Name(ArenaKind kind);  // "weights", "state", ...

// Whose segment it is.
struct ArenaOwner {
  ArenaKind kind = ArenaKind::kStaging;
  std::string job = {};  // empty for the node's own
  int32_t rank = -1;     // -1 where it belongs to no rank
};

struct ArenaLine {
  ArenaOwner owner;
  uint64_t size_bytes = 0;
  uint64_t allocated_bytes = 0;  // as the kernel counts the memfd
  uint64_t huge_bytes = 0;
  bool locked = false;
};

struct MemoryTotals {
  uint64_t used_bytes = 0;     // allocated bytes of all segments + private_bytes
  uint64_t private_bytes = 0;  // RssAnon of this process: heap, stacks; no page of a memfd is in it
  uint64_t locked_bytes = 0;
  uint64_t huge_bytes = 0;
  uint64_t peak_bytes = 0;  // highest used_bytes that Totals() has seen
};

// Makes an arena that core dumps leave out. Blocks: for workers.
//
// Errors  of PinnedArena::Create.
absl::StatusOr<std::unique_ptr<pinned_mem::PinnedArena>> MakeArena(
    const pinned_mem::ArenaOptions& options);

// Threads  The loop thread.
class ArenaRegistry {
 public:
  using Arena = std::shared_ptr<pinned_mem::PinnedArena>;

  // The segment is listed until Unregister(), or for an arena until its last owner lets go of it.
  void Register(ArenaOwner owner, const Arena& arena);
  void RegisterFd(ArenaOwner owner, int fd);
  void UnregisterFd(int fd);

  std::vector<ArenaLine> Lines() const;
  MemoryTotals Totals();  // asks the kernel; moves the peak

 private:
  struct Entry {
    ArenaOwner owner;
    std::weak_ptr<pinned_mem::PinnedArena> arena;
    int fd = -1;
  };

  std::list<Entry> entries_;
  uint64_t peak_bytes_ = 0;
};

}  // namespace forebay::daemon
