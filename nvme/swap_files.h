// SPDX-License-Identifier: Apache-2.0
// Interface to the file system for the blocking steps of Volume::Open(). Later transfers use the IoEngine.
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
  // A directory, whose file kSwapFileName is used, or a block device.
  std::string path;
  // Bytes to reserve; > 0, rounded up to a multiple of 4 KiB.
  uint64_t capacity_bytes = 0;
  // Weight of the path when slots are spread over paths, for example its measured bandwidth; >= 1.
  uint32_t weight = 1;
};

// Life of a swap file. kKept: the file remains, and the next opener reclaims or recovers it. kUnlinked: the file loses its name
// when it is opened, so that its space is freed whenever the process ends, even if it is killed.
enum class FileLife { kKept, kUnlinked };

// Way to open a volume. kReclaim: creates an empty volume. kRecover: reads the newest durable ledger. kInspect: reads the
// newest durable ledger through read-only descriptors; changes nothing on the paths.
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
  // Unlocks the path after the last transfer, so that the next opener need not wait until the kernel releases the file.
  // io_uring may hold the file for as long as its ring is not polled.
  virtual void Unlock() = 0;
};

// Checks whether a path may be used. Called with the first 4 KiB of each path that has 4 KiB.
using CheckFirstPage =
    absl::FunctionRef<absl::Status(std::string_view name, std::span<const std::byte> page)>;

class SwapFileSystem {
 public:
  virtual ~SwapFileSystem() = default;

  // Checks every path (also with `check`), then locks all paths, then reserves capacity_bytes on each. An error changes
  // nothing: no path is reserved before all checks have passed. Waits up to 20 s until the disk has ended transfers of a killed
  // process.
  //
  // Errors  E_SWAP_PATH   missing, neither directory nor block device, read-only, without O_DIRECT,
  //                       or named twice; with kRecover and kInspect also: no file, or shorter than its
  //                       capacity.
  //         E_SWAP_NOSPC  needed and free bytes, by path.
  //         E_BUSY        another process holds the path; its pid. Or transfers of a dead one have not ended.
  virtual absl::StatusOr<std::vector<std::unique_ptr<SwapFile>>> Open(
      std::span<const PathOptions> paths, OpenMode mode, FileLife life, CheckFirstPage check) = 0;
};

// Returns the file system of the machine: O_DIRECT, flock, fallocate.
std::unique_ptr<SwapFileSystem> MakePosixSwapFileSystem();

}  // namespace forebay::nvme
