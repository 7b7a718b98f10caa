// SPDX-License-Identifier: Apache-2.0
// Bytes for tests, aligned for O_DIRECT and different for every seed and position.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

namespace forebay::testing {

inline constexpr size_t kBytesAlignment = 4096;

template <typename T>
struct PageAllocator {
  using value_type = T;

  PageAllocator() = default;
  template <typename U>
  explicit PageAllocator(const PageAllocator<U>& /*other*/) {}

  T* allocate(size_t count) {
    return static_cast<T*>(::operator new (count * sizeof(T), std::align_val_t{kBytesAlignment}));
  }
  void deallocate(T* memory, size_t /*count*/) {
    ::operator delete (memory, std::align_val_t{kBytesAlignment});
  }
  bool operator==(const PageAllocator& /*other*/) const { return true; }
};

// A vector whose memory starts on a page.
using Bytes = std::vector<std::byte, PageAllocator<std::byte>>;

// Fills bytes. Every 8 bytes depend on seed and position (splitmix64), so that a swap of two sectors is noticed.
inline Bytes Pattern(size_t size_bytes, uint64_t seed) {
  Bytes bytes(size_bytes);
  for (size_t i = 0; i < size_bytes; ++i) {
    uint64_t mixed = (seed << 32) + i / 8 + 0x9E3779B97F4A7C15u;
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9u;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBu;
    mixed ^= mixed >> 31;
    bytes[i] = static_cast<std::byte>(mixed >> (8 * (i % 8)));
  }
  return bytes;
}

}  // namespace forebay::testing
