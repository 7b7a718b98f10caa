// SPDX-License-Identifier: Apache-2.0
#include "gpu/internal/cuda_driver.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "gpu/internal/shared_library.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"

namespace forebay::gpu::cuda {
namespace {

using protocol::ErrorId;
using protocol::MakeError;

absl::Status NoCuda(const std::string& cause) {
  return MakeError(ErrorId::kUnsupported, absl::StrCat("no CUDA on this machine: ", cause),
                   "install NVIDIA's driver (`nvidia-smi` shows it), or train on the CPU");
}

std::string VersionText(int version) {
  return absl::StrCat(version / 1000, ".", version % 1000 / 10);
}

}  // namespace

absl::Status Driver::Open(const std::string& library) {
  const auto opened = internal::SharedLibrary::Open(library);
  if (!opened.ok()) return NoCuda(std::string(opened.status().message()));
  if (!opened->Find("cuDriverGetVersion", cuDriverGetVersion) ||
      cuDriverGetVersion(&version_) != kSuccess) {
    return NoCuda(absl::StrCat(library, " is no CUDA driver"));
  }
  std::string missing;
#define FOREBAY_CUDA_FUNCTION(name, parameters) \
  if (!opened->Find(#name, name)) missing = #name;
#include "gpu/internal/cuda_functions.inc"
#undef FOREBAY_CUDA_FUNCTION
  if (version_ >= kDriverVersionMin && missing.empty()) return absl::OkStatus();
  return MakeError(ErrorId::kUnsupported,
                   absl::StrCat("the driver supports CUDA ", VersionText(version_),
                                missing.empty() ? "" : absl::StrCat(" and has no ", missing),
                                "; CUDA ", VersionText(kDriverVersionMin), " is the least"),
                   "install a newer driver of NVIDIA's");
}

absl::Status Driver::Start() {
  const CUresult started = cuInit(0);
  if (started == kNoDevice) return NoCuda("the driver finds no GPU");
  RETURN_IF_ERROR(Check(started, "cuInit"));
  RETURN_IF_ERROR(Check(cuDeviceGetCount(&device_count_), "cuDeviceGetCount"));
  return device_count_ > 0 ? absl::OkStatus() : NoCuda("the driver finds no GPU");
}

absl::StatusOr<std::shared_ptr<const Driver>> Driver::Load(const std::string& library) {
  auto driver = std::make_shared<Driver>();
  RETURN_IF_ERROR(driver->Open(library));
  RETURN_IF_ERROR(driver->Start());
  return driver;
}

absl::Status Driver::Check(CUresult result, std::string_view call) const {
  if (result == kSuccess) return absl::OkStatus();
  const char* name = nullptr;
  const char* text = nullptr;
  if (cuGetErrorName(result, &name) != kSuccess || name == nullptr) name = "unknown error";
  if (cuGetErrorString(result, &text) != kSuccess || text == nullptr) text = "no text";
  return MakeError(ErrorId::kDevice,
                   absl::StrCat(std::string(call), ": ", name, " (", result, "): ", text));
}

}  // namespace forebay::gpu::cuda
