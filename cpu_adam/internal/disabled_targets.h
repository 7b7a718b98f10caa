// SPDX-License-Identifier: Apache-2.0
// Highway's targets that the kernel files leave out: targets without a fused multiply-add, which the scalar definition
// replaces, and SVE of one length, which SVE of any length replaces. Include this file before every header of Highway.
#pragma once

#ifdef FOREBAY_KERNELS_WITHOUT_AVX512  // a sanitizer's build: one instruction set shows what all of them do
#define FOREBAY_AVX512_TARGETS (HWY_AVX3 | HWY_AVX3_DL)
#else
#define FOREBAY_AVX512_TARGETS 0
#endif
#define HWY_DISABLED_TARGETS \
  (HWY_SSSE3 | HWY_SSE4 | HWY_SVE_256 | HWY_SVE2_128 | FOREBAY_AVX512_TARGETS)
