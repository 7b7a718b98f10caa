// The processor itself as a device: copies happen at once, on the calling thread.
#pragma once

#include <memory>
#include <span>
#include <string_view>

#include "gpu/device.h"

namespace forebay::gpu {

class HostDevice final : public Device {
 public:
  std::string_view name() const override { return "host"; }
  absl::StatusOr<std::unique_ptr<Stream>> MakeStream() override;
  absl::StatusOr<std::unique_ptr<Stream>> BorrowStream(uintptr_t handle) override;
  bool registers_read_only() const override { return true; }
  absl::StatusOr<std::unique_ptr<HostRegistration>> Register(std::span<const std::byte> bytes,
                                                             HostAccess access) override;
};

}  // namespace forebay::gpu
