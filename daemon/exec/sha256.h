// SPDX-License-Identifier: Apache-2.0
// SHA-256, and HMAC with it, for a few bytes at a time.
#pragma once

#include <array>
#include <cstddef>
#include <span>

namespace forebay::daemon {

using Sha256Digest = std::array<std::byte, 32>;

// Source  FIPS 180-4, section 6.2.
Sha256Digest Sha256(std::span<const std::byte> message);

// Limits  `key` has at most 64 bytes.
// Source  RFC 2104, section 2.
Sha256Digest HmacSha256(std::span<const std::byte> key, std::span<const std::byte> message);

}  // namespace forebay::daemon
