// The limit of a disk as fio has it, where it is installed.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tools/forebay/bench_harness.h"

namespace forebay::tools {

// Direct transfers of 1 MiB through io_uring, 16 in flight, over a file of its own that is gone when it
// dies.
//
// Threads  One, the main one.
class FioLimit {
 public:
  // Errors  E_OPTION     fio is not installed.
  //         E_SWAP_PATH  no file can be made in `folder`.
  //         E_SWAP_IO    fio did not do its work; its exit status.
  static absl::StatusOr<std::unique_ptr<FioLimit>> Create(const std::string& folder,
                                                          uint64_t bytes);

  FioLimit(const FioLimit&) = delete;
  FioLimit& operator=(const FioLimit&) = delete;
  ~FioLimit();

  // GB/s of what is read and written.
  absl::StatusOr<Sample> RunReads() { return Run("read"); }
  absl::StatusOr<Sample> RunWrites() { return Run("write"); }
  absl::StatusOr<Sample> RunMixed() { return Run("rw"); }  // as many writes as reads

 private:
  FioLimit(std::string path, uint64_t bytes) : path_(std::move(path)), bytes_(bytes) {}
  std::string report_path() const { return path_ + ".json"; }
  absl::StatusOr<Sample> Run(const std::string& transfers);

  std::string path_;
  uint64_t bytes_;
};

}  // namespace forebay::tools
