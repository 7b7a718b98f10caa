// SPDX-License-Identifier: Apache-2.0
// The CUDA driver, loaded at run time.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpu/internal/cuda_types.h"

namespace forebay::gpu::cuda {

inline constexpr int kDriverVersionMin = 12000;  // CUDA 12.0

// Functions of the CUDA driver, and the open library.
//
// Threads  Any.
class Driver {
 public:
#define FOREBAY_CUDA_FUNCTION(name, parameters) CUresult(*name) parameters = nullptr;
#include "gpu/internal/cuda_functions.inc"
#undef FOREBAY_CUDA_FUNCTION

  // `library` as dlopen(3) takes it.
  //
  // Errors  E_UNSUPPORTED  no library, an older driver, or no device.
  static absl::StatusOr<std::shared_ptr<const Driver>> Load(const std::string& library);

  // OK, or E_DEVICE with CUDA's name and text of `result`, which `call` returned.
  absl::Status Check(CUresult result, std::string_view call) const;

  int device_count() const { return device_count_; }
  int version() const { return version_; }  // 12040: 12.4

 private:
  absl::Status Open(const std::string& library);
  absl::Status Start();

  int version_ = 0;
  int device_count_ = 0;
};

}  // namespace forebay::gpu::cuda
