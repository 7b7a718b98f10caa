// SPDX-License-Identifier: Apache-2.0
// The update of masters split into weights and remainder: see internal/format_simd.inc.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu_adam/update_exact_simd.cc"
#undef FOREBAY_FORMAT
#define FOREBAY_FORMAT Exact
#include "cpu_adam/internal/format_simd.inc"
