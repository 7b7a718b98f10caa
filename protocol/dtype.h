// SPDX-License-Identifier: Apache-2.0
// Widths and names of the element types.
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

#include "protocol/optimizer_ids.h"

namespace forebay::protocol {

constexpr uint64_t SizeBytes(DType dtype) {
  if (dtype == DType::kFloat32) return 4;
  return dtype == DType::kInt8 || dtype == DType::kUInt8 ? 1 : 2;
}

// Whether a float32 value is finite, and as a weight of that type too: rounded as masters are
// (cpu_adam/update_kernel.h).
constexpr bool IsFiniteAs(DType dtype, float value) {
  const uint32_t magnitude = std::bit_cast<uint32_t>(value) & 0x7FFFFFFF;
  if (dtype == DType::kBFloat16) return magnitude < 0x7F7F8000;
  return magnitude < (dtype == DType::kFloat16 ? 0x477FF000 : 0x7F800000);
}

constexpr bool IsKnown(DType dtype) { return dtype >= DType::kFloat32 && dtype <= DType::kUInt8; }

constexpr std::string_view Name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
    case DType::kInt16:
      return "int16";
    case DType::kInt8:
      return "int8";
    case DType::kUInt8:
      return "uint8";
  }
  return "unknown";
}

}  // namespace forebay::protocol
