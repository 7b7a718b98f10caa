// SPDX-License-Identifier: Apache-2.0
// A memfd, mapped as long as a shared_ptr to it exists.
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
  // Maps the first `size_bytes` bytes of a file that does not shrink: a memfd of the daemon or of this process.
  //
  // Errors  E_PROTOCOL  the file is shorter. E_LIMIT  no address space.
  static absl::StatusOr<std::shared_ptr<SharedMemory>> Map(protocol::UniqueFd file,
                                                           uint64_t size_bytes, Access access);
  // Creates a memfd of zeros whose size is sealed.
  static absl::StatusOr<std::shared_ptr<SharedMemory>> Create(const char* name,
                                                              uint64_t size_bytes);

  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory();

  int fd() const { return file_.get(); }
  uint64_t inode() const;                                // inode of the file, stat(2); 0 if unknown
  std::span<std::byte> bytes() const { return bytes_; }  // write only if mapped with kReadWrite

 private:
  SharedMemory(protocol::UniqueFd file, std::span<std::byte> bytes)
      : file_(std::move(file)), bytes_(bytes) {}

  protocol::UniqueFd file_;
  std::span<std::byte> bytes_;
};

// Returns true if [offset, offset + size) lies in `bytes`. Does not compute a sum that could overflow.
constexpr bool IsWithin(uint64_t offset, uint64_t size, uint64_t bytes) {
  return offset <= bytes && size <= bytes - offset;
}

}  // namespace forebay::gateway
