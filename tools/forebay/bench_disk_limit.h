// SPDX-License-Identifier: Apache-2.0
// Measures the limit of a disk by a bare loop of direct transfers. The daemon's transfers are compared with this limit.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nvme/io/io_engine.h"
#include "pinned_mem/pinned_arena.h"
#include "protocol/os/unique_fd.h"
#include "tools/forebay/bench_harness.h"

namespace forebay::tools {

// A file of two halves of `bytes` each, in pieces of 1 MiB, of which 16 are in flight.
//
// Threads  One.
class DiskLimit {
 public:
  // Errors  E_SWAP_PATH, E_SWAP_NOSPC; those of the engine.
  static absl::StatusOr<std::unique_ptr<DiskLimit>> Create(const std::string& folder,
                                                           uint64_t bytes);

  // A part of an existing, fully written file: 2 * `bytes` bytes from `begin_bytes` on. The daemon and the bare loop measure
  // the same part, because the place on the disk also decides the speed.
  struct Part {
    std::string path;
    uint64_t begin_bytes = 0;
    uint64_t bytes = 0;
  };
  static absl::StatusOr<std::unique_ptr<DiskLimit>> Over(const Part& part);

  DiskLimit() = default;
  DiskLimit(const DiskLimit&) = delete;
  DiskLimit& operator=(const DiskLimit&) = delete;

  // RunReads() reads one half of the file, RunWrites() writes the other half, and RunCopies() copies one half to the other.
  // Each sample's value is GB/s of the bytes read plus the bytes written.
  absl::StatusOr<Sample> RunReads() { return Run(Transfers::kReads); }
  absl::StatusOr<Sample> RunWrites() { return Run(Transfers::kWrites); }
  absl::StatusOr<Sample> RunCopies() { return Run(Transfers::kCopies); }

 private:
  static constexpr uint32_t kDepth = 16;
  enum class Transfers : uint8_t { kReads, kWrites, kCopies };

  absl::Status Prepare();
  absl::StatusOr<Sample> Run(Transfers transfers);
  absl::Status Submit(nvme::IoKind kind, uint32_t slot, uint64_t piece);

  protocol::UniqueFd file_;
  std::unique_ptr<pinned_mem::PinnedArena> buffer_;
  std::unique_ptr<nvme::IoEngine> engine_;
  nvme::FileIndex index_{};
  uint64_t begin_bytes_ = 0;
  uint64_t pieces_ = 1;
  uint64_t read_half_ = 0;
  uint64_t write_half_ = 1;
};

}  // namespace forebay::tools
