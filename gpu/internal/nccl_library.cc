// SPDX-License-Identifier: Apache-2.0
#include "gpu/internal/nccl_library.h"

#include "absl/strings/str_cat.h"
#include "gpu/internal/shared_library.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"

namespace forebay::gpu::nccl {

using protocol::ErrorId;
using protocol::MakeError;

absl::Status Library::Open(const std::string& library) {
  const auto opened = internal::SharedLibrary::Open(library);
  if (!opened.ok()) {
    return MakeError(
        ErrorId::kUnsupported,
        absl::StrCat("no NCCL on this machine: ", std::string(opened.status().message())),
        "install libnccl2, or use the one that torch brings (LD_LIBRARY_PATH)");
  }
  std::string missing;
#define FOREBAY_NCCL_FUNCTION(name, parameters) \
  if (!opened->Find(#name, name)) missing = #name;
#include "gpu/internal/nccl_functions.inc"
#undef FOREBAY_NCCL_FUNCTION
  if (!opened->Find("ncclGetErrorString", ncclGetErrorString)) missing = "ncclGetErrorString";
  if (!opened->Find("ncclGetLastError", ncclGetLastError)) missing = "ncclGetLastError";
  int version = 0;
  const bool has_version = ncclGetVersion != nullptr && ncclGetVersion(&version) == kSuccess;
  if (missing.empty() && has_version && version >= kVersionMin) return absl::OkStatus();
  return MakeError(ErrorId::kUnsupported,
                   absl::StrCat(library, " is NCCL ", version / 10000, ".", version / 100 % 100,
                                missing.empty() ? "" : absl::StrCat(" and has no ", missing),
                                "; 2.14 is the least"),
                   "install a newer NCCL");
}

absl::StatusOr<std::shared_ptr<const Library>> Library::Load(const std::string& library) {
  auto nccl = std::make_shared<Library>();
  RETURN_IF_ERROR(nccl->Open(library));
  return nccl;
}

absl::Status Library::Check(ncclResult_t result, std::string_view call, ncclComm_t comm) const {
  if (result == kSuccess) return absl::OkStatus();
  const char* const text = ncclGetErrorString(result);
  const char* const last = ncclGetLastError(comm);
  return MakeError(
      result == kRemoteError ? ErrorId::kRankLost : ErrorId::kDevice,
      absl::StrCat(std::string(call), ": NCCL error ", result, " (", text == nullptr ? "?" : text,
                   ")", last == nullptr || *last == '\0' ? "" : absl::StrCat(": ", last)),
      "NCCL_DEBUG=WARN shows what NCCL met; start the job again");
}

}  // namespace forebay::gpu::nccl
