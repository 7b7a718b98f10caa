// SPDX-License-Identifier: Apache-2.0
// How far the update of a step has come in memory that it changes in place, and what was there before of the elements
// that workers have in hand: in memory that outlives the daemon, so that the next one undoes these and goes on behind
// what is done.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "cpu_adam/update_kernel.h"
#include "daemon/core/blocks/undo_sizes.h"

namespace forebay::daemon {

enum class UndoneArena : uint32_t { kStates, kWeights, kStaging };

// A plane of StatePlanes, from the first element of an update on.
struct UndoPlane {
  UndoneArena arena = UndoneArena::kStates;
  uint64_t offset_bytes = 0;  // in the arena
  uint64_t group_bytes = 0;   // of kSavedElems elements
  uint64_t elem_bytes = 0;    // 0: whole groups alone, as codes and scales
};
// The most that StatePlanes has.
inline constexpr size_t kUndoPlanesMax = 8;

// Elements are done from the beginning of a part on, in order; at every moment those behind are either as they were
// before, or in hand and saved (cpu_adam::SavedElems). All numbers are tagged with the step: what another step has left
// counts for nothing.
//
// Ownership  Borrows its memory.
// Threads    One a part; as many parts at once as there are areas, further ones wait.
class UndoLog {
 private:
  struct Progress;
  struct Area;

 public:
  // The update of one part of a block in one step.
  class Part {
   public:
    Part(UndoLog& log, uint64_t block, uint64_t part, uint64_t step);
    Part(const Part&) = delete;
    Part& operator=(const Part&) = delete;
    ~Part();

    // Elements that are done, from the beginning of the part on.
    uint64_t done() const;
    // Masters that overflowed in them.
    uint64_t overflows() const;
    // `elems` elements from `first` of the part on are updated next, and may be in hand until SetDone(). `planes` in the order
    // of StatePlanes, of the element `first`.
    cpu_adam::SavedElems Begin(uint64_t first, uint64_t elems, std::span<const UndoPlane> planes);
    void SetDone(uint64_t done, uint64_t overflows);

   private:
    UndoLog& log_;
    uint64_t index_;
    uint64_t step_;
    size_t area_;
  };

  // `bytes`: UndoBytes() of them, zeros at first, aligned to a page.
  UndoLog(std::span<std::byte> bytes, uint64_t blocks, uint64_t block_elems, uint64_t workers,
          uint64_t area_bytes);

  // Something of the block is done in this step, or in hand.
  bool HasBegun(uint64_t block, uint64_t step) const;

  // What a process that was killed had in hand in this step is as it was before. Before any Part is made.
  //
  // Errors  E_CORRUPT  it is of no such arena.
  struct Arenas {
    std::span<std::byte> states;
    std::span<std::byte> weights;
    std::span<std::byte> staging;
  };
  absl::Status Undo(uint64_t step, const Arenas& arenas);

 private:
  Progress& progress(uint64_t index) const;
  Area& area(size_t index) const;

  std::span<std::byte> bytes_;
  uint64_t blocks_;
  uint64_t parts_;  // of a block
  uint64_t areas_;
  uint64_t area_bytes_;
  std::unique_ptr<std::atomic<bool>[]> is_taken_;  // by area
};

}  // namespace forebay::daemon
