// SPDX-License-Identifier: Apache-2.0
// A memfd, mapped for as long as somebody uses its bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/statusor.h"
#include "protocol/os/unique_fd.h"

namespace forebay::gateway {

enum class Access : uint8_t { kRead, kReadWrite };

// Ownership  Every user of the bytes holds the shared_ptr.
class SharedMemory {
 public:
  // The first `size_bytes` of a file that the other side does not shrink: the daemon's, or our own.
  //
  // Errors  E_PROTOCOL  it is shorter. E_LIMIT  no address space.
  static absl::StatusOr<std::shared_ptr<SharedMemory>> Map(protocol::UniqueFd file,
                                                           uint64_t size_bytes, Access access);
  // A new memfd of zeros whose size is sealed.
  static absl::StatusOr<std::shared_ptr<SharedMemory>> Create(const char* name,
                                                              uint64_t size_bytes);

  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory();

  int fd() const { return file_.get(); }
  uint64_t inode() const;  // inode of the file, stat(2); 0: the system does not say
  std::span<std::byte> bytes() const { return bytes_; }  // written only where it was mapped so

 private:
  SharedMemory(protocol::UniqueFd file, std::span<std::byte> bytes)
      : file_(std::move(file)), bytes_(bytes) {}

  protocol::UniqueFd file_;
  std::span<std::byte> bytes_;
};

// Whether [offset, offset + size) lies in `bytes`; without a sum that could wrap around.
constexpr bool IsWithin(uint64_t offset, uint64_t size, uint64_t bytes) {
  return offset <= bytes && size <= bytes - offset;
}

}  // namespace forebay::gateway
