// What the kernel files leave out of Highway's targets: those without a fused multiply-add, whose
// place the scalar definition takes, and SVE of one length, where SVE of any length serves. Comes
// before every header of Highway.
#pragma once

#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_SVE_256 | HWY_SVE2_128)
