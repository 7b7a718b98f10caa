// SPDX-License-Identifier: Apache-2.0
// Measures with fio, if it is installed, the rates that a disk can reach.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tools/forebay/bench_harness.h"

namespace forebay::tools {

// Runs fio with direct transfers of 1 MiB through io_uring, 16 in flight. The data file and fio's report stay in the folder;
// the caller removes the folder.
//
// Threads  One, the main one.
class FioLimit {
 public:
  // Errors  E_OPTION   fio is not installed.
  //         E_SWAP_IO  fio failed; names its exit status.
  static absl::StatusOr<std::unique_ptr<FioLimit>> Create(const std::filesystem::path& folder,
                                                          uint64_t bytes);

  // Run fio. Each sample's value is GB/s of the bytes read plus the bytes written.
  absl::StatusOr<Sample> RunReads() { return Run("read"); }
  absl::StatusOr<Sample> RunWrites() { return Run("write"); }
  absl::StatusOr<Sample> RunMixed() { return Run("rw"); }  // as many writes as reads

 private:
  FioLimit(std::filesystem::path folder, uint64_t bytes)
      : folder_(std::move(folder)), bytes_(bytes) {}
  absl::StatusOr<Sample> Run(const std::string& transfers);

  std::filesystem::path folder_;
  uint64_t bytes_;
};

}  // namespace forebay::tools
