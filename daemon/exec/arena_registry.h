// SPDX-License-Identifier: Apache-2.0
// Every segment of shared memory that the daemon has created: what `forebay mem` shows.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "daemon/core/base/job_name.h"
#include "pinned_mem/pinned_arena.h"

namespace forebay::daemon {

enum class ArenaKind : uint8_t {
  kWeights,
  // Weights of a deleted job that a process still has open or mapped.
  kDeletedWeights,
  kState,
  kStep,
  kStaging,
  kGrad,
  kRing,
  kExtraState,
};

// "weights", "state", ...
const char* Name(ArenaKind kind);

// Purpose of a segment.
struct ArenaOwner {
  ArenaKind kind = ArenaKind::kStaging;
  // Empty if the segment belongs to no job.
  JobName job = {};
  // -1 if it belongs to no rank.
  int32_t rank = -1;
};

struct ArenaLine {
  ArenaOwner owner;
  // Bytes of the parts that have memory.
  uint64_t size_bytes = 0;
  // Bytes that the kernel has allocated to the memfd.
  uint64_t allocated_bytes = 0;
  uint64_t huge_bytes = 0;
  // NUMA nodes that hold pages of the segment, ascending. Empty if the kernel does not say.
  std::vector<int> numa_nodes = {};
  bool locked = false;
};

struct MemoryTotals {
  // Allocated bytes of all segments + private_bytes.
  uint64_t used_bytes = 0;
  // RssAnon of this process: heap and stacks. No page of a memfd is in it.
  uint64_t private_bytes = 0;
  uint64_t locked_bytes = 0;
  uint64_t huge_bytes = 0;
  // The highest used_bytes that Totals() and UpdatePeak() have seen.
  uint64_t peak_bytes = 0;
};

// Threads  The loop thread.
class ArenaRegistry {
 public:
  using Arena = std::shared_ptr<pinned_mem::PinnedArena>;

  // The segment is listed until its last owner destroys it.
  void Register(ArenaOwner owner, const Arena& arena);
  // Changes the kind of a registered segment. Ignores an arena that is null.
  void ChangeKind(const Arena& arena, ArenaKind kind);

  std::vector<ArenaLine> Lines() const;
  // Returns the totals that the kernel reports now. Updates peak_bytes.
  MemoryTotals Totals();
  void UpdatePeak();

 private:
  struct Entry {
    ArenaOwner owner;
    std::weak_ptr<pinned_mem::PinnedArena> arena;
  };

  // Returns MemoryTotals::used_bytes for these `private_bytes`.
  uint64_t UsedBytes(uint64_t private_bytes) const;

  std::list<Entry> entries_;
  uint64_t peak_bytes_ = 0;
};

}  // namespace forebay::daemon
