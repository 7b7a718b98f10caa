// A memfd with its mode and seals.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinned_mem/pinned_arena.h"
#include "protocol/os/unique_fd.h"

namespace forebay::pinned_mem::internal {

// A memfd of exactly `size_bytes`, without a page yet: close-on-exec, never executable where the
// kernel knows that (6.3), mode 0400 where it is served and 0600 else, sealed SHRINK and GROW.
//
// Errors  E_LIMIT     no descriptor is left.
//         E_INTERNAL  a system call failed; its name and errno.
absl::StatusOr<protocol::UniqueFd> MakeMemfd(const std::string& name, uint64_t size_bytes,
                                             Access access);

// Why `what` gave no descriptor: E_LIMIT where this process or the system has none left, else
// E_INTERNAL.
absl::Status NoDescriptor(const std::string& what, int error_number);

absl::Status AddSeals(int fd, int seals);
bool HasSeals(int fd, int seals);

}  // namespace forebay::pinned_mem::internal
