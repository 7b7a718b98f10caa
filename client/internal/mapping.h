// SPDX-License-Identifier: Apache-2.0
// A mapped range that unmaps itself.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/statusor.h"

namespace forebay::client::internal {

enum class MapAccess : uint8_t { kRead, kReadWrite };

// Ownership  Every user of the bytes holds the shared_ptr.
class Mapping {
 public:
  // Maps the first `size_bytes` of a shared file, at an address where the file's 2 MiB pages stay 2 MiB pages.
  //
  // Errors  E_PROTOCOL  the file is shorter, or can shrink under the mapping.
  //         E_LIMIT     no address space.
  static absl::StatusOr<std::shared_ptr<Mapping>> MapFile(int fd, uint64_t size_bytes,
                                                          MapAccess access);

  // Maps zeroed private memory.
  static absl::StatusOr<std::shared_ptr<Mapping>> MapPrivate(uint64_t size_bytes);

  Mapping(std::byte* address, uint64_t size_bytes) : address_(address), size_bytes_(size_bytes) {}
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  // Makes the mapping read-only for this process. A later write ends in SIGSEGV.
  void MakeReadOnly();

  // Bytes of the mapping. Writable only if mapped with kReadWrite.
  std::span<std::byte> bytes() const { return {address_, size_bytes_}; }

 private:
  std::byte* address_;
  uint64_t size_bytes_;
};

}  // namespace forebay::client::internal
