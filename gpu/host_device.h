// SPDX-License-Identifier: Apache-2.0
// The processor itself as a device: copies happen at once, on the calling thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "gpu/device.h"

namespace forebay::gpu {

class HostDevice final : public Device {
 public:
  HostDevice();

  std::string_view name() const override { return "host"; }
  bool is_host() const override { return true; }
  absl::StatusOr<std::unique_ptr<Stream>> MakeStream() override;
  absl::StatusOr<std::unique_ptr<Stream>> BorrowStream(uintptr_t handle) override;
  absl::StatusOr<std::optional<uint64_t>> FreeBytes() override { return std::nullopt; }
  absl::Status CheckReach(std::span<const std::byte> /*bytes*/) const override {
    return absl::OkStatus();
  }
  bool registers_read_only() const override { return true; }
  absl::StatusOr<std::unique_ptr<HostRegistration>> Register(std::span<const std::byte> bytes,
                                                             HostAccess access) override;

 private:
  class HostStream;
  class Memory;

  std::shared_ptr<Memory> memory_;
};

}  // namespace forebay::gpu
