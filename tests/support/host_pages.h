// SPDX-License-Identifier: Apache-2.0
// Page-aligned memory for tests, like that of arenas.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <span>

#include "protocol/units.h"

namespace forebay::testing {

class HostPages {
 public:
  explicit HostPages(size_t size_bytes)
      : mapped_bytes_(protocol::RoundUp(std::max<size_t>(size_bytes, 1), protocol::kPageBytes)),
        address_(::mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                        -1, 0)),
        bytes_(static_cast<std::byte*>(address_), size_bytes) {}
  HostPages(const HostPages&) = delete;
  HostPages& operator=(const HostPages&) = delete;
  ~HostPages() { ::munmap(address_, mapped_bytes_); }

  void Protect(int protection) { ::mprotect(address_, mapped_bytes_, protection); }
  std::span<std::byte> bytes() const { return bytes_; }

 private:
  size_t mapped_bytes_;
  void* address_;
  std::span<std::byte> bytes_;
};

}  // namespace forebay::testing
