// SPDX-License-Identifier: Apache-2.0
// Zeroed memory that O_DIRECT accepts.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <memory>
#include <span>

#include "protocol/os/check.h"

namespace forebay::nvme::internal {

// Buffer of `size_bytes` > 0 bytes, a multiple of kIoAlignment. The kernel allocates a page on its first use: a large buffer
// that is hardly used costs little memory.
class PageBuffer {
 public:
  explicit PageBuffer(size_t size_bytes)
      : memory_(Map(size_bytes), Unmap{.size_bytes = size_bytes}) {}

  std::span<std::byte> bytes() { return {memory_.get(), memory_.get_deleter().size_bytes}; }
  std::span<const std::byte> bytes() const {
    return {memory_.get(), memory_.get_deleter().size_bytes};
  }

 private:
  struct Unmap {
    size_t size_bytes = 0;
    void operator()(std::byte* memory) const { (void)::munmap(memory, size_bytes); }
  };

  static std::byte* Map(size_t size_bytes) {
    void* const memory = ::mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    FOREBAY_CHECK(memory != MAP_FAILED);
    return static_cast<std::byte*>(memory);
  }

  std::unique_ptr<std::byte, Unmap> memory_;
};

}  // namespace forebay::nvme::internal
