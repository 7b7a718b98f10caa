// SPDX-License-Identifier: Apache-2.0
// An IoEngine that limits the rate of transfers of each file: for swap.limit_rate, and for benches that simulate a slower disk.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nvme/io/io_engine.h"

namespace forebay::nvme {

// Transfers start at once, but their completions are delayed. Each file has a queue for reads and writes together. A transfer
// of n bytes is due n / rate after its submission or after the preceding transfer is due, whichever is later. It is reported
// once it is due and the underlying engine has ended it. Idle time earns no credit. Flushes and events are not delayed. Wait()
// of the underlying engine does the waiting; nothing is polled.
//
// Threads  See IoEngine.
class RateLimitedEngine final : public IoEngine {
 public:
  using Clock = std::chrono::steady_clock;

  // `bytes_per_s`: rate of each FileIndex, above 0. Files beyond the list have the last rate. `now`: for tests alone; empty:
  // the machine's clock.
  RateLimitedEngine(std::unique_ptr<IoEngine> engine, std::vector<uint64_t> bytes_per_s,
                    std::function<Clock::time_point()> now = {});

  std::string_view name() const override { return engine_->name(); }
  absl::StatusOr<FileIndex> RegisterFile(int fd) override { return engine_->RegisterFile(fd); }
  void UnregisterFile(FileIndex file) override { engine_->UnregisterFile(file); }
  bool RegisterBuffer(std::span<std::byte> bytes) override {
    return engine_->RegisterBuffer(bytes);
  }
  void UnregisterBuffer(std::span<std::byte> bytes) override { engine_->UnregisterBuffer(bytes); }
  absl::Status Submit(const IoRequest& request) override;
  absl::Status WatchEventFd(int fd, uint64_t token) override {
    return engine_->WatchEventFd(fd, token);
  }
  void UnwatchEventFd(int fd) override { engine_->UnwatchEventFd(fd); }
  absl::StatusOr<size_t> Wait(std::chrono::nanoseconds timeout, std::span<Completion> out) override;

 private:
  struct Transfer {
    uint64_t token = 0;  // token of the caller
    Clock::time_point due = {};
  };
  struct Held {
    Clock::time_point due = {};
    uint64_t order = 0;  // order in which the underlying engine ended transfers
    uint32_t number = 0;
    Completion completion = {};

    bool operator>(const Held& other) const {
      return due != other.due ? due > other.due : order > other.order;
    }
  };

  Clock::time_point Due(const IoRequest& request);
  size_t DrainDue(std::span<Completion> out);
  size_t HoldEarly(std::span<Completion> ended);

  std::unique_ptr<IoEngine> engine_;
  std::vector<uint64_t> bytes_per_s_;
  std::function<Clock::time_point()> now_;
  // Time when the last transfer of each file is due.
  std::array<Clock::time_point, kFilesMax> free_at_{};
  std::vector<Transfer> transfers_;  // transfers by their token at the underlying engine
  std::vector<uint32_t> free_transfers_;
  std::vector<Held> held_;  // a heap, the next due first
  uint64_t ended_ = 0;
};

}  // namespace forebay::nvme
