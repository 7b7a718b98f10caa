// SPDX-License-Identifier: Apache-2.0
#include "daemon/exec/recovery/undo_log.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <thread>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/units.h"

namespace forebay::daemon {
namespace {

using cpu_adam::kSavedElems;

constexpr int kDoneBits = 20;
static_assert(kPartElems < uint64_t{1} << kDoneBits);
constexpr uint64_t kSlotAlignment = 64;

// Flag in bit 0 of Progress::done, set while elements are in progress: an update adds 2·i for element i (SavedElems).
constexpr uint64_t kInHand = 1;
constexpr uint64_t Tagged(uint64_t step, uint64_t done) { return (step << kDoneBits | done) << 1; }
constexpr uint64_t StepOf(uint64_t tagged) { return tagged >> (kDoneBits + 1); }
constexpr uint64_t DoneOf(uint64_t tagged) {
  return tagged >> 1 & ((uint64_t{1} << kDoneBits) - 1);
}

// Prevents the compiler from reordering stores. If the process is killed, memory has its stores in program order.
void KeepOrder() { std::atomic_signal_fence(std::memory_order_seq_cst); }

}  // namespace

struct alignas(kUndoPartBytes) UndoLog::Progress {
  std::atomic<uint64_t> done = 0;  // Tagged() value, with kInHand as flag
  uint64_t overflows = 0;
};

// The newest update that a worker has begun. The two slots of SavedElems follow.
struct UndoLog::Area {
  std::atomic<uint64_t> is_set = 0;
  uint64_t part = 0;
  uint64_t first = 0;  // first element, counted in the part
  uint64_t elems = 0;
  uint64_t planes_used = 0;
  std::array<UndoPlane, kUndoPlanesMax> planes;

  std::byte* slots() { return reinterpret_cast<std::byte*>(this) + kUndoHeaderBytes; }
};

UndoLog::UndoLog(std::span<std::byte> bytes, uint64_t blocks, uint64_t block_elems,
                 uint64_t workers, uint64_t area_bytes)
    : bytes_(bytes),
      blocks_(blocks),
      parts_(PartsOf(block_elems)),
      areas_(workers),
      area_bytes_(area_bytes),
      is_taken_(std::make_unique<std::atomic<bool>[]>(workers)) {
  static_assert(sizeof(Progress) == kUndoPartBytes && sizeof(Area) <= kUndoHeaderBytes);
  FOREBAY_CHECK(areas_ * area_bytes_ + blocks_ * parts_ * kUndoPartBytes <= bytes_.size());
}

UndoLog::Area& UndoLog::area(size_t index) const {
  return *reinterpret_cast<Area*>(bytes_.data() + index * area_bytes_);
}

UndoLog::Progress& UndoLog::progress(uint64_t index) const {
  FOREBAY_CHECK(index < blocks_ * parts_);
  return reinterpret_cast<Progress*>(bytes_.data() + areas_ * area_bytes_)[index];
}

bool UndoLog::HasBegun(uint64_t block, uint64_t step) const {
  for (uint64_t part = 0; part < parts_; ++part) {
    const uint64_t done = progress(block * parts_ + part).done;
    if (StepOf(done) == step && done != Tagged(step, 0)) return true;
  }
  return false;
}

UndoLog::Part::Part(UndoLog& log, uint64_t block, uint64_t part, uint64_t step)
    : log_(log), index_(block * log.parts_ + part), step_(step), area_(0) {
  FOREBAY_CHECK(part < log_.parts_);
  // Waits for a free area if this daemon has more workers than the earlier daemon had.
  while (log_.is_taken_[area_].exchange(true, std::memory_order_acquire)) {
    if (++area_ < log_.areas_) continue;
    area_ = 0;
    std::this_thread::yield();
  }
  Progress& of = log_.progress(index_);
  if (StepOf(of.done) == step_) return;
  of.overflows = 0;
  KeepOrder();
  of.done.store(Tagged(step_, 0), std::memory_order_relaxed);
}

UndoLog::Part::~Part() {
  log_.area(area_).is_set.store(0, std::memory_order_relaxed);
  log_.is_taken_[area_].store(false, std::memory_order_release);
}

uint64_t UndoLog::Part::done() const { return DoneOf(log_.progress(index_).done); }

uint64_t UndoLog::Part::overflows() const { return log_.progress(index_).overflows; }

cpu_adam::SavedElems UndoLog::Part::Begin(uint64_t first, uint64_t elems,
                                          std::span<const UndoPlane> planes) {
  Area& to = log_.area(area_);
  FOREBAY_CHECK(planes.size() <= kUndoPlanesMax && first + elems <= kPartElems);
  to.is_set.store(0, std::memory_order_relaxed);
  KeepOrder();
  to.part = index_;
  to.first = first;
  to.elems = elems;
  to.planes_used = planes.size();
  std::ranges::copy(planes, to.planes.begin());
  KeepOrder();
  to.is_set.store(1, std::memory_order_relaxed);
  KeepOrder();
  return {.slots = to.slots(),
          .done = &log_.progress(index_).done,
          .at_first = Tagged(step_, first) | kInHand,
          .non_finite = overflows()};
}

void UndoLog::Part::SetDone(uint64_t done, uint64_t overflows) {
  Progress& of = log_.progress(index_);
  KeepOrder();
  of.overflows = overflows;
  KeepOrder();
  of.done.store(Tagged(step_, done), std::memory_order_relaxed);
  KeepOrder();
}

absl::Status UndoLog::Undo(uint64_t step, const Arenas& arenas) {
  const auto corrupt = [](uint64_t index) {
    return protocol::MakeError(
        protocol::ErrorId::kCorrupt,
        absl::StrCat("what worker ", index, " of the daemon before had in hand is not as it was"));
  };
  const auto memory_of = [&](UndoneArena arena) {
    if (arena == UndoneArena::kStates) return arenas.states;
    return arena == UndoneArena::kWeights ? arenas.weights : arenas.staging;
  };
  for (size_t index = 0; index < areas_; ++index) {
    Area& saved = area(index);
    if (saved.is_set == 0) continue;
    if (saved.part >= blocks_ * parts_ || saved.planes_used > kUndoPlanesMax) return corrupt(index);
    Progress& of = progress(saved.part);
    const uint64_t done = DoneOf(of.done);
    const bool is_in_hand = StepOf(of.done) == step && (of.done & kInHand) != 0 &&
                            done >= saved.first && done < saved.first + saved.elems;
    if (!is_in_hand) {
      saved.is_set = 0;
      continue;
    }
    const uint64_t elem = done - saved.first;
    const uint64_t count = std::min(kSavedElems, saved.elems - elem);
    uint64_t slot_bytes = kSlotAlignment;
    const std::span<const UndoPlane> planes = std::span(saved.planes).first(saved.planes_used);
    for (const UndoPlane& plane : planes) {
      slot_bytes += protocol::RoundUp(plane.group_bytes, kSlotAlignment);
    }
    const std::byte* from = saved.slots() + elem / kSavedElems % 2 * slot_bytes;
    if (from + slot_bytes > reinterpret_cast<std::byte*>(&saved) + area_bytes_) {
      return corrupt(index);
    }
    uint64_t overflows = 0;
    std::memcpy(&overflows, from, sizeof(overflows));
    from += kSlotAlignment;
    for (const UndoPlane& plane : planes) {
      const std::span<std::byte> to = memory_of(plane.arena);
      const uint64_t offset =
          plane.offset_bytes +
          (plane.elem_bytes > 0 ? elem * plane.elem_bytes : elem / kSavedElems * plane.group_bytes);
      const uint64_t bytes = plane.elem_bytes > 0 ? count * plane.elem_bytes : plane.group_bytes;
      if (offset > to.size() || bytes > to.size() - offset) return corrupt(index);
      std::memcpy(to.data() + offset, from, bytes);
      from += protocol::RoundUp(plane.group_bytes, kSlotAlignment);
    }
    of.overflows = overflows;
    KeepOrder();
    of.done.store(Tagged(step, done), std::memory_order_relaxed);
    KeepOrder();
    saved.is_set = 0;  // another worker may update these elements next
  }
  return absl::OkStatus();
}

}  // namespace forebay::daemon
