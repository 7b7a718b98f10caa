#include "cpu_adam/internal/float16.h"

#include <bit>

namespace forebay::cpu_adam::internal {

// A binary16 whose bits are moved up by 13 has its exponent read with a bias of 127 for 15:
// multiplied by 2^112 it is right, denormals too; infinity and NaN get the largest exponent.
float WidenFp16(uint16_t bits) {
  const uint32_t magnitude = (bits & 0x7FFFu) << 13;
  const uint32_t sign = (bits & 0x8000u) << 16;
  uint32_t wide = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
  if ((bits & 0x7C00u) == 0x7C00u) wide = magnitude | 0x7F800000u;
  return std::bit_cast<float>(wide | sign);
}

}  // namespace forebay::cpu_adam::internal
