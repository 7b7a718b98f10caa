// SPDX-License-Identifier: Apache-2.0
// Sealed memfds: bytes that a process passes to another process, and that no process can change afterwards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "protocol/os/unique_fd.h"

namespace forebay::protocol {

// A memfd with a copy of `bytes`. Not valid, with errno, where a call failed.
UniqueFd MakeSealedMemfd(const char* name, std::span<const std::byte> bytes);

// Whether `fd` is a memfd whose bytes and size can never change, of at most `bytes_max`. Never blocks.
bool IsSealedMemfd(int fd, uint64_t bytes_max);

// Reads `out.size()` bytes from the start of a file; fewer where it ends before. -1, with errno, where
// reading failed.
int64_t ReadFromStart(int fd, std::span<std::byte> out);

}  // namespace forebay::protocol
