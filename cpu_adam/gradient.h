// SPDX-License-Identifier: Apache-2.0
// A run of gradient elements, of any type that gradients travel in.
#pragma once

#include "protocol/optimizer_ids.h"

namespace forebay::cpu_adam {

using protocol::DType;

// n elements that are read once: float32[n], or bfloat16[n] or IEEE binary16[n] as raw bits; no other
// type.
struct Gradient {
  const void* data;
  DType type;
};

}  // namespace forebay::cpu_adam
