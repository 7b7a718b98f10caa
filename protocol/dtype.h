// Element types of parameters, gradients and states.
#pragma once

#include <cstdint>
#include <string_view>

namespace forebay::protocol {

enum class DType : uint8_t {
  kFloat32 = 1,
  kBFloat16 = 2,
  kFloat16 = 3,
  kInt16 = 4,
  kInt8 = 5,
  kUInt8 = 6,
};

constexpr uint64_t SizeBytes(DType dtype) {
  if (dtype == DType::kFloat32) return 4;
  return dtype == DType::kInt8 || dtype == DType::kUInt8 ? 1 : 2;
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
