// SPDX-License-Identifier: Apache-2.0
// The update with moments of 8 bits: see internal/format_simd.inc.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu_adam/update_int8_simd.cc"
#undef FOREBAY_FORMAT
#define FOREBAY_FORMAT Int8
#undef FOREBAY_INT8
#define FOREBAY_INT8  // groups of codes
#include "cpu_adam/internal/format_simd.inc"
