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

// Direct transfers of 1 MiB through io_uring, 16 in flight, over a file of its own. It leaves that and fio's report
// in its folder, which is the caller's to remove.
//
// Threads  One, the main one.
class FioLimit {
 public:
  // Errors  E_OPTION   fio is not installed.
  //         E_SWAP_IO  fio did not do its work; its exit status.
  static absl::StatusOr<std::unique_ptr<FioLimit>> Create(const std::filesystem::path& folder,
                                                          uint64_t bytes);

  // GB/s of what is read and written.
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
