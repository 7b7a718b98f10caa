// SPDX-License-Identifier: Apache-2.0
// A LayoutSpec as bytes: the content of the memfd that goes with attach.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "protocol/layout.h"

namespace forebay::protocol {

// An unpacked LayoutMessage (forebay.capnp).
//
// Errors  E_LAYOUT  longer than kLayoutBytesMax.
absl::StatusOr<std::vector<std::byte>> EncodeLayout(const LayoutSpec& spec);

// Reads bytes that may come from anybody. The spec is not checked further than that it can be held;
// Layout::Create does the rest.
//
// Limits  Time and memory in proportion to the bytes, however they point at each other.
// Errors  E_PROTOCOL  not such a message.
//         E_LAYOUT    a maximum of layout.h is exceeded, or a name has control characters.
//         E_OPTION    unknown optimizer, format or dtype, by name.
absl::StatusOr<LayoutSpec> DecodeLayout(std::span<const std::byte> bytes);

}  // namespace forebay::protocol
