// SPDX-License-Identifier: Apache-2.0
// The IoEngine on plain system calls, for machines that forbid io_uring.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nvme/io/io_engine.h"

namespace forebay::nvme {

// Runs pread, pwrite and fdatasync on a few threads, and watches eventfds with epoll.
//
// Limits  Each thread runs one transfer at a time. RegisterBuffer() always returns false.
// Source  pread(2), fdatasync(2), epoll(7).
class ThreadEngine final : public IoEngine {
 public:
  // `threads`: 1 to 64.
  //
  // Errors  kResourceExhausted  no descriptor or thread could be created.
  static absl::StatusOr<std::unique_ptr<ThreadEngine>> Create(uint32_t threads);

  ~ThreadEngine() override;

  std::string_view name() const override { return "threads"; }
  absl::StatusOr<FileIndex> RegisterFile(int fd) override;
  void UnregisterFile(FileIndex file) override;
  bool RegisterBuffer(std::span<std::byte> bytes) override;
  void UnregisterBuffer(std::span<std::byte> bytes) override;
  absl::Status Submit(const IoRequest& request) override;
  absl::Status WatchEventFd(int fd, uint64_t token) override;
  void UnwatchEventFd(int fd) override;
  absl::StatusOr<size_t> Wait(std::chrono::nanoseconds timeout, std::span<Completion> out) override;

 private:
  struct State;
  explicit ThreadEngine(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

}  // namespace forebay::nvme
