// Zeroed memory that O_DIRECT accepts.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>

#include "nvme/io/io_engine.h"
#include "protocol/os/check.h"

namespace forebay::nvme::internal {

// Owns `size_bytes`, a multiple of kIoAlignment.
class PageBuffer {
 public:
  PageBuffer() = default;
  explicit PageBuffer(size_t size_bytes)
      : memory_(static_cast<std::byte*>(std::aligned_alloc(kIoAlignment, size_bytes))),
        size_bytes_(size_bytes) {
    FOREBAY_CHECK(memory_ != nullptr);
    std::memset(memory_.get(), 0, size_bytes_);
  }

  std::span<std::byte> bytes() { return {memory_.get(), size_bytes_}; }
  std::span<const std::byte> bytes() const { return {memory_.get(), size_bytes_}; }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };

  std::unique_ptr<std::byte, Free> memory_;
  size_t size_bytes_ = 0;
};

}  // namespace forebay::nvme::internal
