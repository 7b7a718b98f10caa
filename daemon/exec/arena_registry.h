// SPDX-License-Identifier: Apache-2.0
// Every segment of shared memory that the daemon has made: what `forebay mem` shows.
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

// What a segment is for.
struct ArenaOwner {
  ArenaKind kind = ArenaKind::kStaging;
  // Empty for the node's own.
  JobName job = {};
  // -1 if it belongs to no rank.
  int32_t rank = -1;
};

struct ArenaLine {
  ArenaOwner owner;
  // Of the parts that have memory.
  uint64_t size_bytes = 0;
  // As the kernel counts the memfd.
  uint64_t allocated_bytes = 0;
  uint64_t huge_bytes = 0;
  // On which its pages are, ascending; empty: the kernel does not say.
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
  // The same segment is for something else now.
  void ChangeKind(const Arena& arena, ArenaKind kind);

  std::vector<ArenaLine> Lines() const;
  // Asks the kernel, and updates the peak.
  MemoryTotals Totals();
  void UpdatePeak();

 private:
  struct Entry {
    ArenaOwner owner;
    std::weak_ptr<pinned_mem::PinnedArena> arena;
  };

  // As MemoryTotals has them.
  uint64_t UsedBytes(uint64_t private_bytes) const;

  std::list<Entry> entries_;
  uint64_t peak_bytes_ = 0;
};

}  // namespace forebay::daemon
