// SPDX-License-Identifier: Apache-2.0
// Update of a float32 master with bfloat16 weights: see internal/format_simd.inc.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu_adam/update_fp32_bf16_simd.cc"
#undef FOREBAY_FORMAT
#define FOREBAY_FORMAT Fp32Bf16
#include "cpu_adam/internal/format_simd.inc"
