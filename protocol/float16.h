// SPDX-License-Identifier: Apache-2.0
// IEEE binary16 as raw bits, without a vector unit.
#pragma once

#include <cstdint>

namespace forebay::protocol {

float WidenFp16(uint16_t bits);             // exact, denormals included; a NaN stays one
uint16_t RoundToFp16(uint32_t float_bits);  // rounds to nearest, ties to even; a NaN stays one

}  // namespace forebay::protocol
