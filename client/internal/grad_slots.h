// SPDX-License-Identifier: Apache-2.0
// Allocation of ranges in a session's gradient arena.
#pragma once

#include <cstdint>
#include <map>
#include <memory_resource>
#include <optional>
#include <utility>

namespace forebay::client::internal {

// Ranges of the arena. Open ones are being filled by the caller, busy ones are the daemon's until
// their completion. Open ranges always leave one run as long as the largest piece, busy ranges
// aside: so whatever the caller keeps open, one piece can still travel.
//
// Threads  One at a time.
// Limits   Sizes are multiples of 64 and at most `largest_bytes`; largest_bytes <= capacity_bytes.
class GradSlots {
 public:
  struct Options {
    uint64_t capacity_bytes = 0;
    uint64_t largest_bytes = 0;
  };

  // Allocates the records of ranges from `memory`, which must outlive the object.
  explicit GradSlots(const Options& options,
                     std::pmr::memory_resource* memory = std::pmr::get_default_resource())
      : options_(options), ranges_(memory) {}

  // An open range, or nothing: then waiting for busy ranges helps only where FitsWithoutBusy().
  std::optional<uint64_t> AllocateOpen(uint64_t size_bytes);
  bool FitsWithoutBusy(uint64_t size_bytes) const;

  // A busy range, or nothing while other busy ranges are in its way.
  std::optional<uint64_t> AllocateBusy(uint64_t size_bytes);

  void Deliver(uint64_t offset_bytes);  // an open range becomes busy
  // An open range becomes two: its first `size_bytes`, which are fewer than all, and the rest.
  void Split(uint64_t offset_bytes, uint64_t size_bytes);
  void Free(uint64_t offset_bytes);

  uint64_t capacity_bytes() const { return options_.capacity_bytes; }
  uint64_t largest_bytes() const { return options_.largest_bytes; }

 private:
  enum class Use : uint8_t { kOpen, kBusy };
  struct Range {
    uint64_t size_bytes = 0;
    Use use = Use::kOpen;
  };
  enum class Among : uint8_t { kAll, kOpen };

  template <typename Visit>
  void ForEachGap(Among among, Visit visit) const;
  std::optional<uint64_t> FindOpen(Among among, uint64_t size_bytes) const;
  bool LeavesRoom(uint64_t offset_bytes, uint64_t size_bytes) const;

  Options options_;
  std::pmr::map<uint64_t, Range> ranges_;  // by offset
};

// A busy range that is given back, unless HandOver() leaves that to a later Free().
class BusyRange {
 public:
  BusyRange(GradSlots& slots, uint64_t offset_bytes)
      : slots_(&slots), offset_bytes_(offset_bytes) {}
  BusyRange(BusyRange&& other) noexcept
      : slots_(std::exchange(other.slots_, nullptr)), offset_bytes_(other.offset_bytes_) {}
  BusyRange& operator=(BusyRange&&) = delete;
  ~BusyRange() {
    if (slots_ != nullptr) slots_->Free(offset_bytes_);
  }

  uint64_t offset_bytes() const { return offset_bytes_; }
  uint64_t HandOver() {
    slots_ = nullptr;
    return offset_bytes_;
  }

 private:
  GradSlots* slots_;
  uint64_t offset_bytes_;
};

}  // namespace forebay::client::internal
