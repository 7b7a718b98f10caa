// SPDX-License-Identifier: Apache-2.0
// An IoEngine that lets the transfers of a file end no faster than a given rate: for benches of a disk that
// is slower than the one that is there.
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

// Transfers start at once. Each file is a queue, reads and writes together: a transfer of n bytes is
// reported n / rate after its submission, or after the one before it where that is later; or when the
// engine below has ended it, if that is later still. Time without transfers earns nothing. Flushes and
// events pass. Waiting is the engine's below: nothing is polled.
//
// Threads  See IoEngine.
class RateLimitedEngine final : public IoEngine {
 public:
  using Clock = std::chrono::steady_clock;

  // `bytes_per_s`: by FileIndex, each above 0; files beyond them have the last one's rate. `now`: tests
  // alone; empty: the machine's clock.
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
    uint64_t token = 0;  // the caller's
    Clock::time_point due = {};
  };
  struct Held {
    Clock::time_point due = {};
    uint64_t order = 0;  // in which the engine below ended them
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
  std::array<Clock::time_point, kFilesMax> free_at_{};  // by file: the end of its queue
  std::vector<Transfer> transfers_;                     // by the token that the engine below gets
  std::vector<uint32_t> free_transfers_;
  std::vector<Held> held_;  // a heap, the next due first
  uint64_t ended_ = 0;
};

}  // namespace forebay::nvme
