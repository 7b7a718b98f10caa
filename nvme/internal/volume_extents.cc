// Volume: which extent has which space.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "nvme/internal/volume_state.h"
#include "protocol/error.h"
#include "protocol/os/check.h"
#include "protocol/units.h"

namespace forebay::nvme {

using internal::Extent;
using internal::Path;
using internal::Slot;
using protocol::ErrorId;
using protocol::FormatBytes;
using protocol::MakeError;

Extent* Volume::State::Find(ExtentId wanted) {
  const auto index = static_cast<uint32_t>(wanted);
  return index < extents.size() && extents[index].allocated() ? &extents[index] : nullptr;
}

const Extent* Volume::State::Find(ExtentId wanted) const {
  const auto index = static_cast<uint32_t>(wanted);
  return index < extents.size() && extents[index].allocated() ? &extents[index] : nullptr;
}

uint64_t Volume::State::FreeBytes() const {
  uint64_t free_bytes = 0;
  for (const Path& path : paths) {
    if (!path.stats.flush_failed) free_bytes += path.space.free_bytes();
  }
  return free_bytes;
}

// Onto the path that has the fewest slots of this number for its weight, so that a step, which
// mostly writes slots of one number, keeps every path busy; then onto the least full one.
bool Volume::State::PlaceSlot(Extent& extent, size_t slot) {
  Path* best = nullptr;
  std::pair<double, double> best_fill;
  for (Path& path : paths) {
    if (path.stats.flush_failed || !path.space.Fits(extent.size_bytes)) continue;
    const auto fill_with = [&](uint64_t allocated_bytes) {
      return static_cast<double>(allocated_bytes + extent.size_bytes) / path.weight;
    };
    const std::pair<double, double> fill = {fill_with(path.slot_bytes[slot]),
                                            fill_with(path.stats.allocated_bytes)};
    if (best != nullptr && fill >= best_fill) continue;
    best = &path;
    best_fill = fill;
  }
  if (best == nullptr) return false;
  const std::optional<uint64_t> offset = best->space.Allocate(extent.size_bytes);
  FOREBAY_CHECK(offset.has_value());
  best->stats.allocated_bytes += extent.size_bytes;
  best->slot_bytes[slot] += extent.size_bytes;
  extent.slots[slot].path = static_cast<uint32_t>(best - paths.data());
  extent.slots[slot].offset_bytes = *offset;
  return true;
}

void Volume::State::ReleaseSlot(const Extent& extent, size_t slot) {
  const Slot& released = extent.slots[slot];
  Path& path = paths[released.path];
  path.space.Release(released.offset_bytes, extent.size_bytes);
  path.stats.allocated_bytes -= extent.size_bytes;
  path.slot_bytes[slot] -= extent.size_bytes;
}

void Volume::State::ReleaseSpace(Extent& extent) {
  ReleaseSlot(extent, 0);
  ReleaseSlot(extent, 1);
  extent = Extent{};
}

absl::StatusOr<std::vector<ExtentId>> Volume::State::Allocate(uint32_t count, uint64_t size_bytes) {
  if (count == 0 || size_bytes == 0 || size_bytes > (uint64_t{1} << 48)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%d extents of %d bytes: nothing to allocate", count, size_bytes));
  }
  size_bytes = protocol::RoundUp(size_bytes, kIoAlignment);
  const uint64_t needed = 2 * size_bytes * count;
  const uint64_t free_bytes = FreeBytes();
  std::vector<ExtentId> ids;
  for (uint32_t index = 0; ids.size() < count && index < extents_max; ++index) {
    if (index < extents.size() && extents[index].size_bytes > 0) continue;
    if (index == extents.size()) extents.emplace_back();
    Extent extent;
    extent.size_bytes = size_bytes;
    if (!PlaceSlot(extent, 0)) break;
    if (!PlaceSlot(extent, 1)) {
      ReleaseSlot(extent, 0);
      break;
    }
    extents[index] = extent;
    ids.push_back(ExtentId{index});
  }
  if (ids.size() == count) return ids;

  for (const ExtentId id_taken : ids) ReleaseSpace(extents[static_cast<uint32_t>(id_taken)]);
  const auto used = static_cast<uint64_t>(std::count_if(
      extents.begin(), extents.end(), [](const Extent& extent) { return extent.size_bytes > 0; }));
  if (used + count > extents_max) {
    return MakeError(
        ErrorId::kLimit,
        absl::StrFormat("%d more extents on swap: %d of %d are in use", count, used, extents_max),
        "raise extents_max of the volume");
  }
  return MakeError(
      ErrorId::kSwapNospc,
      absl::StrFormat("cannot take %d extents of %s in two slots from swap: needed %s, free %s on "
                      "%d paths",
                      count, FormatBytes(size_bytes), FormatBytes(needed), FormatBytes(free_bytes),
                      paths.size()),
      absl::StrFormat("raise the swap size by %s, or end other jobs",
                      FormatBytes(needed > free_bytes ? needed - free_bytes : 2 * size_bytes)));
}

absl::Status Volume::State::Free(std::span<const ExtentId> ids) {
  for (const ExtentId wanted : ids) {
    const Extent* extent = Find(wanted);
    if (extent == nullptr || extent->busy > 0) {
      return absl::FailedPreconditionError(
          absl::StrFormat("free extent %d: %s", static_cast<uint32_t>(wanted),
                          extent == nullptr ? "it is not allocated" : "requests are in flight"));
    }
  }
  for (const ExtentId wanted : ids) {
    Extent* extent = Find(wanted);
    if (extent == nullptr) continue;  // named twice
    extent->retired = true;
    if (extent->pinned == 0) ReleaseSpace(*extent);
  }
  return absl::OkStatus();
}

}  // namespace forebay::nvme
