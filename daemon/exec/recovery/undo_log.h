// SPDX-License-Identifier: Apache-2.0
// Log of a step's update of memory in place: its progress, and the former bytes of the elements that workers have in progress.
// The log is in memory that outlives the daemon. The next daemon restores those elements and continues behind the last element
// that is done.
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

// A plane of StatePlanes from the first element of an update on.
struct UndoPlane {
  UndoneArena arena = UndoneArena::kStates;
  uint64_t offset_bytes = 0;  // offset in `arena`
  uint64_t group_bytes = 0;   // bytes of kSavedElems elements
  uint64_t elem_bytes = 0;    // 0 if saved in whole groups, as codes and scales
};
// Largest number of planes of StatePlanes.
inline constexpr size_t kUndoPlanesMax = 8;

// Elements of a part are updated in order, from the beginning of the part. At every moment an element that is not done is
// either unchanged, or in progress and saved (cpu_adam::SavedElems). All numbers in the log are tagged with the step. Numbers
// of another step are ignored.
//
// Ownership  Borrows its memory.
// Threads    One thread for each part. As many parts at once as the log has areas; further parts wait.
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

    // Number of elements that are done, from the beginning of the part.
    uint64_t done() const;
    // Number of masters that overflowed in the elements that are done.
    uint64_t overflows() const;
    // Announces the update of `elems` elements from `first` of the part, which may be in progress until SetDone(). `planes`: in
    // the order of StatePlanes, from element `first`.
    cpu_adam::SavedElems Begin(uint64_t first, uint64_t elems, std::span<const UndoPlane> planes);
    void SetDone(uint64_t done, uint64_t overflows);

   private:
    UndoLog& log_;
    uint64_t index_;
    uint64_t step_;
    size_t area_;
  };

  // `bytes`: UndoBytes() bytes, zeros at first, aligned to a page.
  UndoLog(std::span<std::byte> bytes, uint64_t blocks, uint64_t block_elems, uint64_t workers,
          uint64_t area_bytes);

  // True if elements of the block are done or in progress in this step.
  bool HasBegun(uint64_t block, uint64_t step) const;

  // Restores the elements that a process had in progress in this step when it was killed. Call it before any Part is created.
  //
  // Errors  E_CORRUPT  the saved elements do not fit the log or the arenas.
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
  uint64_t parts_;  // parts of a block
  uint64_t areas_;
  uint64_t area_bytes_;
  std::unique_ptr<std::atomic<bool>[]> is_taken_;  // by area
};

}  // namespace forebay::daemon
