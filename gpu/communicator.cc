// SPDX-License-Identifier: Apache-2.0
#include "gpu/communicator.h"

#include "absl/strings/str_cat.h"
#include "protocol/error.h"
#include "protocol/os/status_macros.h"

namespace forebay::gpu {

using protocol::DType;
using protocol::ErrorId;
using protocol::MakeError;

absl::Status CheckAllGather(uint32_t size, size_t to_bytes, size_t from_bytes) {
  if (to_bytes == from_bytes * size) return absl::OkStatus();
  return MakeError(ErrorId::kRange,
                   absl::StrCat("an all-gather of ", from_bytes, " bytes from each of ", size,
                                " ranks into ", to_bytes, " bytes"));
}

absl::Status CheckReduceScatter(uint32_t size, size_t to_bytes, size_t from_bytes, DType dtype) {
  RETURN_IF_ERROR(CheckReduction(to_bytes, dtype));
  if (from_bytes == to_bytes * size) return absl::OkStatus();
  return MakeError(ErrorId::kRange,
                   absl::StrCat("a reduce-scatter of ", from_bytes, " bytes to each of ", size,
                                " ranks, which takes ", to_bytes, " bytes"));
}

absl::Status CheckReduction(size_t size_bytes, DType dtype) {
  const bool is_known =
      dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
  if (is_known && size_bytes % SizeBytes(dtype) == 0) return absl::OkStatus();
  return MakeError(ErrorId::kRange, absl::StrCat("a reduction of ", size_bytes, " bytes of ",
                                                 std::string(Name(dtype)),
                                                 ", not of whole elements of float32, "
                                                 "float16 or bfloat16"));
}

}  // namespace forebay::gpu
