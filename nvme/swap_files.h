// SPDX-License-Identifier: Apache-2.0
// The seam to the file system: what a Volume does once, blocking, when it is opened. Everything
// later goes through the IoEngine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace forebay::nvme {

// Name of the swap file in a path that is a directory.
inline constexpr const char* kSwapFileName = "forebay.swap";

struct PathOptions {
  // A directory (its file kSwapFileName is used), or a block device.
  std::string path;
  // > 0, rounded up to 4 KiB; what is reserved.
  uint64_t capacity_bytes = 0;
  // >= 1; share of the slots, by measured bandwidth for example.
  uint32_t weight = 1;
};

// kKept: the file stays, and the next opener reclaims or recovers it. kUnlinked: the file loses its
// name when it is opened, so that the space is free as soon as the process ends, however it ends.
enum class FileLife { kKept, kUnlinked };

// kReclaim: the volume is made anew. kRecover: the newest durable ledger is read back. kInspect: likewise, through
// descriptors that cannot write; nothing on the paths is changed.
enum class OpenMode { kReclaim, kRecover, kInspect };

// An open, locked path. Calls block; they are for Volume::Open() only.
class SwapFile {
 public:
  virtual ~SwapFile() = default;

  virtual int fd() const = 0;                 // for IoEngine::RegisterFile
  virtual std::string_view name() const = 0;  // "/mnt/a/forebay.swap", for messages

  virtual absl::Status Read(uint64_t offset_bytes, std::span<std::byte> bytes) = 0;
  virtual absl::Status Write(uint64_t offset_bytes, std::span<const std::byte> bytes) = 0;
  virtual absl::Status Sync() = 0;
  // After the last transfer: whoever opens the path next need not wait until the kernel lets go of the file, which io_uring
  // may hold for as long as its ring is not looked at.
  virtual void Unlock() = 0;
};

// Whether a path may be used, asked with the first 4 KiB of each that has them.
using CheckFirstPage =
    absl::FunctionRef<absl::Status(std::string_view name, std::span<const std::byte> page)>;

class SwapFileSystem {
 public:
  virtual ~SwapFileSystem() = default;

  // Checks every path, then locks all of them, then reserves all of them: each returned file has
  // its capacity_bytes. Nothing is left behind on an error, and nothing is reserved before every
  // check has passed; `check` is one of them. Waits until the disk has ended what a process that was killed has asked
  // it for, 20 s at most.
  //
  // Errors  E_SWAP_PATH   missing, neither directory nor block device, read-only, without O_DIRECT,
  //                       or named twice; with kRecover and kInspect also: no file, or shorter than its
  //                       capacity.
  //         E_SWAP_NOSPC  needed and free bytes, by path.
  //         E_BUSY        another process holds the path; its pid. Or transfers of a dead one have not ended.
  virtual absl::StatusOr<std::vector<std::unique_ptr<SwapFile>>> Open(
      std::span<const PathOptions> paths, OpenMode mode, FileLife life, CheckFirstPage check) = 0;
};

// The real one: O_DIRECT, flock, fallocate.
std::unique_ptr<SwapFileSystem> MakePosixSwapFileSystem();

}  // namespace forebay::nvme
