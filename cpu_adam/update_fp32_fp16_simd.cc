// The update of a float32 master beside a binary16 image, for every instruction set that has a fused multiply-add. Includes its contract and Highway
// alone; the bits are those of internal/update_scalar.cc.

#ifndef HWY_DISABLED_TARGETS
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4)  // no fused multiply-add
#endif

#include <type_traits>

#include "cpu_adam/internal/kernel_table.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu_adam/update_fp32_fp16_simd.cc"
#include "hwy/cache_control.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace forebay::cpu_adam::internal::HWY_NAMESPACE {
#if HWY_TARGET != HWY_SCALAR && HWY_TARGET != HWY_EMU128

namespace {
#include "cpu_adam/internal/planes_simd.inc"
#include "cpu_adam/internal/update_simd.inc"
}  // namespace

extern const FormatKernels kFp32Fp16Kernels;
const FormatKernels kFp32Fp16Kernels = FOREBAY_KERNELS(StateFormat::kFp32Fp16);
#undef FOREBAY_KERNELS

#endif  // a target with vectors
}  // namespace forebay::cpu_adam::internal::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "cpu_adam/internal/per_target.h"

namespace forebay::cpu_adam::internal {

FOREBAY_TABLE_OF_TARGET(FormatKernels, Fp32Fp16KernelsOf, kFp32Fp16Kernels)

}  // namespace forebay::cpu_adam::internal
#endif  // HWY_ONCE
