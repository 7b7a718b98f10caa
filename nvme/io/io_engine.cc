// SPDX-License-Identifier: Apache-2.0
#include "nvme/io/io_engine.h"

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_format.h"

namespace forebay::nvme {

absl::StatusOr<FileIndex> IoEngine::AllocateFileIndex() {
  for (uint32_t index = 0; index < kFilesMax; ++index) {
    if (file_taken_[index]) continue;
    file_taken_[index] = true;
    return FileIndex{index};
  }
  return absl::ResourceExhaustedError(
      absl::StrFormat("%d files are registered: that is the maximum", kFilesMax));
}

bool IoEngine::ReleaseFileIndex(FileIndex file) {
  const auto index = static_cast<uint32_t>(file);
  if (index >= kFilesMax || !file_taken_[index]) return false;
  file_taken_[index] = false;
  return true;
}

absl::Status IoEngine::Check(const IoRequest& request) const {
  const auto index = static_cast<uint32_t>(request.file);
  if (index >= kFilesMax || !file_taken_[index]) {
    return absl::InvalidArgumentError(
        absl::StrFormat("I/O on file %d, which is not registered", index));
  }
  if (request.kind == IoKind::kFlush) return absl::OkStatus();
  if (request.kind == IoKind::kEvent) {
    return absl::InvalidArgumentError("events are watched, not submitted");
  }
  const uint64_t bits = request.offset_bytes | request.size_bytes |
                        static_cast<uint64_t>(reinterpret_cast<uintptr_t>(request.data));
  if (bits % kIoAlignment != 0 || request.size_bytes == 0 || request.data == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrFormat("I/O of %d bytes at offset %d, memory %p: not a multiple of %d",
                        request.size_bytes, request.offset_bytes, request.data, kIoAlignment));
  }
  return absl::OkStatus();
}

}  // namespace forebay::nvme
