#include "daemon/exec/undo_log.h"

#include <cstring>
#include <thread>

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/units.h"

namespace forebay::daemon {
namespace {

constexpr int kDoneBits = 20;
static_assert(kPartElems < uint64_t{1} << kDoneBits);

constexpr uint64_t Tagged(uint64_t step, uint64_t done) { return step << kDoneBits | done; }

// What a process has stored before it was killed is there in the order of its program, if the compiler keeps that.
void KeepOrder() { std::atomic_signal_fence(std::memory_order_seq_cst); }

}  // namespace

struct alignas(kUndoPartBytes) UndoLog::Progress {
  std::atomic<uint64_t> done = 0;  // Tagged()
  uint64_t overflows = 0;
};

// Meant where it is set and its part is as far as it says. Its bytes follow.
struct UndoLog::Area {
  struct Place {
    uint64_t arena = 0;
    uint64_t offset_bytes = 0;
    uint64_t bytes = 0;
  };

  std::atomic<uint64_t> is_set = 0;
  uint64_t part = 0;
  uint64_t done = 0;  // Tagged()
  uint64_t overflows = 0;
  uint64_t pieces = 0;
  std::array<Place, kUndoPiecesMax> places;

  std::byte* bytes() { return reinterpret_cast<std::byte*>(this + 1); }
};

UndoLog::UndoLog(std::span<std::byte> bytes, uint64_t blocks, uint64_t block_elems,
                 uint64_t workers, uint64_t area_bytes)
    : bytes_(bytes),
      blocks_(blocks),
      parts_(PartsOf(block_elems)),
      areas_(workers),
      area_bytes_(area_bytes),
      is_taken_(std::make_unique<std::atomic<bool>[]>(workers)) {
  static_assert(sizeof(Progress) == kUndoPartBytes);
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
    if (done > Tagged(step, 0) && done < Tagged(step + 1, 0)) return true;
  }
  return false;
}

UndoLog::Part::Part(UndoLog& log, uint64_t block, uint64_t part, uint64_t step)
    : log_(log), index_(block * log.parts_ + part), step_(step), area_(0) {
  FOREBAY_CHECK(part < log_.parts_);
  // A daemon with more workers than the one before: some wait.
  while (log_.is_taken_[area_].exchange(true, std::memory_order_acquire)) {
    if (++area_ < log_.areas_) continue;
    area_ = 0;
    std::this_thread::yield();
  }
  Progress& of = log_.progress(index_);
  if (of.done >> kDoneBits == step_) return;
  of.overflows = 0;
  KeepOrder();
  of.done.store(Tagged(step_, 0), std::memory_order_relaxed);
}

UndoLog::Part::~Part() { log_.is_taken_[area_].store(false, std::memory_order_release); }

uint64_t UndoLog::Part::done() const { return log_.progress(index_).done - Tagged(step_, 0); }

uint64_t UndoLog::Part::overflows() const { return log_.progress(index_).overflows; }

void UndoLog::Part::Save(std::span<const UndoPiece> pieces) {
  Area& to = log_.area(area_);
  FOREBAY_CHECK(pieces.size() <= kUndoPiecesMax);
  to.is_set.store(0, std::memory_order_relaxed);
  KeepOrder();
  const Progress& of = log_.progress(index_);
  to.part = index_;
  to.done = of.done;
  to.overflows = of.overflows;
  to.pieces = pieces.size();
  std::byte* next = to.bytes();
  for (size_t i = 0; i < pieces.size(); ++i) {
    const std::span<const std::byte> bytes = pieces[i].bytes;
    to.places[i] = {.arena = static_cast<uint64_t>(pieces[i].arena),
                    .offset_bytes = pieces[i].offset_bytes,
                    .bytes = bytes.size()};
    FOREBAY_CHECK(next + bytes.size() <= reinterpret_cast<std::byte*>(&to) + log_.area_bytes_);
    std::memcpy(next, bytes.data(), bytes.size());
    next += bytes.size();
  }
  KeepOrder();
  to.is_set.store(1, std::memory_order_relaxed);
  KeepOrder();
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
  for (size_t index = 0; index < areas_; ++index) {
    Area& saved = area(index);
    if (saved.is_set == 0 || saved.done >> kDoneBits != step) continue;
    if (saved.part >= blocks_ * parts_ || saved.pieces > kUndoPiecesMax) return corrupt(index);
    Progress& of = progress(saved.part);
    if (of.done != saved.done) continue;  // its elements are done
    const std::byte* from = saved.bytes();
    for (size_t i = 0; i < saved.pieces; ++i) {
      const Area::Place& place = saved.places[i];
      const std::span<std::byte> to =
          place.arena == static_cast<uint64_t>(UndoneArena::kStates)    ? arenas.states
          : place.arena == static_cast<uint64_t>(UndoneArena::kWeights) ? arenas.weights
                                                                        : arenas.staging;
      if (place.offset_bytes > to.size() || place.bytes > to.size() - place.offset_bytes ||
          place.bytes > area_bytes_) {
        return corrupt(index);
      }
      std::memcpy(to.data() + place.offset_bytes, from, place.bytes);
      from += place.bytes;
    }
    of.overflows = saved.overflows;
    KeepOrder();
    saved.is_set.store(0, std::memory_order_relaxed);
  }
  return absl::OkStatus();
}

}  // namespace forebay::daemon
