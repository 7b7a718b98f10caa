// SPDX-License-Identifier: Apache-2.0
// NCCL, loaded at run time.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpu/internal/nccl_types.h"

namespace forebay::gpu::nccl {

// Threads  Any.
class Library {
 public:
#define FOREBAY_NCCL_FUNCTION(name, parameters) ncclResult_t(*name) parameters = nullptr;
#include "gpu/internal/nccl_functions.inc"
#undef FOREBAY_NCCL_FUNCTION
  const char* (*ncclGetErrorString)(ncclResult_t) = nullptr;
  const char* (*ncclGetLastError)(ncclComm_t) = nullptr;

  // `library` as dlopen(3) takes it.
  //
  // Errors  E_UNSUPPORTED  no library, or one older than 2.14.
  static absl::StatusOr<std::shared_ptr<const Library>> Load(const std::string& library);

  // OK, or an error with NCCL's text of `result`, which `call` returned: E_RANK_LOST where it says that
  // another rank failed, else E_DEVICE. `comm` may be null.
  absl::Status Check(ncclResult_t result, std::string_view call, ncclComm_t comm) const;

 private:
  absl::Status Open(const std::string& library);
};

}  // namespace forebay::gpu::nccl
