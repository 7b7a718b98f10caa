// SPDX-License-Identifier: Apache-2.0
#include "protocol/float16.h"

#include <bit>

namespace forebay::protocol {

// A binary16 whose bits are moved up by 13 has its exponent read with a bias of 127 for 15:
// multiplied by 2^112 it is right, denormals too; infinity and NaN get the largest exponent.
float WidenFp16(uint16_t bits) {
  const uint32_t magnitude = (bits & 0x7FFFu) << 13;
  const uint32_t sign = (bits & 0x8000u) << 16;
  uint32_t wide = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
  if ((bits & 0x7C00u) == 0x7C00u) wide = magnitude | 0x7F800000u;
  return std::bit_cast<float>(wide | sign);
}

// Denormals round where 0.5 is added, in the float32 unit; the others by half a unit less one, and one
// more where the last bit that stays is odd.
uint16_t RoundToFp16(uint32_t float_bits) {
  const uint32_t sign = (float_bits >> 16) & 0x8000u;
  const uint32_t magnitude = float_bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
  if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);
  if (magnitude < 0x38800000u) {  // below 2^-14: denormal, in units of 2^-24
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;  // whose last bit is 2^-24
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3F000000u));
  }
  const uint32_t odd = (magnitude >> 13) & 1;
  const uint32_t rounded = magnitude + 0xFFFu + odd;
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

}  // namespace forebay::protocol
