// SPDX-License-Identifier: Apache-2.0
#include "cpu_adam/targets.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <atomic>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cpu_adam/internal/dispatch.h"
#include "hwy/targets.h"
#include "protocol/error.h"
#include "protocol/optimizer.h"
#include "protocol/os/check.h"

namespace forebay::cpu_adam {
namespace {

using internal::Kernels;

struct NamedTarget {
  int64_t bit;
  const char* name;
};

constexpr NamedTarget kTargets[] = {
    // best first
    {HWY_AVX3, "avx3"}, {HWY_AVX2, "avx2"}, {HWY_SVE2, "sve2"},
    {HWY_SVE, "sve"},   {HWY_NEON, "neon"},
};

#if defined(__x86_64__)
// Targets among AVX2 and AVX3 of Highway that this processor and the operating system can run. A kernel file for a target is
// compiled with all of the bits below. hwy::SupportedTargets() would need Highway's library, of which Debian has no archive.
//
// Source  Intel SDM, volume 2, CPUID and XGETBV; HWY_TARGET_STR of hwy/ops/set_macros-inl.h.
int64_t RunnableTargets() {
  constexpr unsigned kLeaf1Ecx = bit_SSE3 | bit_PCLMUL | bit_SSSE3 | bit_FMA | bit_SSE4_1 |
                                 bit_SSE4_2 | bit_AES | bit_OSXSAVE | bit_AVX | bit_F16C;
  constexpr unsigned kLeaf7EbxAvx2 = bit_BMI | bit_AVX2 | bit_BMI2;
  constexpr unsigned kLeaf7EbxAvx3 =
      bit_AVX512F | bit_AVX512DQ | bit_AVX512CD | bit_AVX512BW | bit_AVX512VL;
  constexpr unsigned kLzcnt = 1u << 5;
  constexpr unsigned kXmmYmm = 6;  // bits of XCR0: the kernel saves these registers
  constexpr unsigned kMasksZmm = 7u << 5;

  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & kLeaf1Ecx) != kLeaf1Ecx) return 0;
  if (__get_cpuid(0x80000001, &a, &b, &c, &d) == 0 || (c & kLzcnt) == 0) return 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (b & kLeaf7EbxAvx2) != kLeaf7EbxAvx2)
    return 0;
  unsigned saved = 0, saved_high = 0;
  __asm__("xgetbv" : "=a"(saved), "=d"(saved_high) : "c"(0));
  if ((saved & kXmmYmm) != kXmmYmm) return 0;
  if ((b & kLeaf7EbxAvx3) != kLeaf7EbxAvx3 || (saved & kMasksZmm) != kMasksZmm) return HWY_AVX2;
  return HWY_AVX2 | HWY_AVX3;
}
#else
int64_t RunnableTargets() { return hwy::SupportedTargets(); }
#endif

std::vector<Kernels> FindKernels() {
  using namespace internal;  // NOLINT: the tables alone
  std::vector<Kernels> found;
  for (const NamedTarget& target : kTargets) {
    if ((RunnableTargets() & target.bit) == 0 || StreamKernelsOf(target.bit) == nullptr) {
      continue;
    }
    found.push_back({.name = target.name,
                     .formats = {Fp32KernelsOf(target.bit), ExactKernelsOf(target.bit),
                                 Bf16KernelsOf(target.bit), Int8KernelsOf(target.bit),
                                 Fp32Bf16KernelsOf(target.bit), Fp32Fp16KernelsOf(target.bit)},
                     .stream = StreamKernelsOf(target.bit)});
  }
  Kernels scalar{.name = "scalar", .formats = {}, .stream = &kScalarStreamKernels};
  for (size_t i = 0; i < kStateFormatCount; ++i) scalar.formats[i] = &kScalarFormats[i];
  found.push_back(scalar);
  return found;
}

const std::vector<Kernels>& Supported() {
  static const std::vector<Kernels> supported = FindKernels();
  return supported;
}

std::atomic<const Kernels*> chosen = nullptr;

}  // namespace

const internal::FormatKernels& Kernels::of(protocol::StateFormat format) const {
  for (size_t i = 0; i < protocol::kStateFormatCount; ++i) {
    if (protocol::kStateFormats[i] == format) return *formats[i];
  }
  FOREBAY_CHECK(false);  // no kernels for this pair of format and weights
  return *formats[0];
}

const Kernels& internal::ChosenKernels() {
  const Kernels* kernels = chosen.load(std::memory_order_acquire);
  return kernels != nullptr ? *kernels : Supported().front();
}

std::vector<std::string> SupportedTargets() {
  std::vector<std::string> names;
  for (const Kernels& kernels : Supported()) names.emplace_back(kernels.name);
  return names;
}

std::string ChosenTarget() { return internal::ChosenKernels().name; }

absl::Status ForceTarget(std::string_view name) {
  if (name.empty() || name == "best") {
    chosen.store(nullptr, std::memory_order_release);
    return absl::OkStatus();
  }
  for (const Kernels& kernels : Supported()) {
    if (name != kernels.name) continue;
    chosen.store(&kernels, std::memory_order_release);
    return absl::OkStatus();
  }
  return protocol::MakeError(
      protocol::ErrorId::kOption,
      absl::StrCat("instruction set \"", std::string(name), "\" is not one of ",
                   absl::StrJoin(SupportedTargets(), ", ")),
      "leave FOREBAY_CPU_TARGET and update.target out to use the best of them");
}

}  // namespace forebay::cpu_adam
