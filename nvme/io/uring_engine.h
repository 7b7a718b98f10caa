// SPDX-License-Identifier: Apache-2.0
// The IoEngine on io_uring.
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

// An io_uring, created disabled, with SINGLE_ISSUER and DEFER_TASKRUN if the kernel supports them. Any thread may therefore
// create the ring and register with it; the first thread that uses the ring owns it. Multishot polls watch the eventfds, and
// reads that never block drain them.
//
// Threads  See IoEngine. The destructor too belongs to the owning thread while transfers are in
//          flight; on another one it cannot wait for them.
// Source   io_uring_setup(2), io_uring_enter(2), io_uring_register(2), liburing 2.3.
class UringEngine final : public IoEngine {
 public:
  // `depth`: number of transfers that the kernel holds at once, 1 to kBacklogMax. Further transfers wait in this object.
  //
  // Errors  kUnavailable  the kernel or a filter forbids io_uring; the cause.
  static absl::StatusOr<std::unique_ptr<UringEngine>> Create(uint32_t depth);

  ~UringEngine() override;

  std::string_view name() const override { return "io_uring"; }
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
  explicit UringEngine(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

}  // namespace forebay::nvme
