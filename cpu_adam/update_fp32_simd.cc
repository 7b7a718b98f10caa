// SPDX-License-Identifier: Apache-2.0
// The update of float32 weights: see internal/format_simd.inc.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu_adam/update_fp32_simd.cc"
#undef FOREBAY_FORMAT
#define FOREBAY_FORMAT Fp32
#include "cpu_adam/internal/format_simd.inc"
