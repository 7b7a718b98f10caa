// SPDX-License-Identifier: Apache-2.0
// Finds the pieces of a mapping that are on 2 MiB pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "pinned_mem/pinned_arena.h"

namespace forebay::pinned_mem::internal {

// Sets huge_pieces[i] to 1 if piece i of 2 MiB lies in the part and is mapped as one page. `segment` starts at a multiple of 2
// MiB. Sets nothing if the kernel does not report page sizes (before 6.7, or for a process that cannot be dumped and is not
// root).
//
// Source  ioctl_pagemap_scan(2).
void MarkHugePieces(std::span<const std::byte> segment, const ArenaPart& part,
                    std::span<uint8_t> huge_pieces);

}  // namespace forebay::pinned_mem::internal
