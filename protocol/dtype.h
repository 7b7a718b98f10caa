// Element types of parameters, gradients and states.
#pragma once

#include <cstdint>
#include <string_view>

namespace forebay::protocol {

enum class DType : uint8_t { kFloat32 = 1, kBFloat16 = 2, kFloat16 = 3, kInt16 = 4 };

constexpr uint64_t SizeBytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

constexpr bool IsKnown(DType dtype) { return dtype >= DType::kFloat32 && dtype <= DType::kInt16; }

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
  }
  return "unknown";
}

}  // namespace forebay::protocol
