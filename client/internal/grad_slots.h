// SPDX-License-Identifier: Apache-2.0
// Allocation of ranges in a session's gradient arena.
#pragma once

#include <cstdint>
#include <map>
#include <memory_resource>
#include <optional>
#include <utility>

namespace forebay::client::internal {

// Allocates ranges of the gradient arena. The caller fills open ranges. The daemon reads busy ranges until their completion.
// Apart from busy ranges, open ranges always leave one free run as long as the largest piece, so that one piece can still
// travel.
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

  // Allocates an open range. Returns its offset, or nullopt if no free run can hold the range and still leave one for the
  // largest piece. Waiting for busy ranges then helps only if FitsWithoutBusy().
  std::optional<uint64_t> AllocateOpen(uint64_t size_bytes);
  bool FitsWithoutBusy(uint64_t size_bytes) const;

  // Allocates a busy range. Returns its offset, or nullopt while other busy ranges take the room.
  std::optional<uint64_t> AllocateBusy(uint64_t size_bytes);

  void Deliver(uint64_t offset_bytes);  // makes an open range busy
  // Splits an open range into two open ranges: the first `size_bytes`, fewer than all, and the rest.
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
  std::pmr::map<uint64_t, Range> ranges_;  // keyed by offset
};

// Owns a busy range. The destructor frees the range, unless HandOver() was called: a later GradSlots::Free() then frees it.
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
