// The free ranges of one path.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

namespace forebay::nvme::internal {

// First fit over merged ranges. Heap use and O(ranges) search: for setup, not for the hot path.
class SpaceMap {
 public:
  SpaceMap() = default;
  SpaceMap(uint64_t begin_bytes, uint64_t end_bytes);

  // Offset of `size_bytes` > 0, or nothing where no run is long enough.
  std::optional<uint64_t> Allocate(uint64_t size_bytes);

  // Takes exactly that range; false where some of it is taken.
  bool AllocateAt(uint64_t offset_bytes, uint64_t size_bytes);

  void Release(uint64_t offset_bytes, uint64_t size_bytes);

  bool Fits(uint64_t size_bytes) const;
  uint64_t free_bytes() const { return free_bytes_; }

 private:
  std::map<uint64_t, uint64_t> free_;  // offset to size
  uint64_t free_bytes_ = 0;
};

}  // namespace forebay::nvme::internal
