// SPDX-License-Identifier: Apache-2.0
// The update with bfloat16 moments: see internal/format_simd.inc.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu_adam/update_bf16_simd.cc"
#undef FOREBAY_FORMAT
#define FOREBAY_FORMAT Bf16
#include "cpu_adam/internal/format_simd.inc"
