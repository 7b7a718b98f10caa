// SPDX-License-Identifier: Apache-2.0
// Free space of all swap paths, allocated as slots.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace forebay::nvme {

// A range of bytes on a path. Only the ledger of the slot's user knows the content, and chooses the slot of each write
// (BlockLedger).
struct Slot {
  uint32_t path = 0;
  uint64_t offset_bytes = 0;
  uint64_t size_bytes = 0;

  auto operator<=>(const Slot&) const = default;  // NOLINT(modernize-use-nullptr): of clang 14
};

// The part of a path that holds data.
struct PathSpace {
  uint64_t begin_bytes = 0;
  uint64_t end_bytes = 0;
  // Weight of the path when slots are spread over paths; > 0.
  uint32_t weight = 1;
};

// Map of the free space. SlotsFree() and Allocate() use the same count: Allocate() succeeds for every count up to SlotsFree(),
// even if the space is fragmented.
//
// Threads  A value; const calls may run at once.
// Limits   O(free ranges) a slot: for setup, not for every transfer. No heap allocation of one slot where as many
//          ranges have been free before.
class SlotMap {
 public:
  SlotMap() = default;
  explicit SlotMap(std::span<const PathSpace> paths);

  // Number of slots of `slot_bytes` > 0 that can be allocated.
  uint64_t SlotsFree(uint64_t slot_bytes) const;

  // Allocates `count` slots, spread over the paths by weight so that consecutive slots use every path. Returns nothing if
  // SlotsFree() is below `count`.
  std::optional<std::vector<Slot>> Allocate(uint64_t count, uint64_t slot_bytes);

  // Allocates a slot on this path. Returns nothing if the path has no room.
  std::optional<Slot> AllocateOn(uint32_t path, uint64_t slot_bytes);

  // Marks one slot as used. Returns false if a part of the slot is used already, or outside the data.
  bool Reserve(const Slot& slot);

  void Free(std::span<const Slot> slots);

  // Sets the weight of each path, > 0, for slots that are allocated from now on.
  void SetWeights(std::span<const uint32_t> weights);

  uint32_t paths() const { return static_cast<uint32_t>(paths_.size()); }
  uint64_t capacity_bytes() const;
  uint64_t free_bytes() const;
  uint64_t used_bytes(uint32_t path) const;

 private:
  struct FreeRange {
    uint64_t offset_bytes = 0;
    uint64_t size_bytes = 0;

    uint64_t end_bytes() const { return offset_bytes + size_bytes; }
  };
  struct Path {
    PathSpace space;
    std::vector<FreeRange> free;  // ascending, merged
    uint64_t free_bytes = 0;
  };

  static std::optional<uint64_t> FirstFit(const Path& path, uint64_t size_bytes);

  std::vector<Path> paths_;
};

}  // namespace forebay::nvme
