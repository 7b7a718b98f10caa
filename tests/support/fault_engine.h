// SPDX-License-Identifier: Apache-2.0
// An IoEngine that injects faults into the transfers of another engine.
#pragma once

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nvme/io/io_engine.h"

namespace forebay::testing {

struct IoFault {
  static constexpr uint64_t kForEver = std::numeric_limits<uint64_t>::max();

  uint64_t operation = 0;  // first faulty operation, counted from 0 at SetFault()
  uint64_t count = 1;      // number of consecutive faulty operations
  int error_number = 0;    // above 0: faulty operations fail with this errno and transfer nothing
  // Faulty reads and writes are short unless error_number or hangs is set. They report `short_bytes` bytes; if `short_by` is
  // set, they report `short_bytes` fewer bytes than requested.
  int64_t short_bytes = 0;
  bool short_by = false;
  bool hangs = false;  // faulty operations do not end before EndHung()
};

// An engine that wraps `inner`. Flushes are never short. A short transfer moves at most the whole 4 KiB pieces of its reported
// size.
class FaultEngine final : public nvme::IoEngine {
 public:
  explicit FaultEngine(nvme::IoEngine& inner) : inner_(inner) {}

  void SetFault(IoFault fault);
  void ClearFault() { fault_.count = 0; }
  uint64_t operations() const { return operations_; }  // since SetFault()
  uint64_t fired() const { return fired_; }            // faults since SetFault()

  // Submits hanging transfers again, in their order.
  absl::Status EndHung();
  size_t hung() const { return hung_.size(); }

  std::string_view name() const override { return inner_.name(); }
  absl::StatusOr<nvme::FileIndex> RegisterFile(int fd) override { return inner_.RegisterFile(fd); }
  void UnregisterFile(nvme::FileIndex file) override { inner_.UnregisterFile(file); }
  bool RegisterBuffer(std::span<std::byte> bytes) override { return inner_.RegisterBuffer(bytes); }
  void UnregisterBuffer(std::span<std::byte> bytes) override { inner_.UnregisterBuffer(bytes); }
  absl::Status Submit(const nvme::IoRequest& request) override;
  absl::Status WatchEventFd(int fd, uint64_t token) override {
    return inner_.WatchEventFd(fd, token);
  }
  void UnwatchEventFd(int fd) override { inner_.UnwatchEventFd(fd); }
  absl::StatusOr<size_t> Wait(std::chrono::nanoseconds timeout,
                              std::span<nvme::Completion> out) override;

 private:
  bool Fires();

  nvme::IoEngine& inner_;
  IoFault fault_{.operation = 0, .count = 0};
  uint64_t operations_ = 0;
  uint64_t fired_ = 0;
  std::vector<nvme::IoRequest> hung_;
  std::vector<nvme::Completion> ready_;  // faulty completions that Wait() has not returned yet
  // Requests in `inner_` and their reported results.
  std::vector<std::pair<nvme::IoRequest, int64_t>> short_;
};

}  // namespace forebay::testing
