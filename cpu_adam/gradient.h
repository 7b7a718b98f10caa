// A run of gradient elements, of any type that gradients travel in.
#pragma once

#include <cstdint>

namespace forebay::cpu_adam {

enum class GradType : uint8_t { kFp32 = 1, kBf16 = 2, kFp16 = 3 };

// n elements that are read once: float32[n], or bfloat16[n] or IEEE binary16[n] as raw bits.
struct Gradient {
  const void* data;
  GradType type;
};

}  // namespace forebay::cpu_adam
