#include "cpu_adam/targets.h"

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

std::vector<Kernels> FindKernels() {
  using namespace internal;  // NOLINT: the tables alone
  std::vector<Kernels> found;
  for (const NamedTarget& target : kTargets) {
    if ((hwy::SupportedTargets() & target.bit) == 0 || StreamKernelsOf(target.bit) == nullptr) {
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
  FOREBAY_CHECK(false);  // no such pair of format and weights
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
