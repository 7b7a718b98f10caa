// SPDX-License-Identifier: Apache-2.0
// Lets a kernel file offer one table per compiled target: FOREBAY_TABLE_OF_TARGET(Type, Function, kTable) defines
// Function(hwy_target), which returns the address of that target's kTable or null. For kernel files only, after "hwy/highway.h"
// and under HWY_ONCE.
#pragma once

#if HWY_TARGETS & HWY_AVX3
#define FOREBAY_CASE_AVX3(table) \
  case HWY_AVX3:                 \
    return &N_AVX3::table;
#else
#define FOREBAY_CASE_AVX3(table)
#endif

#if HWY_TARGETS & HWY_AVX2
#define FOREBAY_CASE_AVX2(table) \
  case HWY_AVX2:                 \
    return &N_AVX2::table;
#else
#define FOREBAY_CASE_AVX2(table)
#endif

#if HWY_TARGETS & HWY_SVE2
#define FOREBAY_CASE_SVE2(table) \
  case HWY_SVE2:                 \
    return &N_SVE2::table;
#else
#define FOREBAY_CASE_SVE2(table)
#endif

#if HWY_TARGETS & HWY_SVE
#define FOREBAY_CASE_SVE(table) \
  case HWY_SVE:                 \
    return &N_SVE::table;
#else
#define FOREBAY_CASE_SVE(table)
#endif

#if HWY_TARGETS & HWY_NEON
#define FOREBAY_CASE_NEON(table) \
  case HWY_NEON:                 \
    return &N_NEON::table;
#else
#define FOREBAY_CASE_NEON(table)
#endif

#define FOREBAY_TABLE_OF_TARGET(Type, Function, table) \
  const Type* Function(int64_t hwy_target) {           \
    switch (hwy_target) {                              \
      FOREBAY_CASE_AVX3(table)                         \
      FOREBAY_CASE_AVX2(table)                         \
      FOREBAY_CASE_SVE2(table)                         \
      FOREBAY_CASE_SVE(table)                          \
      FOREBAY_CASE_NEON(table)                         \
      default:                                         \
        return nullptr;                                \
    }                                                  \
  }
