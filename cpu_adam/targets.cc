#include "cpu_adam/targets.h"

#include <atomic>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cpu_adam/internal/dispatch.h"
#include "hwy/targets.h"
#include "protocol/error.h"

namespace forebay::cpu_adam {
namespace {

using internal::Kernels;

struct NamedTarget {
  int64_t bit;
  const char* name;
};

constexpr NamedTarget kTargets[] = {
    // best first
    {HWY_AVX3_DL, "avx3_dl"}, {HWY_AVX3, "avx3"}, {HWY_AVX2, "avx2"},
    {HWY_SVE2, "sve2"},       {HWY_SVE, "sve"},   {HWY_NEON, "neon"},
};

std::vector<Kernels> FindKernels() {
  std::vector<Kernels> found;
  for (const NamedTarget& target : kTargets) {
    const internal::UpdateKernels* updates = internal::UpdateKernelsOf(target.bit);
    const internal::StreamKernels* stream = internal::StreamKernelsOf(target.bit);
    if ((hwy::SupportedTargets() & target.bit) == 0 || updates == nullptr) continue;
    found.push_back({target.name, updates, stream});
  }
  found.push_back({"scalar", &internal::kScalarUpdateKernels, &internal::kScalarStreamKernels});
  return found;
}

const std::vector<Kernels>& Supported() {
  static const std::vector<Kernels> supported = FindKernels();
  return supported;
}

std::atomic<const Kernels*> chosen = nullptr;

}  // namespace

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
      "leave it out to use the best of them");
}

}  // namespace forebay::cpu_adam
